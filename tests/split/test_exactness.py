"""The check of a split on an example: wrong gradients are refused, and the model is left as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.architectures import build
from hf_coefsfl.split import ClientHalf, load_client, load_server, split_model
from hf_coefsfl.split.placeholders import example_inputs
from tests.support.models import MODELS


def test_wrong_gradients_are_refused_although_outputs_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ClientHalf.forward
    monkeypatch.setattr(ClientHalf, "forward", lambda self, **inputs: forward(self, **inputs).detach())
    with pytest.raises(ValueError, match=r"their gradients differ by 1\.0e\+00, most for 'bert\.\S+'"):
        split_model(MODELS["bert"].make(), 2)


def test_gradients_that_differ_in_training_only_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ClientHalf.forward

    def detached_in_training(self: ClientHalf, **inputs: Any) -> Any:
        smashed = forward(self, **inputs)
        return smashed.detach() if self.training else smashed

    monkeypatch.setattr(ClientHalf, "forward", detached_in_training)
    with pytest.raises(ValueError, match="their gradients differ"):
        split_model(MODELS["bert"].make(), 2)


def test_gradients_and_flags_of_the_model_stay() -> None:
    model = MODELS["bert"].make()
    model.classifier.weight.grad = torch.ones_like(model.classifier.weight)
    model.bert.embeddings.requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    split_model(model, 2)
    assert [p.requires_grad for p in model.parameters()] == flags
    with_gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert list(with_gradient) == ["classifier.weight"]
    assert torch.equal(with_gradient["classifier.weight"], torch.ones_like(model.classifier.weight))


@pytest.mark.parametrize(
    "name", ["XLMForTokenClassification", "PoolFormerForImageClassification", "SqueezeBertForTokenClassification"]
)
def test_halves_of_unusual_lists_of_blocks_are_saved(name: str, tmp_path: Path) -> None:
    model = build(name).eval()
    inputs = example_inputs(model)
    split = split_model(model, 2).eval()
    expected = model(**inputs).logits
    for half in (split.client, split.server):
        half.save_pretrained(tmp_path / half.side)
    client, server = load_client(tmp_path), load_server(tmp_path)
    assert torch.equal(server(client(**inputs)).logits, expected)
