"""GAS (Yang et al., 2024): gradient reuse, with activations that the server generates from class statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence

from ..protocol.client_side import ClientSide
from ..protocol.devices import to_device
from ..protocol.link import ClientLink
from ..protocol.loss import ONE_LABEL_A_SAMPLE, LossSpec
from ..protocol.masks import with_rows
from ..protocol.messages import Feedback, Message, SmashedData
from ..protocol.packing import Exchange
from ..protocol.padding import position_mask
from ..protocol.server_side import ServerSide, on_graph
from .base import ClientState, Method, at_least, option
from .parts.class_statistics import (
    ClassStatistics,
    class_moments,
    from_tensors,
    pooled,
    seen_positions,
    to_tensors,
    update,
)
from .parts.costs import RoundKind, Workload
from .reuse import ReusedFeedback

if TYPE_CHECKING:
    from ..split import SplitModel


@dataclass
class GAS(ReusedFeedback):
    """g₀ of logits adjusted by the client's label frequencies; server batches filled up with generated activations.

    The server keeps a running mean and variance of the activations of each class and token position,
    over all clients, each upload weighted by its round (counted from 1) times its samples. As soon
    as all classes have been seen, every class in the pool of a client is padded to
    `samples_per_class` with draws from N(mean, variance), also a class that the client does not
    have, and the server trains on the enlarged batches with the plain loss. 2 transfers.

    With `per_batch` every batch is exchanged at the present weights of both sides: 2B transfers.
    The server then knows no more of the client than what it has sent so far, so that the label
    frequencies and statistics are those of the round up to the batch, and every batch is padded to
    its share of `samples_per_class`.
    """

    name: ClassVar[str] = "gas"
    title: ClassVar[str] = "GAS"
    table_position: ClassVar[int] = 7

    samples_per_class: int = option(32, "samples that each class is padded to")
    per_batch: bool = option(False, "exchange every batch at the present weights")

    def __post_init__(self) -> None:
        """Check the ranges of the options, and start without statistics."""
        at_least("samples_per_class", self.samples_per_class, 1)
        self.statistics: ClassStatistics = {}  # on the CPU; replaced at the end of a round, never changed

    def check_loss(self, loss_spec: LossSpec) -> None:
        """Refuse a task without one class for each sample: the statistics and the draws go by class."""
        reason = None
        if loss_spec.loss_type not in ONE_LABEL_A_SAMPLE:
            reason = f"a {loss_spec.loss_type} loss has none"
        elif loss_spec.problem_type is not None and not loss_spec.problem_type.startswith("single_label"):
            reason = f"problem_type={loss_spec.problem_type!r} has none"
        elif loss_spec.num_labels < 2:
            reason = f"num_labels={loss_spec.num_labels} makes this a regression"
        if reason is not None:
            raise ValueError(
                f"GAS generates activations of a class and needs one class label for each sample; {reason}. Use it for "
                "single-label classification of sequences, images, videos or audio, or choose another method."
            )

    def round_kinds(self, work: Workload) -> list[RoundKind]:
        """Return a round with generated samples, of a client that has its classes in turn."""
        return [RoundKind(self, generated=generated_samples(self, work))]

    def state_nbytes(self, measured: int, work: Workload) -> int:
        """Return the bytes of the statistics of all classes; those of one were measured."""
        return measured * work.num_labels

    def setup(self, split: SplitModel, loss_spec: LossSpec, seed: int, first_round: int = 0) -> None:
        """Start without statistics."""
        self.statistics = {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the running statistics."""
        return to_tensors(self.statistics)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the running statistics."""
        self.statistics = from_tensors(state)

    def merge(self, kept: Sequence[ClientState]) -> None:
        """Update the statistics with the uploads of the round, client by client."""
        for contribution in kept:
            self.statistics = update(self.statistics, from_tensors(contribution.tensors))

    def magnitude(self, kept: Mapping[str, Tensor]) -> float:
        """Return the root mean square of the activations that the statistics of an upload describe."""
        moments = from_tensors(kept).values()
        total = sum(float((m.weight * m.mean_square()).sum()) for m in moments)
        count = sum(float(m.weight.sum()) for m in moments)
        return (total / count) ** 0.5 if count else 0.0

    def round(self, client: ClientLink, server: ServerSide) -> None:
        """Exchange once; feedback is computed at the round-initial server weights, with adjusted logits."""
        if self.per_batch:
            self._exchange_each_batch(client, server)
            return
        smashed = client.upload()
        labels = class_labels(outlines(smashed))
        counts = label_counts(labels, server.loss_spec.num_labels)
        seen = to_device(torch.tensor(counts, dtype=torch.float32), server.context.device)
        client.update(
            client.stage(Feedback(adjusted_gradient(server, data, batch, seen)) for batch, data in enumerate(smashed))
        )
        ours = weighted(pooled(map(observe, smashed, labels)), server)
        statistics = update(self._initial(server), ours)
        server.kept = to_tensors(ours)
        seen_at = seen_positions(self.statistics, from_tensors(server.kept))
        missing: list[list[int]] = [[] for _ in range(client.num_batches)]
        if can_generate(seen_at, outlines(smashed), server.loss_spec.num_labels):
            missing = spread(missing_labels(counts, self.samples_per_class), len(smashed))
        for _ in range(client.local_epochs):
            for batch, data in enumerate(smashed):
                # Drawn anew in each epoch, to the same values: kept, they would outweigh the upload.
                server.train_step(enlarge(data, missing[batch], statistics, seen_at, server, batch), batch)

    def _exchange_each_batch(self, client: ClientLink, server: ServerSide) -> None:
        seen = torch.zeros(server.loss_spec.num_labels, device=server.context.device)
        observed: ClassStatistics = {}
        initial = self._initial(server)
        for _ in range(client.local_epochs):
            for batch in range(client.num_batches):
                smashed = client.upload([batch])
                labels = class_labels(smashed)
                counts = label_counts(labels, len(seen))
                seen = seen + to_device(torch.tensor(counts, dtype=seen.dtype), seen.device)
                client.update([Feedback(adjusted_gradient(server, smashed[0], batch, seen))], [batch])
                observed = pooled([observed, observe(smashed[0], labels[0])])
                statistics = update(initial, weighted(observed, server))
                seen_at = seen_positions(self.statistics, observed)
                missing: list[int] = []
                if can_generate(seen_at, smashed, len(seen)):
                    share = share_of(self.samples_per_class, batch, client.num_batches)
                    missing = missing_labels(counts, share)
                server.train_step(enlarge(smashed[0], missing, statistics, seen_at, server, batch), batch)
        server.kept = to_tensors(weighted(observed, server))

    def _initial(self, server: ServerSide) -> ClassStatistics:
        """Return the round-initial statistics on the device of the activations."""
        return {label: moments.to(server.context.device) for label, moments in self.statistics.items()}

    def update(self, client: ClientSide, messages: Sequence[Message] | None, batches: Sequence[int] | None) -> None:
        """Do the local updates with g₀, or one step for the batch last uploaded. Runs on the client."""
        if batches is None:
            super().update(client, messages, batches)
        else:
            Method.update(self, client, messages, batches)


def num_generated(counts_per_class: Sequence[float], samples_per_class: int = 32) -> int:
    """Return N_g, how many activations pad each class to `samples_per_class`.

    >>> num_generated([10] * 100)  # CIFAR-100, a client with 1000 samples
    2200
    """
    return sum(max(0, samples_per_class - int(count)) for count in counts_per_class)


def generated_samples(method: GAS, work: Workload) -> int:
    """Return how many activations are generated in an epoch for a client that has its classes in turn."""

    def counts(start: int, stop: int) -> list[int]:
        classes = work.num_labels
        return [len(range(start + (label - start) % classes, stop, classes)) for label in range(classes)]

    if not method.per_batch:
        return num_generated(counts(0, sum(work.sizes)), method.samples_per_class)
    total, start = 0, 0
    for batch, size in enumerate(work.sizes):
        share = share_of(method.samples_per_class, batch, len(work.sizes))
        total += num_generated(counts(start, start + size), share)
        start += size
    return total


def missing_labels(counts_per_class: Sequence[float], samples_per_class: int) -> list[int]:
    """Return the labels of the activations to generate, class by class."""
    missing = [num_generated([count], samples_per_class) for count in counts_per_class]
    return [label for label, number in enumerate(missing) for _ in range(number)]


def spread(labels: Sequence[int], num_batches: int) -> list[list[int]]:
    """Deal labels out to the batches, one each in turn."""
    return [list(labels[batch::num_batches]) for batch in range(num_batches)]


def share_of(total: int, batch: int, num_batches: int) -> int:
    """Return the share of `total` that belongs to one batch; the shares are integers and add up."""
    return total * (batch + 1) // num_batches - total * batch // num_batches


def outlines(smashed: Sequence[SmashedData]) -> Sequence[SmashedData]:
    """Return an upload without its activations: its labels and shapes can be read without unpacking them."""
    return list(smashed.outlines()) if isinstance(smashed, Exchange) else smashed


def class_labels(smashed: Sequence[SmashedData]) -> list[list[int]]:
    """Return the class of each sample, batch by batch; all are read at once, as an accelerator is waited for."""
    found = [data.labels["labels"] for data in smashed]
    for data, labels in zip(smashed, found, strict=True):
        if labels.is_floating_point() or labels.numel() != len(data.activations):
            raise ValueError(
                f"GAS needs one class label for each sample, got labels of shape {tuple(labels.shape)} and type "
                f"{labels.dtype} for {len(data.activations)} samples: several labels a sample or a regression. Choose "
                "another method."
            )
    classes = iter(torch.cat([labels.reshape(-1) for labels in found]).tolist())
    return [list(islice(classes, labels.numel())) for labels in found]


def label_counts(labels: Sequence[Sequence[int]], num_labels: int) -> list[int]:
    """Return how many samples of each class a client has uploaded (C,)."""
    counts = Counter(label for batch in labels for label in batch)
    return [counts[label] for label in range(num_labels)]


def adjusted_gradient(server: ServerSide, smashed: SmashedData, batch: int, counts: Tensor) -> Tensor:
    """∇ₛ of the batch-mean cross-entropy of logits + log(label frequency), at the present server weights."""
    leaf = on_graph(smashed)
    logits = server.forward(leaf, batch).logits
    frequency = counts / counts.sum().clamp(min=1)
    loss = cross_entropy(logits.float() + (frequency + 1e-12).log(), smashed.labels["labels"].reshape(-1))
    server.observed.add("feedback_loss", loss)
    return torch.autograd.grad(loss, leaf.activations)[0]


def observe(smashed: SmashedData, labels: Sequence[int]) -> ClassStatistics:
    """Return the moments of a batch by class, without its padding."""
    s, mask = smashed.activations, position_mask(smashed)
    everywhere = torch.ones(s.shape[:2], dtype=torch.bool, device=s.device)
    return class_moments(s, labels, everywhere if mask is None else mask)


def weighted(upload: ClassStatistics, server: ServerSide) -> ClassStatistics:
    """Return the moments of an upload, weighted by the number of the round times the samples."""
    number = server.context.round_index + 1  # from 1: the uploads of a round 0 would weigh nothing
    return {label: moments.scaled(number) for label, moments in upload.items()}


def can_generate(seen: Mapping[int, Tensor], batches: Sequence[SmashedData], num_labels: int) -> bool:
    """Whether every class was seen at the positions of every batch: at some if it is masked, else at all."""
    if not all(label in seen for label in range(num_labels)):
        return False
    for length, masked in {(data.activations.shape[1], position_mask(data) is not None) for data in batches}:
        parts = [seen[label][:length] for label in range(num_labels)]
        if not all(bool(part.any()) if masked else len(part) == length and bool(part.all()) for part in parts):
            return False
    return True


def enlarge(
    smashed: SmashedData,
    labels: Sequence[int],
    statistics: ClassStatistics,
    seen: Mapping[int, Tensor],
    server: ServerSide,
    batch: int,
) -> SmashedData:
    """Return a batch with one generated activation appended for each of `labels`.

    Generated samples of padded text are as long as the longest sample seen of their class. Other
    tensors of each sample (positions, say) are taken from the samples of the batch in turn.
    """
    if not labels:
        return smashed
    s = smashed.activations
    size, length, number = len(s), s.shape[1], len(labels)
    generator = server.context.generator("method", batch)
    drawn = [statistics[label].draw(1, length, generator) for label in labels]
    mask = pad_sequence([seen[label][:length] for label in labels], batch_first=True)
    mask = pad(mask, (0, length - mask.shape[1]))

    def extended(name: str, value: Tensor) -> Tensor:
        if value.ndim == 0 or len(value) != size:  # a flag, or the same for all samples
            return value
        fits = value.shape == s.shape[:2]
        if name == "attention_mask" and value.ndim == 2:
            return with_rows(value, mask if fits else torch.ones(number, value.shape[1]))
        if name == "padding" and fits:
            return with_rows(value, ~mask)
        return torch.cat([value, value[torch.arange(number, device=value.device) % size]])

    target = smashed.labels["labels"]
    new = to_device(torch.tensor(labels, dtype=target.dtype), target.device).reshape(number, *target.shape[1:])
    return replace(
        smashed,
        activations=torch.cat([s, torch.cat(drawn).to(s.dtype)]),
        context={name: extended(name, value) for name, value in smashed.context.items()},
        labels=smashed.labels | {"labels": torch.cat([target, new])},
        shapes={n: (size + number, *dims[1:]) if dims[0] == size else dims for n, dims in smashed.shapes.items()},
    )
