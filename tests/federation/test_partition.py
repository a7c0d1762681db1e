"""Every row to exactly one client, the asked-for skew, and errors that say what to do."""

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_coefsfl.federation.partition import Partition, by_column, dirichlet, iid, make_partition
from tests.support.partitions import LABELS, hf_dataset, rows


def assert_covers(partition: Partition, num_samples: int) -> None:
    assert sorted(np.concatenate(partition.indices).tolist()) == list(range(num_samples))


def skew(partition: Partition, labels: np.ndarray) -> float:
    """Mean total variation distance between a client's classes and those of all: 0 for equal, near 1 for one class."""
    _, counts = partition.counts(labels)
    shares = counts / counts.sum(axis=1, keepdims=True)
    return float(0.5 * np.abs(shares - counts.sum(axis=0) / counts.sum()).sum(axis=1).mean())


# --- covering, sizes, seeds ---


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**32))
def test_iid_covers_with_equal_sizes(num_samples, num_clients, seed):
    if num_clients > num_samples:
        with pytest.raises(ValueError, match=f"use at most {num_samples} clients"):
            iid(num_samples, num_clients, seed)
        return
    partition = iid(num_samples, num_clients, seed)
    assert_covers(partition, num_samples)
    assert len(partition) == len(partition.names) == num_clients
    assert max(partition.sizes()) - min(partition.sizes()) <= 1


@settings(deadline=None)
@given(
    labels=st.lists(st.integers(-3, 5), min_size=20, max_size=200),
    num_clients=st.integers(1, 5),
    alpha=st.floats(0.5, 1e9),
    seed=st.integers(0, 1000),
    min_size=st.integers(1, 2),
)
def test_dirichlet_covers_and_keeps_min_size(labels, num_clients, alpha, seed, min_size):
    partition = dirichlet(labels, num_clients, alpha, seed, min_size)
    assert_covers(partition, len(labels))
    assert len(partition) == num_clients
    assert min(partition.sizes()) >= min_size


@settings(deadline=None)
@given(st.lists(st.integers(-5, 5), min_size=1) | st.lists(st.text(max_size=2), min_size=1))
def test_by_column_has_one_client_per_value(values):
    partition = by_column(values)
    assert_covers(partition, len(values))
    assert list(partition.names) == [str(value) for value in sorted(set(values))]
    for name, client in zip(partition.names, rows(partition), strict=True):
        assert {str(values[row]) for row in client} == {name}
        assert client == sorted(client)


@pytest.mark.parametrize("make", [lambda s: iid(10_000, 7, s), lambda s: dirichlet(LABELS, 7, 0.3, s)])
def test_seed_decides(make):
    assert rows(make(3)) == rows(make(3))
    assert rows(make(3)) != rows(make(4))


def test_partitions_do_not_change_between_releases():
    assert rows(iid(7, 3, seed=0)) == [[2, 4, 3], [6, 5], [0, 1]]
    assert rows(dirichlet([0, 0, 0, 1, 1, 1], 2, alpha=0.5, seed=0)) == [[5, 4, 3, 0], [2, 1]]


# --- skew ---


def test_small_alpha_is_skewed_and_large_alpha_is_not():
    reference = skew(iid(len(LABELS), 20, 0), LABELS)
    assert reference < 0.07
    by_alpha = [skew(dirichlet(LABELS, 20, alpha, 0), LABELS) for alpha in (0.05, 0.5, 5, 1e6)]
    assert by_alpha[0] > 0.6
    assert by_alpha == sorted(by_alpha, reverse=True)
    assert by_alpha[-1] < reference


def test_proportions_follow_the_dirichlet_distribution():
    # Var(p) = (1/K)(1 - 1/K) / (K alpha + 1) for each of K clients: compared over 400 classes.
    num_clients, alpha = 5, 0.7
    labels = np.repeat(np.arange(400), 200)
    _, counts = dirichlet(labels, num_clients, alpha, seed=0).counts(labels)
    shares = counts / counts.sum(axis=0)
    expected = (1 / num_clients) * (1 - 1 / num_clients) / (num_clients * alpha + 1)
    assert shares.mean(axis=1) == pytest.approx(np.full(num_clients, 1 / num_clients), abs=0.03)
    assert shares.var() == pytest.approx(expected, rel=0.1)


def test_large_alpha_shares_out_classes_smaller_than_the_number_of_clients():
    # Without shuffled places, rounding gives every class of 3 rows to the same 3 of 10 clients.
    labels = np.repeat(np.arange(200), 3)
    assert min(dirichlet(labels, 10, 1e6, seed=0).sizes()) > 30


def test_rows_of_a_client_are_shuffled():
    labels = np.repeat([0, 1], 500)
    for client in dirichlet(labels, 2, 1e6, seed=0).indices:
        assert 0.3 < labels[client[:100]].mean() < 0.7


