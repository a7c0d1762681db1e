"""The staleness probe: how far the gradient that a client uses is from vanilla SFL's, and why.

The probe repeats one client's round beside the training, with both sides recorded. At each local update vanilla SFL
would use ∇ₛL(s; θₖ): fresh activations s, and the server θₖ of that step. Once-per-round methods use g̃, made from the
answer of another server θ to older activations s₀. The difference has two parts, which add up:

    g̃ − ∇ₛL(s; θₖ) = [g̃ − ∇ₛL(s; θ)] + [∇ₛL(s; θ) − ∇ₛL(s; θₖ)]

The first is what the activations' move leaves after compensation, the second what the server's move causes. The probe
does not change the training.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from .._io import write_atomically
from ..methods import Method, make_method, ordered_methods
from ..protocol.client_side import ClientSide
from ..protocol.link import LocalLink
from ..protocol.messages import SmashedData
from ..protocol.padding import kept_positions, without_padding
from ..protocol.server_side import ServerSide, on_graph
from .plots import new_figure


@dataclass(frozen=True)
class ProbePoint:
    """One local update of the probed client.

    Vanilla's gradient is ∇ₛL(s; θₖ) at the server of this step; the fresh one is ∇ₛL(s; θ) at the server that answered.
    The errors of `stale` and `compensated` are relative to the norm of the fresh gradient, the others to vanilla's.
    """

    round: int
    update: int
    displacement: float  # mean over the samples of ||δ||
    norm: float  # of vanilla's gradient
    used_cosine: float  # of g̃ with vanilla's gradient
    used_error: float
    activation_error: float  # of g̃ to the fresh gradient: the part of the activations' move
    server_cosine: float  # of the fresh gradient with vanilla's
    server_error: float  # of the fresh gradient to vanilla's: the part of the server's move
    stale_cosine: float  # of g₀ with the fresh gradient
    stale_error: float
    compensated_cosine: float  # of g̃ with the fresh gradient
    compensated_error: float
    best_lambda: float | None  # λ* of Proposition 1, median over the samples; None if no sample moved
    helped_share: float | None  # samples with λ < 2 λ*, which compensation with λ brings nearer to the fresh gradient
    surrogate_above: bool | None  # whether the surrogate F̂(δ) was not below the loss; None without a surrogate


def check_probe(method: Method) -> None:
    """Refuse to probe a method in which no gradient enters the client half."""
    if not method.can_be_probed():
        allowed = ", ".join(name for name in ordered_methods() if make_method(name).can_be_probed())
        raise ValueError(
            f"staleness_probe measures the gradient that enters the client half, and {method.name!r} has none. Use it "
            f"with one of {allowed}, or leave it off."
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
        return probe_staleness(method, client, server)

    def take(self, result: list[ProbePoint]) -> None:
        """Append the points of a round."""
        self.points += result

    def of_round(self, round_index: int) -> list[ProbePoint]:
        """Return the points of a round; none if it was not probed."""
        return [point for point in self.points if point.round == round_index + 1]


@dataclass(frozen=True)
class _Update:
    """A local update as it happened."""

    batch: int
    smashed: SmashedData  # s, as the half gave it
    gradient: Tensor  # g̃
    answering: int  # steps of the server whose answer this was


class _RecordedServer(ServerSide):
    """A server side that keeps its weights after every step, and how many it had taken at the last pass of a batch."""

    def __init__(self, server: ServerSide):
        super().__init__(server.half, server.optimizer, server.context, server.loss_spec)
        self._trained = [p for p in server.half.parameters() if p.requires_grad]
        self.answered: dict[int, int] = {}
        self.path = [self._weights()]

    def _weights(self) -> list[Tensor]:
        return [p.detach().to("cpu", copy=True) for p in self._trained]

    def forward(self, smashed: SmashedData, batch: int) -> object:
        """Note which server answers."""
        self.answered[batch] = len(self.path) - 1
        return super().forward(smashed, batch)

    def step(self) -> None:
        """Note the weights."""
        super().step()
        self.path.append(self._weights())

    @torch.no_grad()
    def stand_at(self, step: int) -> None:
        """Take the weights after so many steps, or the last."""
        for p, value in zip(self._trained, self.path[min(step, len(self.path) - 1)], strict=True):
            p.copy_(value)

    def fresh(self, smashed: SmashedData, batch: int, step: int) -> tuple[Tensor, Tensor]:
        """Return ∇ₛL and L at the weights after so many steps."""
        self.stand_at(step)
        leaf = on_graph(smashed.to(self.context.device))
        loss = super().forward(leaf, batch).loss
        return torch.autograd.grad(loss, leaf.activations)[0].cpu(), loss.detach().cpu()


class _RecordedClient(ClientSide):
    """A client side that keeps what enters its half at every local update."""

    def __init__(self, client: ClientSide, server: _RecordedServer):
        super().__init__(client.half, client.batches, client.optimizer, client.context, client.loss_spec)
        self._server, self._batch = server, 0
        self.updates: list[_Update] = []
        with torch.no_grad():
            self.start = [self._smash(batch).detach().to("cpu") for batch in range(len(client.batches))]  # s₀

    def smash(self, batch: int) -> SmashedData:
        """Note the batch."""
        self._batch = batch
        return super().smash(batch)

    def minimize(self, loss: Tensor) -> None:
        """Note the gradient at the cut."""
        entered: list[Tensor] = []
        smashed, batch = self.live.detach(), self._batch
        handle = self.live.activations.register_hook(entered.append)
        super().minimize(loss)
        handle.remove()
        answering = self._server.answered.get(batch, 0)
        self.updates.append(_Update(batch, smashed.to("cpu"), entered[0].detach().cpu(), answering))


def probe_staleness(method: Method, client: ClientSide, server: ServerSide) -> list[ProbePoint]:
    """Repeat a client's round from the round-initial weights of both sides. Leaves both changed."""
    method = copy.deepcopy(method)  # the run's own keeps its state
    recorded_server = _RecordedServer(server)
    recorded = _RecordedClient(client, recorded_server)
    method.round(LocalLink(method, recorded), recorded_server)
    return [_point(method, recorded, recorded_server, k) for k in range(len(recorded.updates))]


