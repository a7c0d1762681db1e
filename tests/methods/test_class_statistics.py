"""Statistics of classes: running moments against pooled data."""

from typing import Any

import pytest
import torch

from hf_coefsfl.methods.base import ClientState
from hf_coefsfl.methods.gas import GAS
from hf_coefsfl.methods.parts.class_statistics import (
    VARIANCE_FLOOR,
    ClassStatistics,
    Moments,
    class_moments,
    combine,
    from_tensors,
    pooled,
    to_tensors,
    update,
)
from tests.support.class_statistics import generator, identical
from tests.support.toy import CLASSIFICATION

NAN = float("nan")

Batch = tuple[torch.Tensor, list[int], torch.Tensor]


def close(a: ClassStatistics, b: ClassStatistics, **tolerance: Any) -> bool:
    ours, theirs = to_tensors(a), to_tensors(b)
    return ours.keys() == theirs.keys() and all(torch.allclose(ours[n], theirs[n], **tolerance) for n in ours)


def uploads(lengths: list[int], seed: int = 0, size: int = 6, features: int = 2) -> list[Batch]:
    """Batches (activations, labels of two classes, mask) of several lengths, with padding at the right."""
    source, batches = generator(seed), []
    for length in lengths:
        s = 3 + 2 * torch.randn(size, length, features, generator=source)
        mask = torch.arange(length) < torch.randint(1, length + 1, (size, 1), generator=source)
        batches.append((s, [row % 2 for row in range(size)], mask))
    return batches


def test_moments_by_hand() -> None:
    """Position 0 sees 1 and 3, position 1 only 5 (the other sample is padding there), position 2 nothing."""
    s = torch.tensor([[[1.0], [5.0], [NAN]], [[3.0], [NAN], [7.0]]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    moments = Moments.of(s, mask)
    assert moments.weight.tolist() == [2, 1, 0]
    assert moments.mean.flatten().tolist() == [2, 5, 0]
    assert moments.variance.flatten().tolist() == [1, 0, 0]


def test_formula_by_hand() -> None:
    """w 1 and 3: α = 1/4, mean = 0/4 + 3 · 4/4 = 3, variance = (2 + 9)/4 + 3 · (6 + 1)/4 + 1e-5 = 8 + 1e-5."""
    old, new = (Moments(torch.tensor([w]), torch.tensor([m]), torch.tensor([v])) for w, m, v in _TWO)
    result = combine(old, new)
    assert result.weight.item() == 4 and result.mean.item() == 3
    assert result.variance.item() == pytest.approx(8 + 1e-5, abs=1e-6)
    assert VARIANCE_FLOOR == 1e-5


_TWO = ((1.0, 0.0, 2.0), (3.0, 4.0, 6.0))


def test_the_first_upload_is_taken_as_it_is() -> None:
    moments = Moments.of(torch.randn(4, 3, 2, generator=generator(0)), torch.ones(4, 3, dtype=torch.bool))
    first = update({}, {1: moments})[1]
    assert torch.equal(first.mean, moments.mean) and torch.equal(first.weight, moments.weight)
    torch.testing.assert_close(first.variance, moments.variance + 1e-5)


def test_pooling_gives_the_moments_of_all_samples() -> None:
    """Batches of several lengths with padding, against the samples of each class and position in one heap."""
    batches = uploads([4, 7, 5])
    total = pooled(class_moments(*batch) for batch in batches)
    for label in (0, 1):
        for t in range(7):
            heap = [s[(torch.tensor(y) == label) & m[:, t], t] for s, y, m in batches if s.shape[1] > t]
            seen = torch.cat(heap)
            assert total[label].weight[t] == len(seen)
            if len(seen):
                torch.testing.assert_close(total[label].mean[t], seen.mean(0))
                torch.testing.assert_close(total[label].variance[t], seen.var(0, unbiased=False), atol=4e-6, rtol=0)
            else:
                assert (total[label].mean[t] == 0).all() and (total[label].variance[t] == 0).all()
    assert total[0].weight[-1] < total[0].weight[0]  # some of it was padding


def test_running_moments_are_weighted_pooled_moments_and_a_sum_of_floors() -> None:
    """The recursion solved: W_n v_n = Σ w_j (v_j + m_j²) − W_n m_n² + 1e-5 Σ W_j.

    Every update adds the floor to the whole variance, of weight W_j at the time; so the variance is
    the pooled one with each sample weighted by its round, plus 1e-5 Σ_j W_j / W_n.
    """
    floor = 0.25  # large enough to be seen
    running: ClassStatistics = {}
    source, heap, weights, cumulated = generator(1), [], [], []
    for number in (1, 1, 2, 5):
        s = torch.randn(number + 2, 3, 2, generator=source, dtype=torch.double).float()
        ours = class_moments(s, [0] * len(s), torch.ones(s.shape[:2], dtype=torch.bool))
        running = update(running, {0: ours[0].scaled(number)}, floor)
        heap.append(s)
        weights += [float(number)] * len(s)
        cumulated.append(sum(weights))
    w = torch.tensor(weights).reshape(-1, 1, 1) / sum(weights)
    samples = torch.cat(heap)
    mean = (w * samples).sum(0)
    variance = (w * (samples - mean).square()).sum(0)
    torch.testing.assert_close(running[0].mean, mean)
    torch.testing.assert_close(running[0].variance, variance + floor * sum(cumulated) / cumulated[-1])
    assert (running[0].weight == cumulated[-1]).all()


def test_a_position_that_an_upload_does_not_reach_keeps_its_statistics() -> None:
    long, short = (Moments.of(torch.randn(5, n, 2, generator=generator(n)), torch.ones(5, n) > 0) for n in (4, 2))
    old = update({}, {0: long})
    new = update(old, {0: short})
    for before, after in zip(to_tensors(old).values(), to_tensors(new).values(), strict=True):
        assert torch.equal(before[2:], after[2:]) and not torch.equal(before[:2], after[:2])


def test_statistics_survive_their_tensors() -> None:
    statistics = update({}, class_moments(*uploads([4])[0]))
    statistics = {0: statistics[0], 2: statistics[1], 11: statistics[0]}
    again = from_tensors(to_tensors(statistics))
    assert list(again) == [0, 2, 11] and identical(again, statistics)


def test_merging_hardly_depends_on_the_order_and_repeats_to_the_bit() -> None:
    kept = []
    for client, batch in enumerate(uploads([4, 6, 6], seed=2)):
        ours = {label: moments.scaled(7) for label, moments in class_moments(*batch).items()}
        kept.append(ClientState(client, 6, to_tensors(ours)))
    results = []
    for order in ([0, 1, 2], [0, 1, 2], [2, 0, 1]):
        method = GAS()
        method.merge([kept[i] for i in order])
        results.append(method.statistics)
    assert identical(results[0], results[1])
    assert close(results[0], results[2], atol=1e-4, rtol=1e-4)


def test_state_goes_out_and_in() -> None:
    method, other = GAS(), GAS()
    assert method.state_dict() == {}
    method.merge([ClientState(0, 6, to_tensors(class_moments(*uploads([4])[0])))])
    other.load_state_dict(method.state_dict())
    assert identical(other.statistics, method.statistics)
    other.setup(None, CLASSIFICATION, 0)  # type: ignore[arg-type]
    assert other.statistics == {}
