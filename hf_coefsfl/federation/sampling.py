"""Which clients a round samples and which batches they see: pure functions of (seed, round, client)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..protocol.seeds import derive_seed


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
    seed: int,
    round_index: int,
    client: int,
    num_samples: int,
    batch_size: int,
    drop_last: bool = False,
    lengths: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return the sample indices of each mini-batch of a client's round, shuffled once for the round.

    Given the lengths of the samples, those of like length share a batch. Then the order of the batches is random, and
    which of several equally long samples share one; a batch that is not full has the shortest.
    """
    generator = np.random.default_rng(derive_seed(seed, "batches", round_index, client))
    order = generator.permutation(num_samples)
    if drop_last:
        order = order[: num_samples - num_samples % batch_size]
    if lengths is not None:
        order = order[np.argsort(-np.asarray(lengths)[order], kind="stable")]
    batches = [order[start : start + batch_size].tolist() for start in range(0, len(order), batch_size)]
    return batches if lengths is None else [batches[i] for i in generator.permutation(len(batches))]
