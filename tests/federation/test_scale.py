"""Scale: what a round does goes with the sampled clients, not with all of them, and many rows are set up in seconds."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_coefsfl.federation.clients import Federation
from hf_coefsfl.federation.partition import Partition, dirichlet
from tests.support.federated import CLASSES, config, tiny_vit, trainer

SAMPLES = 4  # of each client


class Counting:
    """A dataset of made-up images that counts the rows that are read."""

    def __init__(self, size: int):
        self.size, self.read = size, 0
        self.pixels = torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: int) -> dict[str, Any]:
        if not 0 <= place < self.size:
            raise IndexError(place)
        self.read += 1
        return {"pixel_values": self.pixels + place % CLASSES, "labels": place % CLASSES}


class Allocations(TorchDispatchMode):
    """Counts the operations and the bytes that they return."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        self.bytes += sum(t.numel() * t.element_size() for t in tree_leaves(result) if isinstance(t, torch.Tensor))
        return result


def work_of_a_round(folder: Path, num_clients: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Train a round of two clients and count what it does."""
    data = Counting(SAMPLES * num_clients)
    parts: dict[str, Any] = {"eval_dataset": None, "compute_metrics": None, "warmup_rounds": 0, "num_rounds": 1}
    run = trainer(folder, tiny_vit(), data, num_clients=num_clients, participation=2 / num_clients, **parts)
    walks = []
    sizes = Partition.sizes
    monkeypatch.setattr(Partition, "sizes", lambda partition: walks.append(1) or sizes(partition))
    data.read = 0
    assert run.rounds is not None
    with Allocations() as counted:
        run.rounds.run_round(0, 1e-3)
    monkeypatch.undo()
    work = {"rows": data.read, "operations": counted.operations, "bytes": counted.bytes, "walks over all": len(walks)}
    return work


def test_a_round_does_not_know_how_many_clients_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (work_of_a_round(tmp_path / str(n), n, monkeypatch) for n in (10, 10_000))
    assert few == many
    assert few["rows"] == 2 * SAMPLES and few["walks over all"] == 0 and few["operations"] > 1000


def test_sizes_are_computed_once(tmp_path: Path) -> None:
    federation = Federation.of(Counting(40), config(tmp_path, num_clients=10))
    assert federation.sizes is federation.sizes == [4] * 10


def client_datasets(num_clients: int, without_labels: tuple[int, ...] = ()) -> list[Dataset]:
    rows = {"pixel_values": np.zeros((2, 1, 8, 8), "float32").tolist(), "labels": [0, 1], "owner": ["a", "b"]}
    whole = Dataset.from_dict(rows).with_format("torch")
    lacking = whole.remove_columns("labels")
    return [lacking if client in without_labels else whole for client in range(num_clients)]


def test_client_datasets_are_changed_when_they_are_read(tmp_path: Path) -> None:
    changed: list[Dataset] = []

    def change(dataset: Dataset) -> Dataset:
        changed.append(dataset)
        return dataset.remove_columns("owner")

    federation = Federation.of(client_datasets(500), config(tmp_path, num_clients=None)).map_datasets(change)
    assert not changed
    for _ in range(3):
        assert federation.rows(7, [1])[0].keys() == {"pixel_values", "labels"}
    assert len(changed) == 1
    copy = pickle.loads(pickle.dumps(Federation.of(client_datasets(3), config(tmp_path, num_clients=None))))
    assert copy.rows(2, [0])[0]["owner"] == "a" and copy.sizes == [2, 2, 2]


def test_one_client_stands_for_those_with_the_same_columns(tmp_path: Path) -> None:
    args = config(tmp_path, num_clients=None)
    assert Federation.of(client_datasets(500), args).examples() == [0]
    assert Federation.of(client_datasets(500, without_labels=(3, 499)), args).examples() == [0, 3]
    assert Federation.of([Counting(2), Counting(3)], args).examples() == [0, 1]  # without known columns
    assert Federation.of(Counting(40), config(tmp_path, num_clients=10)).examples() == [0]


def test_a_list_of_many_clients_is_set_up_by_a_few_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    rows = Federation.rows
    monkeypatch.setattr(Federation, "rows", lambda self, c, places: reads.append(c) or rows(self, c, places))
    parts: dict[str, Any] = {"eval_dataset": None, "compute_metrics": None, "num_clients": None}
    trainer(tmp_path, tiny_vit(), client_datasets(300), **parts)
    assert reads == [0]
    with pytest.raises(ValueError, match="no labels"):
        trainer(tmp_path, tiny_vit(), client_datasets(300, without_labels=(299,)), **parts)


# ---- 100,000 rows. The limits are some ten times what an idle core takes. ----

ROWS = 100_000


@pytest.fixture(scope="module")
def many_rows() -> Dataset:
    rng = np.random.default_rng(0)
    pixels = rng.normal(size=(ROWS, 1, 8, 8)).astype("float32")
    return Dataset.from_dict({"pixel_values": pixels, "labels": rng.integers(0, CLASSES, ROWS)}).with_format("torch")


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
def test_many_rows_start_within_seconds(tmp_path: Path, many_rows: Dataset, partition: str) -> None:
    start = time.process_time()
    settings: dict[str, Any] = {"partition": partition, "num_clients": 5000, "dirichlet_alpha": 10.0}
    settings |= {"participation": 1 / 5000, "num_rounds": 1, "eval_dataset": None, "compute_metrics": None}
    run = trainer(tmp_path, tiny_vit(), many_rows, **settings)
    assert run.federation is not None and sum(run.federation.sizes) == ROWS
    run.train()
    assert time.process_time() - start < 30  # seconds of this process, however busy the machine is


def test_a_hopeless_dirichlet_partition_is_refused_early() -> None:
    labels = np.arange(ROWS) % 100
    start = time.process_time()
    with pytest.raises(ValueError, match=r"none of 20 draws .* clients fell short"):
        dirichlet(labels, num_clients=10_000, alpha=0.01, seed=0)
    assert time.process_time() - start < 60
    with pytest.raises(ValueError, match="none of 7 draws"):
        dirichlet(labels, num_clients=10_000, alpha=0.01, seed=0, max_tries=7)
