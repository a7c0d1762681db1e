"""The two sides of the cut during one client's round: weights, optimizer, local updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..federation.sampling import derive_seed, set_random_state
from .injection import inject
from .loss import OutputBlock, Task
from .messages import SmashedData
from .packing import Exchange, Store
from .padding import kept_positions, without_padding


@dataclass(frozen=True)
class Setting:
    """What both sides of one client's round share: where it stands and how passes are run."""

    seed: int
    round_index: int
    client: int
    local_epochs: int = 1
    max_grad_norm: float = 0.0
    device: torch.device = torch.device("cpu")
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    store: Store = field(default_factory=Store)
    noise: float = 0.0  # standard deviation of what the client adds to its smashed data
    noise_seed: int | None = None  # a client's secret; None: the run's seed

    def derive_seed(self, stream: str, batch: int) -> int:
        """Return the seed of a random stream at one batch of this round and client."""
        return derive_seed(self.seed, stream, self.round_index, self.client, batch)

    def generator(self, stream: str, batch: int) -> torch.Generator:
        """Return a generator of random numbers for one batch, on the device."""
        return torch.Generator(self.device).manual_seed(self.derive_seed(stream, batch))

    def with_noise(self, activations: Tensor, batch: int) -> Tensor:
        """Return activations with the noise of a batch, the same in every pass over it, so that s − s₀ has none."""
        if self.noise == 0:
            return activations
        seed = self.seed if self.noise_seed is None else self.noise_seed
        place = derive_seed(seed, "noise", self.round_index, self.client, batch)
        generator = torch.Generator(activations.device).manual_seed(place)
        drawn = torch.randn(activations.shape, generator=generator, device=activations.device, dtype=activations.dtype)
        return activations + self.noise * drawn

    def synchronize_masks(self, half: nn.Module, stream: str, batch: int) -> None:
        """Make every pass of a half over a batch draw the same dropout masks, so that s − s₀ is no noise."""
        if half.training:
            set_random_state(self.derive_seed(stream, batch))


@dataclass
class Observations:
    """Scalars seen during a round, kept on the device until the round is over."""

    values: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        """Note one value of a scalar."""
        self.values.setdefault(name, []).append(value.detach().float())

    def mean(self, name: str, default: float = 0.0) -> float:
        """Return the mean of what was noted, or `default` where nothing was."""
        noted = self.values.get(name)
        return torch.stack(noted).mean().item() if noted else default

    def first_nonfinite(self, *names: str) -> int | None:
        """Return the place of the first NaN or infinity in what was noted under the names, one after the other."""
        noted = [value for name in names for value in self.values.get(name, [])]
        places = torch.stack(noted).isfinite().logical_not().nonzero() if noted else torch.empty(0)
        return int(places[0]) if len(places) else None


class _Side:
    """Trainable weights of one half with their optimizer."""

    def __init__(self, half: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting):
        self.half = half
        self.optimizer = optimizer
        self.setting = setting
        self.observed = Observations()
        self.kept: dict[str, Tensor] = {}  # what the method keeps of this round, for its `merge`

    def finish(self) -> None:
        """Note whether the weights came out finite."""
        for parameter in _parameters(self.optimizer):
            self.observed.add("weights", parameter.sum())

    def _step(self, carrier: Tensor) -> None:
        """Backpropagate `carrier` and take one optimizer step."""
        self.optimizer.zero_grad(set_to_none=True)
        carrier.backward()
        if self.setting.max_grad_norm > 0:
            nn.utils.clip_grad_norm_(_parameters(self.optimizer), self.setting.max_grad_norm)
        self.optimizer.step()


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


