"""Exchanges that do not fit into memory go to files."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_coefsfl.protocol import wire
from hf_coefsfl.protocol.messages import Feedback
from hf_coefsfl.protocol.packing import Exchange, Store
from hf_coefsfl.protocol.wire import write_exchange
from tests.support.federated import same, weights
from tests.support.packed import MIXED, packed, texts_run, values


def test_files_beyond_the_limit(tmp_path: Path) -> None:
    size = values().numel() * 4
    store = Store(memory_limit=2 * size, folder=tmp_path)
    exchange: Exchange[Feedback] = Exchange(store)
    descriptors = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for seed in range(6):
        exchange.append(Feedback(values(seed=seed)))
    assert store.in_memory == 2 * size and store.on_disk >= 4 * size
    assert list(tmp_path.iterdir()) == []  # the file has no name that could be left behind
    for seed in (5, 0, 3, 1, 2, 4):
        assert torch.equal(exchange[seed].gradient, values(seed=seed))
    held = exchange[5].gradient
    del exchange, store
    assert torch.equal(held, values(seed=5))  # still mapped
    del held
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("codecs", ["float32", "float16", "int8", MIXED], ids=str)
def test_a_limit_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codecs: Any) -> None:
    stores: list[Store] = []
    monkeypatch.setattr("hf_coefsfl.federation.schedule.Store", lambda *args: stores.append(Store(*args)) or stores[-1])
    free = texts_run(tmp_path / "free", exchange_codec=codecs)
    assert stores and not any(store.on_disk for store in stores)
    stores.clear()
    limited = texts_run(tmp_path / "limited", exchange_codec=codecs, exchange_memory_limit=300)
    assert stores and all(store.on_disk and store.in_memory <= 300 for store in stores)
    assert same(weights(free), weights(limited)) and free.ledger.entries == limited.ledger.entries
    assert not [path for path in (tmp_path / "limited").iterdir() if path.suffix != ".json" and path.name != ".lock"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            packed(Store(memory_limit=0, folder=tmp_path), Feedback(values()))
            os.write(writer, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 1) == b"x"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    store = Store(memory_limit=0, folder=tmp_path)
    store._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with pytest.raises(OSError, match="space"):
        store.place(values())


def test_more_batches_than_can_be_read_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = Exchange.of([Feedback(torch.zeros(1, 2, 4)) for _ in range(9)], Store())
    monkeypatch.setattr(wire, "_MOST_HEADER", 1000)
    with pytest.raises(ValueError, match=r"9 batches are too many for one exchange: .* Raise per_device_train_batch_s"):
        write_exchange(exchange, tmp_path / "file")
    assert not (tmp_path / "file").exists()
