"""Running statistics of activations, per class and token position, as GAS keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from ...protocol.devices import to_device, to_host, widest_float
from ...protocol.tensors import over

VARIANCE_FLOOR = 1e-5  # added at each update, so that no variance is zero


@dataclass(frozen=True)
class Moments:
    """Weight (T,), mean (T, *d) and variance (T, *d) of activations at each of T token positions.

    A position without weight has not been seen; its mean and variance are zero too. The variance is
    that of the population: that of one sample is zero.
    """

    weight: Tensor
    mean: Tensor
    variance: Tensor

    @classmethod
    def of(cls, activations: Tensor, mask: Tensor) -> Moments:
        """Return the moments of activations (n, T, *d) whose mask (n, T) says which positions are not padding."""
        # Padding may hold anything, even NaN, so it is blanked out rather than multiplied by zero.
        padding = over(~mask, activations)
        values = activations.detach().float().masked_fill(padding, 0.0)
        count = mask.float().sum(0)
        divisor = over(count.clamp(min=1), values[0])
        mean = values.sum(0) / divisor
        return cls(count, mean, (values - mean).square().masked_fill(padding, 0.0).sum(0) / divisor)

    def mean_square(self) -> Tensor:
        """Return (T,), the mean square of the activations at each position, as precise as the device can."""
        dtype = widest_float(self.mean.device)
        return (self.variance.to(dtype) + self.mean.to(dtype).square()).flatten(1).mean(1)

    def scaled(self, factor: float) -> Moments:
        """Return the same moments with `factor` times the weight."""
        return Moments(self.weight * factor, self.mean, self.variance)

    def to(self, device: torch.device | str) -> Moments:
        """Return the moments on a device."""
        return Moments(self.weight.to(device), self.mean.to(device), self.variance.to(device))

    def lengthened(self, length: int) -> Moments:
        """Return the moments with unseen positions appended up to `length`."""
        missing = length - len(self.weight)
        if missing <= 0:
            return self
        beyond = [0, 0] * (self.mean.ndim - 1) + [0, missing]  # `pad` counts from the last dimension
        return Moments(pad(self.weight, (0, missing)), pad(self.mean, beyond), pad(self.variance, beyond))

    def draw(self, number: int, length: int, generator: torch.Generator) -> Tensor:
        """Return `number` draws from N(mean, variance) over the first `length` positions; zeros at unseen ones."""
        moments = self.lengthened(length)
        mean, deviation = moments.mean[:length], moments.variance[:length].sqrt()
        noise = torch.randn((number, *mean.shape), generator=generator, device=mean.device)
        return mean + deviation * noise


ClassStatistics = Mapping[int, Moments]  # of the classes seen so far


def combine(old: Moments, new: Moments, floor: float = VARIANCE_FLOOR) -> Moments:
    """Return the moments of both, each position weighted by α = w_old / (w_old + w_new).

    mean = α m_old + (1 − α) m_new and variance = α (v_old + (mean − m_old)²) + (1 − α) (v_new + (mean − m_new)²),
    plus `floor` at the positions that `new` speaks of. With a floor of zero these are the moments
    of the pooled activations.
    """
    length = max(len(old.weight), len(new.weight))
    old, new = old.lengthened(length), new.lengthened(length)
    weight = old.weight + new.weight
    # At positions that neither has seen both weights, and so α, are zero.
    alpha = over(old.weight / weight.clamp(min=torch.finfo(weight.dtype).tiny), new.mean)
    mean = alpha * old.mean + (1 - alpha) * new.mean
    variance = alpha * (old.variance + (mean - old.mean).square())
    variance = variance + (1 - alpha) * (new.variance + (mean - new.mean).square())
    return Moments(weight, mean, variance + floor * over((new.weight > 0).float(), mean))


def update(old: ClassStatistics, new: ClassStatistics, floor: float = VARIANCE_FLOOR) -> dict[int, Moments]:
    """Return the statistics updated with those of `new`; neither argument is changed."""
    updated = dict(old)
    for label, moments in new.items():
        known = updated.get(label) or Moments(*(torch.zeros_like(t[:0]) for t in _parts(moments).values()))
        updated[label] = combine(known, moments, floor)
    return updated


def class_moments(activations: Tensor, labels: Sequence[int], mask: Tensor) -> dict[int, Moments]:
    """Return the moments of each class in a batch (b, T, *d); labels below zero belong to none."""
    rows: dict[int, list[int]] = {label: [] for label in sorted(set(labels)) if label >= 0}
    for row, label in enumerate(labels):
        if label >= 0:
            rows[label].append(row)
    order = to_device(torch.tensor([row for own in rows.values() for row in own], dtype=torch.long), activations.device)
    parts = order.split([len(own) for own in rows.values()])
    return {label: Moments.of(activations[part], mask[part]) for label, part in zip(rows, parts, strict=True)}


def pooled(batches: Iterable[ClassStatistics]) -> dict[int, Moments]:
    """Return the moments of all batches together, which may differ in length."""
    total: dict[int, Moments] = {}
    for batch in batches:
        total = update(total, batch, floor=0.0)
    return total


def seen_positions(*sources: ClassStatistics) -> dict[int, Tensor]:
    """Return which positions of each class have been seen by any source (T,), on the host."""
    seen: dict[int, Tensor] = {}
    for statistics in sources:
        weights = to_host([moments.weight for moments in statistics.values()])  # an accelerator is waited for once
        for label, weight in zip(statistics, weights, strict=True):
            seen[label] = pad_sequence([seen.get(label, weight[:0] > 0), weight > 0]).any(1)
    return seen


def to_tensors(statistics: ClassStatistics) -> dict[str, Tensor]:
    """Return the statistics by name, `class.moment`, on the CPU."""
    named = {f"{label}.{name}": t for label, moments in statistics.items() for name, t in _parts(moments).items()}
    return dict(zip(named, to_host(list(named.values())), strict=True))


def from_tensors(tensors: Mapping[str, Tensor]) -> dict[int, Moments]:
    """Return the statistics that `to_tensors` named, in the order of the classes."""
    labels = sorted({int(name.split(".")[0]) for name in tensors})
    names = ("weight", "mean", "variance")
    return {label: Moments(*(tensors[f"{label}.{name}"].cpu() for name in names)) for label in labels}


def _parts(moments: Moments) -> dict[str, Tensor]:
    return {"weight": moments.weight, "mean": moments.mean, "variance": moments.variance}
