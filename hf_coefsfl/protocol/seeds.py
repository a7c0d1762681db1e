"""Random numbers: each stream's seed is a pure function of the run's seed, the round, the client and the batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from .devices import is_accelerator

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
    "codecs",
)


def derive_seed(seed: int, stream: str, *key: int) -> int:
    """Return the 63-bit seed of one stream at a place such as (round, client, batch)."""
    words = np.random.SeedSequence([seed, _STREAMS.index(stream), *key]).generate_state(2, np.uint32)
    return (int(words[0]) << 31) | (int(words[1]) >> 1)


def set_random_state(seed: int, device: torch.device = torch.device("cpu")) -> None:
    """Seed every generator that a forward pass on `device` may use: torch's, NumPy's and Python's."""
    set_cpu_random_state(seed)
    if is_accelerator(device):
        module = torch.get_device_module(device)
        getattr(module, "manual_seed_all", module.manual_seed)(seed)  # MPS has one device, and no such function


def set_cpu_random_state(seed: int) -> None:
    """Seed the generators that making a batch may use; a worker process must leave the accelerator alone."""
    # Not torch.manual_seed: on a machine without an accelerator it queues a call with a stack trace each time.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def preserved_random_state(device: torch.device = torch.device("cpu")) -> Iterator[None]:
    """Give the caller's random state back at the end, of the CPU and of `device`, whatever was seeded inside."""
    states = random.getstate(), np.random.get_state()
    devices = [device] if is_accelerator(device) else []  # not all that are visible: others may be another process's
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cpu"):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