class ClientSide(_Side):
    """θᶜ and the local data of one client. Lives where the data is."""

    def __init__(
        self,
        half: nn.Module,
        batches: Sequence[dict[str, Tensor]],
        optimizer: torch.optim.Optimizer,
        setting: Setting,
        task: Task,
    ):
        super().__init__(half, optimizer, setting)
        self.batches = batches
        self.task = task
        self.initial: Exchange[SmashedData] = Exchange(setting.store)  # s₀ of each batch, once exchanged
        self._current: SmashedData | None = None
        self._first: tuple[SmashedData, list[int]] | None = None  # batch 0 on its graph, at the weights of that version

    def exchange(self) -> Exchange[SmashedData]:
        """Return and remember the smashed data s₀ of every batch (the round-initial exchange).

        Batch 0 keeps its graph: at the first local update the weights, and so the pass, are still the same.
        """
        self.initial = Exchange(self.setting.store)
        for batch in range(len(self.batches)):
            with torch.set_grad_enabled(batch == 0):
                smashed = self._smash(batch)
            if batch == 0:
                self._first = smashed, self._versions()
            self.initial.append(smashed.detach(), kept_positions(smashed, self.task))
        return self.initial

    def pack(self, messages: Iterable[SmashedData], lasting: bool = True) -> Exchange[SmashedData]:
        """Return smashed data in the form in which it is sent."""
        packed: Exchange[SmashedData] = Exchange(self.setting.store, lasting)
        for message in messages:
            packed.append(message, kept_positions(message, self.task))
        return packed

    def smash(self, batch: int) -> SmashedData:
        """Run the client half on a batch, keep its graph for `descend`, and return what is sent."""
        if batch == 0 and self._first is not None and self._first[1] == self._versions():
            self._current, self._first = self._first[0], None
        else:
            self._current = self._smash(batch)
        return self._current.detach()

    def displacement(self, batch: int) -> Tensor:
        """δ = s − s₀ of the batch last smashed, 0 at padding."""
        delta = self.live.activations.detach() - self.initial[batch].activations
        return without_padding(delta, self.initial.kept(batch))

    @property
    def live(self) -> SmashedData:
        """The batch last smashed, on its graph."""
        if self._current is None:
            raise RuntimeError("The client has no activations on a graph: call smash(batch) before each update.")
        return self._current

    def descend(self, gradient: Tensor) -> None:
        """θᶜ ← θᶜ − η Jᵀ g̃: inject g̃ at the cut of the batch last smashed, then one step."""
        self.minimize(inject(self.live.activations, gradient))

    def minimize(self, loss: Tensor) -> None:
        """Take one step on a loss that was computed from `live`."""
        self._first = None
        self._step(loss)
        self._current = None  # its graph is spent

    def output_blocks(self, batch: int) -> list[OutputBlock]:
        """Return the outputs of the loss that this batch's labels speak of; none where the loss is not known."""
        if not self.task.has_known_curvature:
            return []
        smashed = self.initial[batch]
        return self.task.output_blocks(smashed.labels, smashed.activations.shape[1])

    def _versions(self) -> list[int]:
        """Count how often each trained weight of the half has been written to; a method may train more than those."""
        return [parameter._version for parameter in self.half.parameters() if parameter.requires_grad]

    def _smash(self, batch: int) -> SmashedData:
        inputs, labels = self.task.separate(_on_device(self.batches[batch], self.setting.device))
        self.setting.synchronize_masks(self.half, "client_forward", batch)
        with self.setting.autocast():
            smashed: SmashedData = self.half(**inputs)
        noisy = self.setting.with_noise(smashed.activations, batch)
        self.observed.add("activations", noisy.sum())  # NaN and infinity survive a sum
        return replace(smashed, activations=noisy, labels={**smashed.labels, **labels})


class ServerSide(_Side):
    """θˢ of one client (SplitFed V1 keeps one per sampled client). Lives on the server."""

    def __init__(self, half: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting, task: Task):
        super().__init__(half, optimizer, setting)
        self.task = task

    def forward(self, smashed: SmashedData, batch: int) -> Any:
        """Return the model's output with its loss, on the graph of `smashed.activations`."""
        self.setting.synchronize_masks(self.half, "server_forward", batch)
        with self.setting.autocast():
            return self.half(smashed)

    def gradient(self, smashed: SmashedData, batch: int, observe: bool = True) -> Tensor:
        """g = ∇ₛL(s; θˢ) of the batch-mean loss at the present weights."""
        leaf = on_graph(smashed)
        loss = self.forward(leaf, batch).loss
        if observe:
            self.observed.add("feedback_loss", loss)
        return torch.autograd.grad(loss, leaf.activations)[0]

    def train_step(self, smashed: SmashedData, batch: int) -> Tensor:
        """θˢ ← θˢ − η ∇L(s; θˢ). Return ∇ₛL of the same backward pass, at the weights before the step."""
        leaf = on_graph(smashed)
        loss = self.forward(leaf, batch).loss
        self.observed.add("loss", loss)
        self._step(loss)
        assert leaf.activations.grad is not None
        return leaf.activations.grad

    def local_updates(self, smashed: Sequence[SmashedData]) -> None:
        """Walk the cached smashed data for `local_epochs` epochs, Eq. (server-local)."""
        for _ in range(self.setting.local_epochs):
            for batch, data in enumerate(smashed):
                self.train_step(data, batch)


def _on_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: t.to(device, non_blocking=True) if isinstance(t, Tensor) else t for name, t in batch.items()}


def on_graph(smashed: SmashedData) -> SmashedData:
    """Return `smashed` with its activations as a leaf that collects a gradient."""
    return replace(smashed, activations=smashed.activations.detach().requires_grad_())
