"""The halves compute what the model computes: outputs, gradients, random numbers, for every cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_coefsfl.split import SplitModel, split_model
from tests.support.exactness import Result, assert_equal, outcome
from tests.support.models import MODELS, TinyModel
from tests.support.selection import slow_except

torch.set_num_threads(1)

# One model for each way of being cut; the others, and their other kinds of attention, are slow.
FEW = ("bert", "gpt2-lm", "llama", "mixtral", "t5", "bart", "vit", "swin", "wav2vec2", "timm-vit")
FEW_VARIANTS = [("bert", "sdpa"), ("llama", "eager"), ("t5", "eager"), ("vit", "sdpa"), ("swin", "eager")]
FEW_CHECKPOINTED = [("bert", True), ("llama", True), ("t5", True), ("vit", False)]
CHECKPOINTED = [(name, lora) for name, entry in MODELS.items() if entry.checkpointing for lora in (True, False)]
VARIANTS = [(name, attention) for name, entry in MODELS.items() for attention in entry.attention]


def with_lora(entry: TinyModel, **options: Any) -> Any:
    """A tiny model under LoRA whose adapters are not zero."""
    config = LoraConfig(r=2, target_modules=list(entry.lora), lora_dropout=0.1, init_lora_weights=False)
    return get_peft_model(entry.make(**options), config)


@pytest.mark.parametrize(("name", "attention"), slow_except(*FEW_VARIANTS, of=VARIANTS))
def test_full_finetuning_with_dropout(name: str, attention: str) -> None:
    entry = MODELS[name]
    model, batch = entry.make(attention).train(), entry.batch()
    expected = outcome(model, lambda: model(**batch))
    # Attention is a matter within a block: the kind that the model has by default is cut everywhere, others once.
    for cut in entry.cuts if attention == entry.attention[-1] else entry.cuts[-1:]:
        split = split_model(model, cut)
        assert_equal(outcome(model, lambda s=split: s.server(s.client(**batch))), expected)


@pytest.mark.parametrize("name", slow_except(*FEW, of=MODELS))
def test_evaluation(name: str) -> None:
    entry = MODELS[name]
    model, batch = entry.make(entry.attention[0]).eval(), entry.batch()
    expected = outcome(model, lambda: model(**batch))
    assert len({float(t.sum()) for t in expected[1].values()}) > 10, "gradients are too alike to show mistakes"
    for cut in entry.cuts:
        split = split_model(model, cut)
        assert_equal(outcome(model, lambda s=split: s.server(s.client(**batch))), expected)


def test_dropout_is_active() -> None:
    """What the tests in training mode rest on: without the same random numbers they would fail."""
    for name in ("bert", "llama", "vit", "swin", "wav2vec2", "timm-vit", "beit", "opt"):
        model, batch = MODELS[name].make().train(), MODELS[name].batch()
        assert not torch.equal(model(**batch).loss, model(**batch).loss), name


def over_the_cut(split: SplitModel, batch: dict[str, torch.Tensor], send_back: bool = True) -> Any:
    """Run client and server with separate graphs; the gradient at the smashed data goes back."""
    smashed = split.client(**batch)
    received = smashed.detach()
    received.activations.requires_grad_()
    output = split.server(received)
    output.loss.backward()
    if send_back:
        smashed.activations.backward(received.activations.grad)
    return _Done(output)


class _Done(dict):
    """An output whose backward pass has been done."""

    def __init__(self, output: Any) -> None:
        super().__init__(output)
        self.loss = torch.zeros((), requires_grad=True)


@pytest.mark.parametrize("name", slow_except(*FEW, of=MODELS))
def test_lora_connected_and_detached(name: str) -> None:
    entry = MODELS[name]
    model, batch = with_lora(entry).train(), entry.batch()
    expected = outcome(model, lambda: model(**batch))
    for cut in entry.cuts:
        split = split_model(model, cut)
        assert split.shared_trainable() == []
        assert_equal(outcome(model, lambda s=split: s.server(s.client(**batch))), expected)
        assert_equal(outcome(model, lambda s=split: over_the_cut(s, batch)), expected)


def test_nothing_reaches_the_client_unless_sent() -> None:
    """The detached run above is detached: without the gradient at the cut the client gets none."""
    model, batch = with_lora(MODELS["bert"]).train(), MODELS["bert"].batch()
    split = split_model(model, 2)
    gradients = outcome(model, lambda: over_the_cut(split, batch, send_back=False))[1]
    assert gradients and not any(".layer.0." in name or ".layer.1." in name for name in gradients)


@pytest.mark.parametrize(("name", "lora"), slow_except(*FEW_CHECKPOINTED, of=CHECKPOINTED))
def test_gradient_checkpointing(name: str, lora: bool) -> None:
    entry = MODELS[name]
    model, batch = (with_lora(entry) if lora else entry.make()).train(), entry.batch()
    expected = outcome(model, lambda: model(**batch))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    other = entry.batch(seed=1)
    for cut in entry.cuts[1:] if lora else entry.cuts[:1]:
        split = split_model(model, cut)

        def run(s: SplitModel = split) -> Any:
            output = s.server(s.client(**batch))
            s.server(s.client(**other))  # a second pass before the backward: each keeps its own smashed data
            return output

        assert_equal(outcome(model, run), expected)


@pytest.mark.parametrize("name", ["bert", "llama", "vit", "t5-tags"])
def test_reentrant_checkpointing(name: str) -> None:
    entry = MODELS[name]
    model, batch = entry.make().train(), entry.batch()
    expected = outcome(model, lambda: model(**batch))
    split = split_model(model, 2)
    split.server.model.gradient_checkpointing_enable({"use_reentrant": True})
    assert_equal(outcome(model, lambda: split.server(split.client(**batch))), expected)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "swin", "wav2vec2", "timm-vit"])
def test_bfloat16(name: str) -> None:
    entry = MODELS[name]
    model = entry.make().to(torch.bfloat16).train()
    batch = {key: t.to(torch.bfloat16) if t.is_floating_point() else t for key, t in entry.batch().items()}
    expected = outcome(model, lambda: model(**batch))
    split = split_model(model, 2)
    assert_equal(outcome(model, lambda: split.server(split.client(**batch))), expected)


@pytest.mark.parametrize("name", ["bert", "llama", "vit", "swin", "wav2vec2", "whisper-encoder", "timm-vit"])
def test_autocast(name: str) -> None:
    entry = MODELS[name]
    model, batch = entry.make().train(), entry.batch()
    split = split_model(model, 2)

    def autocast(run: Callable[[], Any]) -> Result:
        with torch.autocast("cpu", torch.bfloat16):
            return outcome(model, run)

    assert_equal(autocast(lambda: split.server(split.client(**batch))), autocast(lambda: model(**batch)))
