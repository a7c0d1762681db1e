"""Sampling, batches and seeds as pure functions."""

import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_coefsfl.federation.sampling import num_sampled, sample_clients, shuffled_batches
from hf_coefsfl.protocol.seeds import derive_seed, preserved_random_state, set_random_state


@pytest.mark.parametrize(
    ("clients", "participation", "sampled"),
    [(50, 0.1, 5), (20, 0.25, 5), (5, 0.1, 1), (100, 0.29, 29), (10, 0.7, 7), (3, 1.0, 3), (59, 0.1, 5)],
)
def test_number_of_sampled_clients(clients: int, participation: float, sampled: int) -> None:
    assert num_sampled(clients, participation) == sampled


@given(st.integers(0, 2**31), st.integers(0, 1000), st.integers(1, 60), st.floats(0.01, 1.0))
def test_sampling_is_pure_sorted_and_without_replacement(seed: int, t: int, clients: int, share: float) -> None:
    drawn = sample_clients(seed, t, clients, share)
    assert drawn == sample_clients(seed, t, clients, share) == sorted(set(drawn))
    assert len(drawn) == num_sampled(clients, share) and all(0 <= c < clients for c in drawn)


def test_every_client_is_sampled_about_equally() -> None:
    counts = np.bincount([c for t in range(2000) for c in sample_clients(3, t, 20, 0.25)], minlength=20)
    assert counts.sum() == 10_000 and counts.min() > 400 and counts.max() < 600


@given(st.integers(0, 2**31), st.integers(1, 50), st.integers(1, 12))
def test_batches_walk_every_sample_once(seed: int, samples: int, size: int) -> None:
    batches = shuffled_batches(seed, 4, 2, samples, size)
    assert sorted(i for batch in batches for i in batch) == list(range(samples))
    assert all(len(batch) == size for batch in batches[:-1])
    whole = shuffled_batches(seed, 4, 2, samples, size, drop_last=True)
    assert whole == [batch for batch in batches if len(batch) == size]


def test_batches_depend_on_seed_round_and_client() -> None:
    orders = {tuple(shuffled_batches(*key, 40, 40)[0]) for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]}
    assert len(orders) == 4


def test_seeds_of_streams_and_places_differ() -> None:
    streams = ("clients", "batches", "client_forward", "server_forward", "method", "partition")
    seeds = {derive_seed(7, s, r, c) for s in streams for r in range(10) for c in range(10)}
    assert len(seeds) == 600 and all(0 <= s < 2**63 for s in seeds)


def test_preserved_random_state() -> None:
    set_random_state(1)
    expected = (torch.rand(()).item(), np.random.rand(), random.random())
    set_random_state(1)
    with suppress(KeyError), preserved_random_state():
        set_random_state(99)
        torch.rand(3), np.random.rand(3), random.random()
        raise KeyError  # an error changes nothing either
    assert (torch.rand(()).item(), np.random.rand(), random.random()) == expected
