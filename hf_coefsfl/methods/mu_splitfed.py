"""MU-SplitFed (Liang et al., 2025): zeroth-order updates on both sides, a scalar for feedback, no backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from ..protocol.client_side import ClientSide
from ..protocol.link import ClientLink
from ..protocol.messages import Message, SmashedData
from ..protocol.server_side import ServerSide
from .base import Method, above_zero, at_least, expect, option
from .parts.zeroth_order import Direction, two_point


@dataclass(frozen=True)
class Probes(SmashedData):
    """Uplink: the smashed data h at θᶜ, h₊ at θᶜ + μu and h₋ at θᶜ − μu; labels and context once."""

    kinds: ClassVar[dict[str, str]] = {**SmashedData.kinds, "ahead": "smashed_data", "behind": "smashed_data"}

    ahead: Tensor = field(kw_only=True)
    behind: Tensor = field(kw_only=True)


@dataclass(frozen=True)
class Slopes(Message):
    """Downlink: d of one batch, in each local epoch (E,): all that the client learns of the gradient."""

    kinds: ClassVar[dict[str, str]] = {"slopes": "gradients"}

    slopes: Tensor


@dataclass
class MUSplitFed(Method):
    """h, h₊ and h₋ up; τ passes of two-point steps on h at the server, then a joint one on h₊ and h₋; d down.

    d = (L(θˢ + μv; h₊) − L(θˢ − μv; h₋)) / 2μ is the slope of the loss along (u, v), the random
    direction of both sides: the server steps along v by it and the client along u, in plain SGD
    without weight decay. 2 transfers, of three activations up and one float a batch down.

    The probes of all batches are taken at the round-initial client weights, once a round. With several
    local epochs the server repeats its τ + 1 passes with new directions v and sends d of each epoch,
    and the client steps along the same u by each. With `per_batch` every batch is exchanged at
    the present weights, in a new direction each time: 2B transfers.

    A difference of losses is divided by 2μ, and so is all noise in it. Both sides of a difference
    see the same dropout masks. In bf16 the rounding of a loss exceeds the difference.
    """

    name: ClassVar[str] = "mu_splitfed"
    title: ClassVar[str] = "MU-SplitFed"
    table_position: ClassVar[int] = 5
    upload_tensors: ClassVar[int] = 3

    perturbation_scale: float = option(1e-3, "μ, length of a perturbation")
    server_passes: int = option(2, "τ, passes of the server over the batches")
    learning_rate: float | None = option(None, "η of both sides; None: the run's")
    per_batch: bool = option(False, "exchange every batch at the present weights")

    def __post_init__(self) -> None:
        """Check the ranges of the options."""
        at_least("server_passes", self.server_passes, 1)
        above_zero("perturbation_scale", self.perturbation_scale)
        above_zero("learning_rate", self.learning_rate)

    def can_be_probed(self) -> bool:
        """Return False: slopes along random directions come down, not gradients."""
        return False

    def round(self, client: ClientLink, server: ServerSide) -> None:
        """Exchange once, or once for each batch."""
        if self.per_batch:
            for walked in range(client.local_epochs * client.num_batches):
                # The batches are counted over all epochs: the count tells the client which u to draw.
                probes = expect(Probes, client.upload([walked]))
                (slopes,) = self._train(server, probes, [walked], client)
                client.update([slopes], [walked])
            return
        probes, batches = expect(Probes, client.upload()), range(client.num_batches)
        epochs = [
            self._train(server, probes, [epoch * len(batches) + batch for batch in batches], client)
            for epoch in range(client.local_epochs)
        ]
        client.update([Slopes(torch.cat([message.slopes for message in batch])) for batch in zip(*epochs, strict=True)])

    def _train(
        self, server: ServerSide, probes: Sequence[Probes], walked: Sequence[int], client: ClientLink
    ) -> list[Slopes]:
        """Do the server's τ passes over some batches and the joint one; return d of each batch.

        `walked` counts the batches over all epochs of the round.
        """
        count, total = client.num_batches, client.num_batches * client.local_epochs
        # Of the random stream the first `total` numbers are the client's u; the server's v come after them.
        for number in range(1, self.server_passes + 1):
            for step, data in zip(walked, probes, strict=True):
                ends = data.activations, data.activations
                _, loss = self._step(server, data, ends, step % count, number * total + step)
                server.observed.add("loss", loss)
        feedback = []
        for step, data in zip(walked, probes, strict=True):
            draw = (self.server_passes + 1) * total + step
            slope, loss = self._step(server, data, (data.ahead, data.behind), step % count, draw)
            server.observed.add("feedback_loss", loss)
            feedback.append(Slopes(slope.float().reshape(1)))
        return feedback

    def _step(
        self, server: ServerSide, probes: Probes, ends: tuple[Tensor, Tensor], batch: int, draw: int
    ) -> tuple[Tensor, Tensor]:
        """Step along one v by a difference of losses, given the activations at its ends; return d and the mean loss."""
        direction = Direction(_weights(server), server.context.generator("method", draw))

        def loss(activations: Tensor) -> Tensor:
            value: Tensor = server.forward(replace(probes, activations=activations), batch).loss
            return value

        ahead, behind = (partial(loss, activations) for activations in ends)
        slope, mean = two_point(direction, self.perturbation_scale, ahead, behind)
        direction.descend(slope, self._rate(server), server.context.max_grad_norm)
        return slope, mean

    @torch.no_grad()
    def upload(self, client: ClientSide, batches: Sequence[int] | None) -> Iterator[SmashedData]:
        """Yield the probes of all batches, or of some. Runs on the client."""
        for walked in range(len(client.batches)) if batches is None else batches:
            yield self._probe(client, walked)

    def _probe(self, client: ClientSide, walked: int) -> Probes:
        batch = walked % len(client.batches)
        smashed = client.smash(batch)
        ends = []
        for scale in (self.perturbation_scale, -self.perturbation_scale):
            with _direction(client, walked).moved(scale):
                ends.append(client.smash(batch).activations)
        return Probes(
            smashed.activations, smashed.context, smashed.labels, smashed.shapes, ahead=ends[0], behind=ends[1]
        )

    def update(self, client: ClientSide, messages: Sequence[Message] | None, batches: Sequence[int] | None) -> None:
        """θᶜ ← θᶜ − η d u for each batch, epoch by epoch. Runs on the client."""
        feedback = expect(Slopes, messages)
        drawn = range(len(feedback)) if batches is None else batches
        for epoch in range(len(feedback[0].slopes)):
            for walked, message in zip(drawn, feedback, strict=True):
                _direction(client, walked).descend(
                    message.slopes[epoch], self._rate(client), client.context.max_grad_norm
                )

    def _rate(self, side: ClientSide | ServerSide) -> float:
        if self.learning_rate is not None:
            return self.learning_rate
        return float(side.optimizer.param_groups[0]["lr"])


def _direction(client: ClientSide, walked: int) -> Direction:
    """Return the client's u for one batch; `walked` counts the batches over all epochs of the round."""
    return Direction(_weights(client), client.context.generator("method", walked))


def _weights(side: ClientSide | ServerSide) -> list[Tensor]:
    """Return the weights that a side trains."""
    return [weight for group in side.optimizer.param_groups for weight in group["params"]]