def _point(method: Method, client: _RecordedClient, server: _RecordedServer, index: int) -> ProbePoint:
    """Compare the gradient of an update with the fresh one, the stale one and vanilla's."""
    update = client.updates[index]
    start, batch = client.start[update.batch], update.batch
    stale, initial_loss = server.fresh(start, batch, update.answering)
    fresh, loss = server.fresh(update.smashed, batch, update.answering)
    stepwise = fresh if index == update.answering else server.fresh(update.smashed, batch, index)[0]
    kept = kept_positions(start, client.loss_spec)
    moved = without_padding(update.smashed.activations - start.activations, kept)
    g0, used, near, far, delta = (t.flatten(1).float() for t in (stale, update.gradient, fresh, stepwise, moved))
    norm, near_norm = (t.norm().clamp(min=1e-30) for t in (far, near))
    scaled = g0 * g0 * delta  # D δ
    moves = scaled.square().sum(1) > 0
    best = (scaled * (near - g0)).sum(1)[moves] / scaled.square().sum(1)[moves]  # as H̄δ = fresh − stale
    factor = method.probed_factor(len(delta))
    surrogate = initial_loss + (delta * (g0 + used) / 2).sum()
    return ProbePoint(
        round=client.context.round_index + 1,
        update=index,
        displacement=delta.norm(dim=1).mean().item(),
        norm=norm.item(),
        used_cosine=_cosine(used, far),
        used_error=((used - far).norm() / norm).item(),
        activation_error=((used - near).norm() / norm).item(),
        server_cosine=_cosine(near, far),
        server_error=((near - far).norm() / norm).item(),
        stale_cosine=_cosine(g0, near),
        stale_error=((g0 - near).norm() / near_norm).item(),
        compensated_cosine=_cosine(used, near),
        compensated_error=((used - near).norm() / near_norm).item(),
        best_lambda=best.median().item() if len(best) else None,
        helped_share=(factor < 2 * best).float().mean().item() if len(best) and factor is not None else None,
        surrogate_above=bool(surrogate >= loss - 1e-6 * loss.abs()) if factor is not None else None,
    )


def _cosine(a: Tensor, b: Tensor) -> float:
    return cosine_similarity(a.flatten(), b.flatten(), dim=0).item()


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
    """Read what `save_probe` wrote. Points of an older version, which measured less, are left out."""
    known = {f.name for f in fields(ProbePoint)}
    return [ProbePoint(**entry) for entry in json.loads(path.read_text()) if entry.keys() == known]


def plot_probe(points: Sequence[ProbePoint], path: str | PathLike[str]) -> None:
    """Save a picture over local updates: cosine, error and displacement, each the mean over the probed rounds."""
    figure = new_figure(11, 6, dpi=130)
    from matplotlib.ticker import MaxNLocator

    updates = sorted({point.update for point in points})
    grouped = [[point for point in points if point.update == update] for update in updates]

    def mean(name: str) -> list[float]:
        values = [[float(v) for point in group if (v := getattr(point, name)) is not None] for group in grouped]
        return [sum(group) / len(group) if group else float("nan") for group in values]

    stale, used = {"color": "#d55e00", "ls": "--", "marker": "X"}, {"color": "#0072b2", "marker": "o"}
    other, third = {"color": "#009e73", "marker": "s"}, {"color": "#cc79a7", "ls": ":", "marker": "D"}
    panels: list[tuple[str, list[tuple[str, str | None, dict[str, str]]]]] = [
        (
            "error against vanilla's gradient",
            [
                ("used_error", "all", used),
                ("activation_error", "the activations' move", stale),
                ("server_error", "the server's move", third),
            ],
        ),
        (
            "cosine with vanilla's gradient",
            [("used_cosine", "used gradient g̃", used), ("server_cosine", "the answering server's", third)],
        ),
        ("displacement ‖δ‖", [("displacement", None, other)]),
        (
            "error against the answering server's",
            [("stale_error", "stale g₀", stale), ("compensated_error", "used gradient g̃", used)],
        ),
        ("best λ, median", [("best_lambda", None, other)]),
        (
            "share",
            [
                ("helped_share", "samples with λ < 2λ*", other),
                ("surrogate_above", "surrogate not below the loss", third),
            ],
        ),
    ]
    for axes, (title, lines) in zip(figure.subplots(2, 3).flat, panels, strict=True):
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
