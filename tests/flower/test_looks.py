"""How often the server looks for an answer, and for the parts of one that is still being sent."""

from types import SimpleNamespace
from typing import Any

import pytest
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError
from flwr.superlink.grid import http_grid

from hf_coefsfl.flower import transport
from hf_coefsfl.flower.transport import Courier, Deadline, look_often
from hf_coefsfl.flower.wire import content
from tests.support.deployed import LONG, identify


class Grid:
    """A grid in which an answer lies at the n-th look."""

    def __init__(self, at: int):
        self.at, self.looks = at, 0

    def push_messages(self, messages: list[Any]) -> list[str]:
        return ["1"]

    def pull_messages(self, numbers: list[str]) -> list[Any]:
        self.looks += 1
        told = SimpleNamespace(src_node_id=7)
        answer = SimpleNamespace(has_error=lambda: False, metadata=told, content=content({"round": 3}))
        return [answer] if self.looks == self.at else []


def test_pauses_are_a_part_of_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is noticed a fifth of its time late at most, and after half a second."""
    pauses: list[float] = []
    monkeypatch.setattr(transport.time, "sleep", pauses.append)
    identify()
    grid: Any = Grid(at=40)
    Courier(grid).ask(7, "train.step", {"round": 3}, None, Deadline(LONG))
    assert len(pauses) == 39 and pauses[0] == 0.05 and pauses[-1] == 0.5 and pauses == sorted(pauses)
    assert all(pause <= 0.05 + sum(pauses[:place]) / 5 for place, pause in enumerate(pauses))


def test_parts_are_taken_soon_after_they_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower doubles its pauses from a second to ten; a client may need more looks than its 500."""
    monkeypatch.setattr(http_grid, "pull_objects", http_grid.pull_objects)
    look_often()
    tries: list[str] = []

    def pull(part: str) -> bytes:
        tries.append(part)
        if len(tries) < 4:
            raise ObjectUnavailableError(part)
        return b"there"

    taken: Any = http_grid.pull_objects
    assert taken(["part"], pull) == {"part": b"there"} and len(tries) == 4
    expected = {"initial_backoff": 0.05, "backoff_cap": 0.5, "max_tries_per_object": None}
    assert taken.keywords == expected
