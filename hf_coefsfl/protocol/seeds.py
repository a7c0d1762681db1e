"""Random numbers: each stream's seed is a pure function of the run's seed, the round, the client and the batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

# The streams of random numbers drawn from one run seed; their order is part of every result.
_STREAMS = (
    "clients",
    "batches",
    "client_forward",
    "server_forward",
    "method",
    "partition",
    "data",
    "dropped",
    "replacements",
    "noise",
)


def derive_seed(seed: int, stream: str, *key: int) -> int:
    """Return the 63-bit seed of one stream at a place such as (round, client, batch)."""
    words = np.random.SeedSequence([seed, _STREAMS.index(stream), *key]).generate_state(2, np.uint32)
    return (int(words[0]) << 31) | (int(words[1]) >> 1)


def set_random_state(seed: int) -> None:
    """Seed every generator a forward pass may use: torch's on all devices, NumPy's and Python's."""
    set_cpu_random_state(seed)
    if torch.accelerator.is_available():
        torch.get_device_module().manual_seed_all(seed)


def set_cpu_random_state(seed: int) -> None:
    """Seed the generators that making a batch may use; a worker process must leave the accelerator alone."""
    # Not torch.manual_seed: on a machine without an accelerator it queues a call with a stack trace each time.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Give the caller's random state back at the end, whatever was seeded inside."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])
