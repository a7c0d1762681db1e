"""The staleness probe: how stale a reused gradient is (Section 1), and how much of it the compensation removes.

The probe repeats one client's local updates of a round beside the training. Within a round the client's path depends
on the feedback alone. So the server can stay at its round-initial weights and compute the fresh gradient of every
step. The probe does not change the training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from .._io import write_atomically
from ..methods import Method, make_method, ordered_methods
from ..protocol.client_side import ClientSide
from ..protocol.loss import OutputBlock
from ..protocol.messages import Feedback, SmashedData
from ..protocol.packing import Exchange
from ..protocol.server_side import ServerSide, on_graph
from .plots import new_figure


@dataclass(frozen=True)
class ProbePoint:
    """One local update of the probed client. Errors are relative to the norm of the fresh gradient."""

    round: int
    update: int
    displacement: float  # mean over the samples of ||δ||
    stale_cosine: float  # of g₀ with the fresh gradient
    stale_error: float
    compensated_cosine: float  # of g̃ with the fresh gradient
    compensated_error: float
    best_lambda: float | None  # λ* of Proposition 1, median over the samples; None if no sample moved
    helped_share: float | None  # samples with λ < 2 λ*, which compensation with λ brings nearer to the fresh gradient
    surrogate_above: bool  # whether the surrogate F̂(δ) was not below the loss


@runtime_checkable
class Probed(Protocol):
    """What the probe calls of a method."""

    def feedback(self, server: ServerSide, smashed: SmashedData, batch: int) -> Feedback:
        """Return what the server sends down for one batch."""

    def compensate(self, feedback: Feedback, displacement: Tensor, outputs: Sequence[OutputBlock]) -> Tensor:
        """Return the compensated gradient."""

    def probed_factor(self, batch_size: int) -> float:
        """Return the λ to compare with λ*."""


def check_probe(method: Method) -> None:
    """Refuse to probe a method whose client does not reuse the round-initial feedback."""
    if not method.can_be_probed():
        allowed = ", ".join(name for name in ordered_methods() if make_method(name).can_be_probed())
        raise ValueError(
            f"staleness_probe measures reused gradients of the round-initial server, which {method.name!r} does not "
            "use (or not as they are, or with feedback_at of another server). "
            f"Use it with one of {allowed}, or leave it off."
        )


class StalenessProbe:
    """Probes every so many rounds after the warm-up (0: never), and keeps the points of all of them."""

    def __init__(self, every: int, warmup_rounds: int):
        self.every, self.warmup_rounds = every, warmup_rounds
        self.points: list[ProbePoint] = []

    def due(self, round_index: int) -> bool:
        """Return whether this round is probed."""
        since = round_index - self.warmup_rounds
        return bool(self.every) and since >= 0 and since % self.every == 0

    def examine(self, method: Method, client: ClientSide, server: ServerSide, num_samples: int) -> list[ProbePoint]:
        """Return the points of one client's round."""
        assert isinstance(method, Probed)
        return probe_staleness(method, client, server)

    def take(self, result: list[ProbePoint]) -> None:
        """Append the points of a round."""
        self.points += result

    def of_round(self, round_index: int) -> list[ProbePoint]:
        """Return the points of a round; none if it was not probed."""
        return [point for point in self.points if point.round == round_index + 1]


def probe_staleness(method: Probed, client: ClientSide, server: ServerSide) -> list[ProbePoint]:
    """Repeat a client's local updates from the round-initial weights of both sides. Leaves the client's changed."""
    smashed = client.exchange()
    feedback: Exchange[Feedback] = Exchange(client.context.store)
    losses = []
    for batch, data in enumerate(smashed):
        feedback.append(method.feedback(server, data, batch), smashed.kept(batch))
        losses.append(_fresh(server, data.activations, client, batch)[1])
    points = []
    for epoch in range(client.context.local_epochs):
        for batch, message in enumerate(feedback):
            activations = client.smash(batch).activations
            delta = client.displacement(batch)
            compensated = method.compensate(message, delta, client.output_blocks(batch))
            fresh, loss = _fresh(server, activations, client, batch)
            update = epoch * len(feedback) + batch
            gradients = message.gradient, compensated, fresh
            points.append(
                _point(method.probed_factor(len(activations)), client, update, gradients, delta, (losses[batch], loss))
            )
            client.descend(compensated)
    return points