# --- refusals ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": 0.0}, "alpha must be between .* got 0.0"),
        ({"alpha": -1.0}, "alpha must be between"),
        ({"alpha": float("nan")}, "alpha must be between .* got nan"),
        ({"alpha": float("inf")}, "alpha must be between"),
        ({"num_clients": 0}, "num_clients must be at least 1, got 0"),
        ({"min_size": 0}, "min_client_samples must be at least 1, got 0"),
        ({"seed": -1}, "seed must not be negative, got -1"),
        ({"num_clients": 10, "min_size": 1001}, "10000 rows cannot give 10 clients 1001 each: use at most 9 clients"),
    ],
)
def test_dirichlet_refuses_at_once(change, message):
    arguments = {"labels": LABELS, "num_clients": 5, "alpha": 1.0, "seed": 0, "min_size": 1, "max_tries": 0}
    with pytest.raises(ValueError, match=message):
        dirichlet(**(arguments | change))


def test_dirichlet_says_how_far_it_came():
    message = (
        r"none of 20 draws of Dir\(0.01\) gave each of 50 clients min_client_samples=10 of the 10000 rows "
        r"\(\d+ of 50 clients fell short, sizes were 0 to \d+\); "
        r"use a larger dirichlet_alpha, fewer clients or a smaller min_client_samples"
    )
    with pytest.raises(ValueError, match=message):
        dirichlet(LABELS, 50, 0.01, 0, min_size=10, max_tries=20)


def test_dirichlet_redraws_until_min_size_is_met():
    def make(seed, tries):
        return dirichlet(LABELS, 20, 0.1, seed, min_size=40, max_tries=tries)

    needed_more = 0
    for seed in range(10):
        try:
            make(seed, 1)
        except ValueError:
            needed_more += 1
            assert min(make(seed, 1000).sizes()) >= 40
    assert needed_more


# --- one call for all ---


def test_make_partition_picks_the_scheme():
    dataset = hf_dataset(label=[0, 1] * 50, writer=["b", "a", "b", "c"] * 25)
    assert rows(make_partition(dataset, scheme="iid", num_clients=4, seed=1)) == rows(iid(100, 4, 1))
    expected = dirichlet([0, 1] * 50, 4, 0.3, 1, min_size=2)
    made = make_partition(dataset, scheme="dirichlet", num_clients=4, alpha=0.3, min_size=2, seed=1)
    assert rows(made) == rows(expected)
    for num_clients in (None, 3):
        made = make_partition(dataset, scheme="column", column="writer", num_clients=num_clients)
        assert made.names == ("a", "b", "c")
        assert made.sizes() == [25, 50, 25]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheme": "shards"}, r"one of \['iid', 'dirichlet', 'column'\], got 'shards'"),
        ({"scheme": "iid"}, "partition='iid' needs num_clients"),
        ({"scheme": "dirichlet"}, "partition='dirichlet' needs num_clients"),
        ({"scheme": "iid", "num_clients": 5}, "4 rows cannot give 5 clients 1 each"),
        ({"scheme": "iid", "num_clients": 2, "min_size": 3}, "4 rows cannot give 2 clients 3 each"),
        ({"scheme": "column"}, r"needs partition_column, one of \['label', 'writer'\]"),
        (
            {"scheme": "column", "column": "writer", "num_clients": 7},
            "num_clients=7, but column 'writer' has 2 distinct values",
        ),
        (
            {"scheme": "column", "column": "writer", "min_size": 2},
            r"fewer rows than min_client_samples=2 \(1 of 2 clients fell short, sizes were 1 to 3\)",
        ),
    ],
)
def test_make_partition_errors(arguments, message):
    dataset = hf_dataset(label=[0, 1, 0, 1], writer=["a", "a", "b", "a"])
    with pytest.raises(ValueError, match=message):
        make_partition(dataset, **arguments)


def test_iid_needs_no_column():
    assert_covers(make_partition([(1, 2), (3, 4), (5, 6)], num_clients=2), 3)


# --- counts and picture ---


def test_counts_by_hand():
    partition = Partition((np.array([0, 3]), np.array([1, 2, 4])), ("x", "y"))
    classes, counts = partition.counts(["b", "a", "b", "b", "c"])
    assert classes.tolist() == ["a", "b", "c"]
    assert counts.tolist() == [[0, 2, 0], [1, 1, 1]]
    with pytest.raises(ValueError, match="4 labels for a partition of 5 rows"):
        partition.counts([0, 1, 2, 3])


def test_client_names_must_match():
    with pytest.raises(ValueError, match="rows for 1 clients but 2 client names"):
        Partition((np.array([0]),), ("a", "b"))


# --- work ---


def lines_run(size: int, num_clients: int) -> int:
    """Return how many lines of Python a partition and its counts take."""
    labels = np.random.default_rng(0).integers(0, 10, size)
    dataset = hf_dataset(label=labels)
    lines = 0

    def trace(frame, event, arg):
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        partition = make_partition(dataset, scheme="dirichlet", num_clients=num_clients, alpha=10.0)
        partition.counts(labels)
    finally:
        sys.settrace(before)
    assert_covers(partition, size)
    return lines


def test_work_does_not_go_with_rows_times_clients():
    few, rows, both = lines_run(5_000, 50), lines_run(50_000, 50), lines_run(50_000, 500)
    assert rows < 11 * few and both < 11 * rows
