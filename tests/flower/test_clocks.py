"""Clocks of a deployed run wait for the accelerator: without that they measure how fast work is queued."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_coefsfl.flower import client_round, link
from hf_coefsfl.flower.client_round import ClientRound
from hf_coefsfl.flower.link import Turn
from hf_coefsfl.flower.transport import Deadline
from tests.support.deployed import LONG


class Queue:
    """A clock, and an accelerator that takes ten seconds for what is queued."""

    def __init__(self) -> None:
        self.now, self.work = 0.0, deque[str]()

    def perf_counter(self) -> float:
        return self.now

    def synchronize(self, device: torch.device) -> None:
        self.now += 10.0 * len(self.work)
        self.work.clear()


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue()
    for module in (link, client_round):
        monkeypatch.setattr(module, "time", made)
        monkeypatch.setattr(module, "synchronize", made.synchronize)
    return made


def test_of_the_server(queue: Queue) -> None:
    turn, deadline = Turn([nn.Parameter(torch.zeros(3))]), Deadline(LONG)
    with turn.taken(1, torch.zeros(3), deadline):
        queue.work.append("pass")
        with turn.given_up(1, deadline):
            queue.now += 100.0  # of waiting for the client
        queue.work.append("pass")
    assert turn.seconds == {1: 20.0}


def test_a_broken_accelerator_leaves_the_turn_to_others(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    turn, deadline = Turn([nn.Parameter(torch.zeros(3))]), Deadline(LONG)

    def broken(device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    with monkeypatch.context() as patch:
        patch.setattr(link, "synchronize", broken)
        with pytest.raises(torch.AcceleratorError), turn.taken(1, torch.zeros(3), deadline):
            pass
    with turn.taken(2, torch.zeros(3), deadline):
        assert turn._holder == 2


def test_of_the_client(queue: Queue, tmp_path: Path) -> None:
    config: Any = SimpleNamespace(device=torch.device("cpu"))
    done: Any = object.__new__(ClientRound)
    done.node = SimpleNamespace(config=config, num_samples=3)
    done.side, done.sequence, done.folder = SimpleNamespace(batches=[1, 2]), 1, tmp_path
    done._restore = done._save = lambda: None
    done._upload = done._update = lambda *_: queue.work.append("pass")
    calls = [{"do": "upload", "batches": None}, {"do": "update", "batches": None}]
    assert done.run(calls, None, tmp_path / "out")["seconds"] == 20.0
