"""Which clients a round samples and which random numbers they see: pure functions of (seed, round, client)."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
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


def num_sampled(num_clients: int, participation: float) -> int:
    """Return how many clients a round samples: the participation's share, at least one."""
    # 0.29 * 100 is 28.999...: the share is rounded before it is cut, as a user counts it.
    return max(int(round(participation * num_clients, 6)), 1)


def sample_clients(seed: int, round_index: int, num_clients: int, participation: float) -> list[int]:
    """Return the sorted clients of a round, drawn without replacement."""
    generator = np.random.default_rng(derive_seed(seed, "clients", round_index))
    drawn = generator.choice(num_clients, num_sampled(num_clients, participation), replace=False)
    return sorted(int(client) for client in drawn)


def is_dropped(seed: int, round_index: int, client: int, rate: float) -> bool:
    """Return whether a sampled client is lost in a round, which happens to a share `rate` of them."""
    return bool(np.random.default_rng(derive_seed(seed, "dropped", round_index, client)).random() < rate)


def assign_clients(sizes: Mapping[int, int], num_processes: int) -> dict[int, int]:
    """Return the process of each client: the largest first, each to the process with the fewest samples so far."""
    loads = [0] * num_processes
    owners = {}
    for client in sorted(sizes, key=lambda client: (-sizes[client], client)):
        owners[client] = loads.index(min(loads))
        loads[owners[client]] += sizes[client]
    return owners


def shuffled_batches(
    seed: int, round_index: int, client: int, num_samples: int, batch_size: int, drop_last: bool = False
) -> list[list[int]]:
    """Return the sample indices of each mini-batch of a client's round, shuffled once for the round."""
    order = np.random.default_rng(derive_seed(seed, "batches", round_index, client)).permutation(num_samples)
    batches = [order[start : start + batch_size].tolist() for start in range(0, num_samples, batch_size)]
    if drop_last and len(batches[-1]) < batch_size:
        batches.pop()
    return batches


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
