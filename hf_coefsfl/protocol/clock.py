"""Seconds of work on a device, measured without waiting for it at every mark."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .devices import is_accelerator


class Clock:
    """Adds up the seconds spent inside `running`. On an accelerator, events in its queue mark begin and end.

    Not on MPS, whose events do not keep time reliably: there each mark waits.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._marks: list[tuple[Any, Any]] = []
        self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure what is done inside."""
        begin = self._mark()
        yield
        self._marks.append((begin, self._mark()))

    def seconds(self) -> float:
        """Return the sum so far; an accelerator is waited for."""
        synchronize(self.device)
        for begin, end in self._marks:
            self._seconds += begin.elapsed_time(end) / 1000 if isinstance(begin, torch.Event) else end - begin
        self._marks.clear()
        return self._seconds

    def _mark(self) -> Any:
        if self.device.type == "mps" or not is_accelerator(self.device):
            synchronize(self.device)
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return event


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator, so that clocks measure work and not its queueing."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)
