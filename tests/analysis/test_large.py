"""Large models: the route without weights and with few blocks against the one with weights and all blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from hf_coefsfl.analysis.backbones import LARGE_BACKBONES, build_model
from hf_coefsfl.analysis.cost import Cost, CostModel, Round
from hf_coefsfl.analysis.depth import DeepCostModel, blocks_are_equal, cost_model
from hf_coefsfl.analysis.memory import Run, follow
from hf_coefsfl.analysis.storage import stored_as
from hf_coefsfl.analysis.weightless import Shapes, is_weightless, without_weights
from hf_coefsfl.methods import make_method
from tests.support.selection import slow_except

_SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
_TEXT = _SIZES | {"vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 1}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (AutoModelForCausalLM, _TEXT | {"num_key_value_heads": 2}),
    "roberta": (AutoModelForSequenceClassification, _TEXT),
    "vit": (AutoModelForImageClassification, _SIZES | {"image_size": 16, "patch_size": 4}),
}
TOKENS = 16


def builder(kind: str, **changes: Any) -> Callable[[], PreTrainedModel]:
    auto, sizes = KINDS[kind]
    dtype = changes.pop("dtype", torch.float32)
    config = AutoConfig.for_model(kind, **(sizes | changes))
    return lambda: auto.from_config(config, attn_implementation="eager", dtype=dtype)


@pytest.mark.parametrize("kind", slow_except("llama", of=list(KINDS)))
def test_without_weights_all_is_counted_as_with_them(kind: str) -> None:
    real = CostModel(builder(kind)(), sequence_length=TOKENS)
    fake = CostModel(without_weights(builder(kind)), sequence_length=TOKENS)
    assert is_weightless(fake.model) and not is_weightless(real.model)
    method = make_method("coef_j")
    assert fake.measure(method, 1, [2, 1]) == real.measure(method, 1, [2, 1])
    followed = [follow(model, method, 1, [2, 2]) for model in (fake, real)]
    for values in zip(*((h.total, h.own, h.copies) for h in followed), strict=True):
        assert values[0].max() == pytest.approx(values[1].max(), rel=0.01)
    assert followed[0].copies.max() == 4 * 32 * 48  # of the largest linear weight


def test_an_alignment_is_counted_without_weights_too() -> None:
    """Whether a gradient is finite is asked there, of a tensor that has no values."""
    method, plan = make_method("fsl_sage", {"align_epochs": 1}), Round(4, 2)
    models = (build(builder("llama")) for build in (lambda make: make(), without_weights))
    real, fake = (CostModel(model, sequence_length=TOKENS).costs(method, 1, plan) for model in models)
    assert len(real) == 2 and fake == real


@pytest.mark.parametrize("head", ["fc", "mlp"])
def test_a_head_that_is_too_large_for_values_is_counted_too(head: str) -> None:
    """Its weights are fake, its biases are not, and the client trains a copy of it."""
    method = make_method("acc_sfl", {"head": head})
    real = CostModel(builder("llama")(), sequence_length=TOKENS).measure(method, 1, [2, 1])
    with mock.patch("hf_coefsfl.analysis.weightless.SMALL", 2**8):
        fake = CostModel(without_weights(builder("llama")), sequence_length=TOKENS).measure(method, 1, [2, 1])
        assert is_weightless(method.network)
    assert fake == real


def test_what_an_operation_gave_is_remembered_by_shapes_types_and_memory() -> None:
    with Shapes():
        weight = without_weights(builder("vit")).get_submodule("classifier").weight.detach()
        for _ in range(2):
            sizes = [(weight + n).dtype for n in (True, 1, 1.0)], [(weight.int() + n).dtype for n in (1, 1.0)]
            assert sizes == ([torch.float32] * 3, [torch.int32, torch.float32])
            made, view, hidden = weight * 2, weight.view(-1), torch.ops.aten._unsafe_view(weight, [-1])
            memory = [t.untyped_storage()._cdata for t in (weight, view, hidden, made)]
            assert memory[:3] == memory[:1] * 3 and memory[3] != memory[0]
            assert (weight.T * 2).stride() == weight.T.stride() and weight.mul_(2) is weight
            assert [t.shape for t in (weight * 2).split(2)] == [t.shape for t in weight.split(2)]


def test_a_method_that_copies_many_blocks_is_refused() -> None:
    few = DeepCostModel(builder("llama", num_hidden_layers=7), sequence_length=TOKENS)
    with pytest.raises(ValueError, match=r"FSL-SAGE copies 3 blocks of the server"):
        few.costs(make_method("fsl_sage"), 2, Round(4, 2))


@pytest.mark.slow
def test_few_blocks_give_every_cut() -> None:
    build = builder("llama", num_hidden_layers=7)
    options: dict[str, Any] = {"sequence_length": TOKENS, "gradient_checkpointing": True}
    whole, few = CostModel(build(), **options), DeepCostModel(build, **options)
    assert few.cuts == whole.cuts
    method, plan = make_method("coef_d"), Round(12, 4)
    for cut in (1, 5, 6):
        (expected,), (found,) = (model.costs(method, cut, plan, Run()) for model in (whole, few))
        for name in ("cut", "transfers", "up", "down", "client_flops", "server_flops", "block_weights"):
            assert getattr(found, name) == getattr(expected, name), name
        assert found.client_memory == expected.client_memory
        assert found.footprint is not None and expected.footprint is not None
        # Another operation may have the peak if there are more blocks.
        for part in ("process", "client", "server", "disk"):
            sizes = getattr(expected.footprint, part)
            assert sum(getattr(found.footprint, part).values()) == pytest.approx(sum(sizes.values()), rel=0.01), part


def test_quantised_weights_by_hand() -> None:
    """One block on each side: seven linear layers of 32x32 (2), 32x16 (2) and 32x48 (3), first in bfloat16."""
    build = builder("llama", num_hidden_layers=2, dtype=torch.bfloat16)
    (cost,) = CostModel(build(), sequence_length=TOKENS).costs(make_method("vanilla"), 1, Round(4, 2), Run())
    weights, rows = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48, 2 * 32 + 2 * 16 + 2 * 48 + 32
    expected = {"bfloat16": 2 * weights, "int8": weights + 4 * rows, "nf4": weights // 2 + weights // 64 * 4}

    def sizes(cost: Cost) -> list[int]:
        assert cost.footprint is not None
        both = cost.footprint.process["weights"] // 2
        return [both, *(p["weights"] for p in (cost.client_memory, cost.footprint.client, cost.footprint.server))]

    for dtype, size in expected.items():
        stored = stored_as(cost, dtype)
        assert stored.dtype == dtype
        assert {a - b for a, b in zip(sizes(cost), sizes(stored), strict=True)} == {2 * weights - size}
        assert stored.footprint is not None and cost.footprint is not None
        more = stored.footprint.server["round"] - cost.footprint.server["round"]
        assert 0 <= more <= 2 * 32 * 48 and (more == 0 or dtype != "bfloat16")  # a copy of the largest at most
        higher = replace(cost.footprint, copied_peaks={name: n + 7 for name, n in cost.footprint.copied_peaks.items()})
        with_copies = stored_as(replace(cost, footprint=higher), dtype).footprint
        assert with_copies is not None
        assert with_copies.server["round"] == stored.footprint.server["round"] + (0 if dtype == "bfloat16" else 7)


def test_bfloat16_halves_the_weights_and_the_exchange() -> None:
    full, half = (
        CostModel(builder("llama", dtype=dtype)(), sequence_length=TOKENS) for dtype in (torch.float32, torch.bfloat16)
    )
    counted = [model.measure(make_method("vanilla"), 1, [2]) for model in (full, half)]
    assert counted[0]["up.smashed_data"] == 2 * counted[1]["up.smashed_data"]
    assert counted[0]["memory.optimizer"] == counted[1]["memory.optimizer"]  # adapters are float32
    assert counted[0]["client_flops"] == counted[1]["client_flops"]


def test_checkpointing_computes_more_and_keeps_less() -> None:
    usual, recomputed = (
        CostModel(builder("llama")(), sequence_length=TOKENS, gradient_checkpointing=given) for given in (False, True)
    )
    counted = [model.measure(make_method("vanilla"), 2, [2]) for model in (usual, recomputed)]
    forward = [model.measure(make_method("mu_splitfed"), 2, [2])["client_flops"] // 3 for model in (usual, recomputed)]
    assert forward[0] == forward[1]
    # The first block's backward pass goes on to its input: that of q, k and v and of their LoRA. The recomputation of
    # a block stops before its last product, whose result nothing needs.
    tokens = 2 * TOKENS
    to_input, last = 2 * tokens * 32 * (32 + 16 + 16 + 3 * 4), 2 * tokens * 4 * 32
    assert counted[1]["client_flops"] - counted[0]["client_flops"] == forward[0] + to_input - 2 * last
    assert counted[1]["memory.activations"] < counted[0]["memory.activations"] / 4


def test_large_models_are_never_allocated() -> None:
    """The named ones have their public sizes, and are costed from few blocks."""
    sizes = {}
    for name in LARGE_BACKBONES:
        with torch.device("meta"):
            model = build_model(name, dtype="bfloat16")
        sizes[name] = model.num_parameters()
        assert blocks_are_equal(model)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert sizes == {"llama-3-8b": 8_030_261_248, "qwen2.5-7b": 7_615_616_512}
    model = cost_model(lambda: build_model("llama-3-8b"))
    assert isinstance(model, DeepCostModel) and model.cuts == range(1, 32)
    small = cost_model(builder("vit"))
    assert isinstance(small, CostModel) and not is_weightless(small.model)
    assert not blocks_are_equal(mixed())


def mixed() -> PreTrainedModel:
    model = builder("llama")()
    model.model.layers[1].mlp.up_proj = torch.nn.Linear(32, 40)
    return model


def test_fake_tensors_mix_with_real_ones() -> None:
    with Shapes():
        weight: Tensor = without_weights(builder("vit")).get_submodule("classifier").weight
        real = torch.ones(5, weight.shape[1])
        product = real @ weight.T
        assert product.shape == (5, len(weight)) and product.device.type == "cpu" and type(product) is not Tensor
        assert (real.add_(weight.sum())) is real and product.sum().item() == 0.0
        assert torch.equal(product, product) and not torch.equal(product, torch.zeros(product.shape))
        assert type(torch.zeros(3)) is Tensor and type(torch.zeros(2**11, 2**10)) is not Tensor
        assert torch.empty_like(weight, device="meta").is_meta
