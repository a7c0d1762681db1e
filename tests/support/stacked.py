"""Runs whose clients are stacked, and how they are compared with clients one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hf_coefsfl import METHODS, SplitFedTrainer
from hf_coefsfl.federation.simulation import Simulation
from tests.support.federated import images, rounds, texts, tiny_bert, tiny_vit, trainer, weights

STACKABLE = sorted(name for name, method in METHODS.items() if method.stackable)
SIZES = (10, 10, 6, 10, 6)  # samples of the clients: batches of 4, and a last one of 2
TOLERANCE = 1e-3  # of how far the weights have moved


def trimmed(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate texts to the longest of the batch."""
    batch = {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}
    length = int(batch["attention_mask"].sum(1).max())
    return {name: t if name == "labels" else t[:, :length] for name, t in batch.items()}


def of_clients(kind: str, sizes: tuple[int, ...] = SIZES) -> list[Any]:
    """Return a dataset for each client."""
    return [(images if kind == "vit" else texts)(size, seed=10 + i) for i, size in enumerate(sizes)]


def make(folder: Path, stacked: int, kind: str = "vit", model: Any = None, **changes: Any) -> SplitFedTrainer:
    """Return a run with five clients of several sizes in each of two rounds of two local epochs."""
    settings: dict[str, Any] = {"participation": 1.0, "num_rounds": 2, "warmup_rounds": 0, "local_epochs": 2}
    settings |= {"num_clients": None, "stacked_clients": stacked, "eval_dataset": None, "compute_metrics": None}
    settings |= {"method": "coef_w", "data_collator": None if kind == "vit" else trimmed}
    settings |= {"data": of_clients(kind), **changes}
    if model is None:
        model = tiny_vit(0.0) if kind == "vit" else tiny_bert(0.0)
    return trainer(folder / str(stacked), model, settings.pop("data"), **settings)


@contextmanager
def noted_groups() -> Iterator[list[int]]:
    """Note how many clients trained at once; 1: they should have, and trained again."""
    found: list[int] = []
    train_stacked = Simulation._train_stacked

    def noted(self: Simulation, stacking: Any, round_index: int, batches: Any, rate: float) -> Any:
        outcome = train_stacked(self, stacking, round_index, batches, rate)
        if len(batches) > 1:
            found.append(1 if outcome is None else len(batches))
        return outcome

    with mock.patch.object(Simulation, "_train_stacked", noted):
        yield found


def assert_equal(ours: SplitFedTrainer, theirs: SplitFedTrainer, start: Any, tolerance: float = TOLERANCE) -> None:
    """Weights and logged numbers agree within a tolerance, what crossed the cut to the byte."""
    assert ours.ledger.entries == theirs.ledger.entries
    got = weights(ours)
    for name, value in weights(theirs).items():
        if name.endswith(("k_proj.bias", "key.bias")):  # softmax does not see it
            continue
        gap = ((got[name] - value).abs().max() / (value - start[name]).abs().max()).item()
        assert gap < tolerance, f"{name} differs by {gap:.1e} of its way"
    for mine, other in zip(rounds(ours), rounds(theirs), strict=True):
        assert mine.keys() == other.keys()
        for name, number in other.items():
            assert abs(mine[name] - number) <= tolerance * max(abs(number), 0.1), f"{name}: {mine[name]}, not {number}"
