"""Where a model lies: what does not work there is refused before it is trained."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_coefsfl.trainer.placement import check_recomputation
from tests.support.federated import tiny_bert, tiny_vit, trainer

ON_MPS: Any = SimpleNamespace(gradient_checkpointing=True, device=torch.device("mps"))


@pytest.mark.parametrize(
    ("places", "named"),
    [({"vit": 0, "classifier": 1}, "0, 1"), ({"vit": 0, "classifier": "cpu"}, "0, cpu"), ({"": "disk"}, "disk")],
)
def test_a_model_on_several_devices(tmp_path: Path, places: dict[str, Any], named: str) -> None:
    model: Any = tiny_vit()
    model.hf_device_map = places
    with pytest.raises(ValueError, match=rf"The model lies on {named} \(device_map\).*Load it without device_map"):
        trainer(tmp_path, model)


def test_a_model_on_one_device(tmp_path: Path) -> None:
    model: Any = tiny_vit()
    model.hf_device_map = {"": "cpu"}
    trainer(tmp_path, model)


def test_checkpointing_with_dropout_on_mps() -> None:
    model = tiny_bert(dropout=0.1)
    with pytest.raises(ValueError, match=r"MPS.*other masks.*hidden_dropout_prob=0\.1, attention_probs_.* \.\.\."):
        check_recomputation(model, ON_MPS)
    model.config.hidden_dropout_prob, model.config.attention_probs_dropout_prob = 0.0, 0.2
    with pytest.raises(ValueError, match=r"The model has attention_probs_dropout_prob=0\.2"):
        check_recomputation(model, ON_MPS)


def test_checkpointing_that_works() -> None:
    check_recomputation(tiny_bert(dropout=0.0), ON_MPS)
    for changes in ({"device": torch.device("cuda")}, {"gradient_checkpointing": False}):
        check_recomputation(tiny_bert(dropout=0.1), SimpleNamespace(**{**vars(ON_MPS), **changes}))  # type: ignore
