"""What bitsandbytes keeps of a quantised model, against the closed form of `coefsfl cost --dtype int8 nf4`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForSequenceClassification

from hf_coefsfl import split_model
from hf_coefsfl.analysis.cost import CostModel, Round, Run
from hf_coefsfl.analysis.storage import QUANTISED, block_weights, stored_as
from hf_coefsfl.methods import make_method
from hf_coefsfl.split.lora import default_lora
from hf_coefsfl.split.quantized import quantised_layers
from tests.support.quantised import need_bitsandbytes, quantised

need_bitsandbytes()


def llama() -> LlamaForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=99, **sizes, num_labels=3, pad_token_id=0, attn_implementation="eager")
    return LlamaForSequenceClassification(config).bfloat16()


def held(layer: Any) -> dict[int, int]:
    """Return the bytes of each storage that a layer keeps for its weight, wherever it does."""
    found: dict[int, int] = {}
    todo: list[Any] = [layer.weight, getattr(layer, "state", None), getattr(layer, "quant_state", None)]
    seen: set[int] = set()
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            found[thing.data_ptr()] = thing.untyped_storage().nbytes()
        if isinstance(thing, Tensor) or type(thing).__name__ in ("QuantState", "MatmulLtState"):
            todo += [value for name, value in vars(thing).items() if name != "module"]
    return found


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_the_closed_form_is_what_is_kept(kind: str) -> None:
    model = quantised(llama(), kind, dtype=torch.bfloat16)
    sizes = block_weights(split_model(get_peft_model(llama(), default_lora(llama())), 2)).sizes
    expected = sum(QUANTISED[kind](sizes[f"{side}_weights"], sizes[f"{side}_rows"]) for side in ("client", "server"))
    ids = torch.arange(1, 9).view(1, 8)
    for mode in (True, False):  # nothing is added by the first pass
        model.train(mode)(input_ids=ids)
        kept = {key: size for _, layer in quantised_layers(model) for key, size in held(layer).items()}
        assert expected <= sum(kept.values()) < 1.02 * expected
    assert len([name for name, _ in quantised_layers(model)]) == 4 * 7


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_the_cost_of_a_half_is_its_size(kind: str) -> None:
    (cost,) = CostModel(llama(), sequence_length=8).costs(make_method("vanilla"), 2, Round(2, 2), Run())
    model = quantised(llama(), kind, dtype=torch.bfloat16)
    split = split_model(get_peft_model(model, default_lora(model)), 2)
    stored = stored_as(cost, kind)
    assert stored.footprint is not None
    assert split.client.nbytes() == pytest.approx(stored.client_memory["weights"], rel=0.02)
    assert split.server.nbytes() == pytest.approx(stored.footprint.server["weights"], rel=0.02)
    assert split.client.nbytes() < 0.8 * cost.client_memory["weights"]