def _fresh(server: ServerSide, activations: Tensor, client: ClientSide, batch: int) -> tuple[Tensor, Tensor]:
    """∇ₛL(s; θˢ) and L(s; θˢ) at the server's weights of the round's start."""
    leaf = on_graph(replace(client.initial[batch], activations=activations))
    loss = server.forward(leaf, batch).loss
    return torch.autograd.grad(loss, leaf.activations)[0], loss.detach()


def _point(
    factor: float,
    client: ClientSide,
    update: int,
    gradients: tuple[Tensor, Tensor, Tensor],
    displacement: Tensor,
    losses: tuple[Tensor, Tensor],
) -> ProbePoint:
    """Compare the (stale, compensated, fresh) gradients of an update, and the losses (at s₀, at s)."""
    stale, compensated, fresh, delta = (t.flatten(1).float() for t in (*gradients, displacement))
    initial_loss, loss = losses
    norm = fresh.norm().clamp(min=1e-30)
    scaled = stale * stale * delta  # D δ
    moved = scaled.square().sum(1) > 0
    best = (scaled * (fresh - stale)).sum(1)[moved] / scaled.square().sum(1)[moved]  # as H̄δ = fresh − stale
    surrogate = initial_loss + (delta * (stale + compensated) / 2).sum()
    return ProbePoint(
        round=client.context.round_index + 1,
        update=update,
        displacement=delta.norm(dim=1).mean().item(),
        stale_cosine=cosine_similarity(stale.flatten(), fresh.flatten(), dim=0).item(),
        stale_error=((stale - fresh).norm() / norm).item(),
        compensated_cosine=cosine_similarity(compensated.flatten(), fresh.flatten(), dim=0).item(),
        compensated_error=((compensated - fresh).norm() / norm).item(),
        best_lambda=best.median().item() if len(best) else None,
        helped_share=(factor < 2 * best).float().mean().item() if len(best) else None,
        surrogate_above=bool(surrogate >= loss - 1e-6 * loss.abs()),
    )


def summarize_probe(points: Sequence[ProbePoint]) -> dict[str, float]:
    """Return the means over a client's local updates, for the log; the first update has no displacement."""
    later = [point for point in points if point.displacement > 0] or list(points)
    means = {}
    for name in asdict(later[0]).keys() - {"round", "update"}:
        values = [float(v) for point in later if (v := getattr(point, name)) is not None]
        if values:
            means[f"probe_{name}"] = sum(values) / len(values)
    return dict(sorted(means.items()))


def save_probe(points: Sequence[ProbePoint], path: Path) -> None:
    """Write the points as JSON."""
    write_atomically(path, json.dumps([asdict(point) for point in points], indent=1) + "\n")


def load_probe(path: Path) -> list[ProbePoint]:
    """Read what `save_probe` wrote."""
    return [ProbePoint(**entry) for entry in json.loads(path.read_text())]


def plot_probe(points: Sequence[ProbePoint], path: str | PathLike[str]) -> None:
    """Save a picture over local updates: cosine, error and displacement, each the mean over the probed rounds."""
    figure = new_figure(15, 3.2, dpi=130)
    from matplotlib.ticker import MaxNLocator

    updates = sorted({point.update for point in points})
    grouped = [[point for point in points if point.update == update] for update in updates]

    def mean(name: str) -> list[float]:
        values = [[float(v) for point in group if (v := getattr(point, name)) is not None] for group in grouped]
        return [sum(group) / len(group) if group else float("nan") for group in values]

    stale, compensated = {"color": "#d55e00", "ls": "--", "marker": "X"}, {"color": "#0072b2", "marker": "o"}
    other = {"color": "#009e73", "marker": "s"}
    panels: list[tuple[str, list[tuple[str, str | None, dict[str, str]]]]] = [
        (
            "cosine with the fresh gradient",
            [("stale_cosine", "stale g₀", stale), ("compensated_cosine", "compensated g̃", compensated)],
        ),
        ("relative error against it", [("stale_error", None, stale), ("compensated_error", None, compensated)]),
        ("displacement ‖δ‖", [("displacement", None, other)]),
        ("best λ, median", [("best_lambda", None, other)]),
        (
            "share",
            [
                ("helped_share", "samples with λ < 2λ*", other),
                ("surrogate_above", "surrogate not below the loss", {"color": "#cc79a7", "ls": ":", "marker": "D"}),
            ],
        ),
    ]
    for axes, (title, lines) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for name, label, style in lines:
            axes.plot(updates, mean(name), label=label, markersize=4, **style)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("local update of the round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        if any(label for _, label, _ in lines):
            axes.legend(frameon=False, fontsize=8)
        if title == "share":
            axes.set_ylim(-0.05, 1.35)
    figure.savefig(path)
