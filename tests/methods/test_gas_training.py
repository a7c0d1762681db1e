"""GAS through the trainer: it trains, and its statistics are saved and resumed."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_coefsfl.methods.parts.class_statistics import ClassStatistics, from_tensors
from hf_coefsfl.trainer.checkpoints import seal
from tests.support.class_statistics import identical
from tests.support.federated import CLASSES, images, rounds, same, texts, tiny_bert, tiny_vit, trainer, weights
from tests.support.selection import slow_except


def to_longest(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate, cut to the longest text of the batch: batches differ in length."""
    batch = {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}
    length = int(batch["attention_mask"].sum(1).max())
    return {name: t if name == "labels" else t[:, :length] for name, t in batch.items()}


def saved_statistics(run: Any, folder: Path) -> ClassStatistics:
    """Return the statistics as a run writes them down; a run without any writes no file."""
    run.save_model(str(folder))
    state = folder / "method_state.safetensors"
    return from_tensors(load_file(state)) if state.exists() else {}


@pytest.mark.parametrize(
    ("kind", "per_batch"),
    slow_except(("vit", False), ("bert", True), of=[("vit", False), ("vit", True), ("bert", False), ("bert", True)]),
)
def test_trains(tmp_path: Path, kind: str, per_batch: bool) -> None:
    changes: dict[str, Any] = {"method": "gas", "method_kwargs": {"per_batch": per_batch, "samples_per_class": 8}}
    model: Any = tiny_vit()
    data = images()
    if kind == "bert":
        model, data = tiny_bert(dropout=0.3), texts()
        changes |= {"data_collator": to_longest}
    run = trainer(tmp_path, model, data, eval_dataset=None, warmup_rounds=1, num_rounds=3, **changes)
    run.train()
    warmup, *rest = rounds(run)
    assert warmup["transfers"] == 3 * 2 * 3
    for entry in rest:
        assert entry["transfers"] == 3 * 2 * (3 if per_batch else 1)
        assert math.isfinite(entry["server_loss"]) and math.isfinite(entry["client_loss"])
    statistics = saved_statistics(run, tmp_path / "saved")
    assert sorted(statistics) == list(range(CLASSES))
    for moments in statistics.values():
        assert moments.variance[moments.weight > 0].min() >= 1e-5
    # rounds 2 and 3 of 3 clients with 12 samples each weigh 2 and 3; every text has a first token
    assert sum(moments.weight[0] for moments in statistics.values()) == 3 * 12 * (2 + 3)
    if kind == "bert":
        assert all(moments.weight[-1] < moments.weight[0] for moments in statistics.values())


def test_resume_is_bit_identical(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "method": "gas",
        "method_kwargs": {"per_batch": True},
        "num_rounds": 4,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    whole = trainer(tmp_path / "whole", **changes)
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    resumed = trainer(tmp_path / "resumed", **changes)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert same(weights(whole), weights(resumed)) and rounds(whole) == rounds(resumed)
    ours, theirs = (saved_statistics(run, tmp_path / name) for run, name in ((whole, "a"), (resumed, "b")))
    assert len(ours) == CLASSES and identical(ours, theirs)
    # The statistics matter: without the file the run goes another way.
    (checkpoint / "method_state.safetensors").unlink()
    seal(checkpoint)
    forgetful = trainer(tmp_path / "forgetful", **changes)
    forgetful.train(resume_from_checkpoint=str(checkpoint))
    assert not same(weights(whole), weights(forgetful))


def test_a_used_trainer_that_resumes_from_the_warmup_forgets(tmp_path: Path) -> None:
    """Checkpoints of the warm-up hold no statistics: those of the later rounds must not stay."""
    run = trainer(tmp_path, method="gas", num_rounds=3, warmup_rounds=1, save_strategy="steps", save_steps=1)
    run.train()
    first = weights(run)
    assert not (tmp_path / "checkpoint-1" / "method_state.safetensors").exists()
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert same(first, weights(run))
