"""What a method tells the table of costs about rounds that do not simply grow with the client's samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..base import Method


@dataclass(frozen=True)
class Workload:
    """A client's round, and the run around it, whose cost is asked for."""

    sizes: Sequence[int]  # samples of each batch
    num_labels: int
    rounds: int = 1
    distinct_clients: Callable[[int], int] = lambda rounds: 1  # how many clients take part in so many rounds


@dataclass(frozen=True)
class StoredWork:
    """Work of the server on samples that it has stored: `once` and `twice` do it on one sample, for 1 and 2 epochs."""

    once: Method
    twice: Method
    epochs: int
    samples: int


@dataclass(frozen=True)
class RoundKind:
    """A kind of round: that of `method` with this index, which is run and counted on a few samples."""

    method: Method
    index: int = 0
    label: str = ""  # what the table adds to the method's name
    generated: int = 0  # samples that the server trains on in an epoch beside those of the client
    stored: StoredWork | None = None
    share: float = 1.0  # of a run's rounds that are of this kind
