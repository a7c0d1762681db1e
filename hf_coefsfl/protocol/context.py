"""What both sides of one client's round share: where it stands, how passes are run, what was observed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .adapters import AS_THEY_ARE
from .devices import to_host
from .noise import lasting_noise
from .packing import Store
from .seeds import derive_seed, set_random_state


@dataclass(frozen=True)
class RoundContext:
    """What both sides of one client's round share: where it stands and how passes are run."""

    seed: int
    round_index: int
    client: int
    local_epochs: int = 1
    max_grad_norm: float = 0.0
    device: torch.device = torch.device("cpu")
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    store: Store = field(default_factory=Store)
    adapter_codec: str = AS_THEY_ARE  # of the weights of federated averaging
    compiled: bool = False  # whether the blocks are: they take plain tensors only
    noise: float = 0.0  # standard deviation of what the client adds to its smashed data
    noise_secret: bytes | None = None  # of a client, for noise that lasts; None: drawn from the run's seed
    stacked: tuple[int, ...] = ()  # the clients whose samples lie below each other in a batch; (): `client` alone

    def __post_init__(self) -> None:
        """Tell the store where its seeds begin, so that both sides have the same."""
        self.store.location = (self.seed, self.round_index, self.client)

    @property
    def num_stacked(self) -> int:
        """How many clients' samples a batch holds."""
        return len(self.stacked) or 1

    def norm(self, t: Tensor) -> Tensor:
        """Return ‖t‖ of a tensor over the samples of a batch; of clients that are stacked each one's (clients,)."""
        return t.norm() if not self.stacked else t.reshape(self.num_stacked, -1).norm(dim=1)

    def derive_seed(self, stream: str, batch: int, client: int | None = None) -> int:
        """Return the seed of a random stream at one batch of this round and client, or another one."""
        return derive_seed(self.seed, stream, self.round_index, self.client if client is None else client, batch)

    def generator(self, stream: str, batch: int, client: int | None = None) -> torch.Generator:
        """Return a generator of random numbers for one batch, on the device."""
        return torch.Generator(self.device).manual_seed(self.derive_seed(stream, batch, client))

    def generators(self, stream: str, batch: int) -> list[torch.Generator]:
        """Return the generator of each client that is stacked: it draws what it would draw alone."""
        return [self.generator(stream, batch, client) for client in self.stacked or (self.client,)]

    def with_noise(self, activations: Tensor, batch: int, inputs: Mapping[str, Any]) -> Tensor:
        """Return activations with the noise of a batch, the same in every pass over it, so that s − s₀ has none."""
        if self.noise == 0:
            return activations
        if self.noise_secret is not None:
            return activations + self.noise * lasting_noise(self.noise_secret, inputs, activations)
        generator = torch.Generator(activations.device).manual_seed(self.derive_seed("noise", batch))
        drawn = torch.randn(activations.shape, generator=generator, device=activations.device, dtype=activations.dtype)
        return activations + self.noise * drawn

    def synchronize_masks(self, half: nn.Module, stream: str, batch: int) -> None:
        """Make every pass of a half over a batch draw the same dropout masks, so that s − s₀ holds no noise."""
        if half.training:
            set_random_state(self.derive_seed(stream, batch), self.device)


@dataclass
class Observations:
    """Scalars seen during a round, kept on the device until the round is over."""

    values: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, name: str, value: Tensor) -> None:
        """Note one value of a scalar."""
        self.values.setdefault(name, []).append(value.detach().float())

    @contextmanager
    def summed(self, name: str) -> Iterator[None]:
        """Keep one value of what is noted under a name inside the context: its sum, which NaN and infinity survive."""
        before = len(self.values.get(name, []))
        yield
        noted = self.values.get(name, [])
        if len(noted) > before:
            noted[before:] = [torch.stack(noted[before:]).sum()]

    def mean(self, name: str, default: float = 0.0) -> float:
        """Return the mean of what was noted, or `default` if nothing was."""
        noted = self.values.get(name)
        return torch.stack(noted).mean().item() if noted else default

    def first_nonfinite(self, *names: str) -> int | None:
        """Return the index of the first NaN or infinity in what was noted under the names, one after the other."""
        noted = [value for name in names for value in self.values.get(name, [])]
        places = torch.stack(noted).isfinite().logical_not().nonzero() if noted else torch.empty(0)
        return int(places[0]) if len(places) else None


def on_host(*observed: Observations) -> list[Observations]:
    """Return what was noted with all values on the host: an accelerator is waited for once."""
    values = iter(to_host([value for seen in observed for noted in seen.values.values() for value in noted]))
    return [Observations({n: [next(values) for _ in noted] for n, noted in seen.values.items()}) for seen in observed]


class Side:
    """One side of the cut: the trainable weights of a half with their optimizer."""

    def __init__(self, half: nn.Module, optimizer: torch.optim.Optimizer, context: RoundContext):
        self.half = half
        self.optimizer = optimizer
        self.trained = list(_parameters(optimizer))  # of the half; a method may add what it trains beside
        self.context = context
        self.observed = Observations()
        self.kept: dict[str, Tensor] = {}  # what the method keeps of this round, for its `merge`

    @torch.no_grad()
    def finish(self) -> None:
        """Note whether the weights came out finite."""
        # In one sum, which NaN and infinity survive: a sum of each weight would be a launch of each.
        self.observed.add("weights", torch.cat([p.reshape(-1) for p in _parameters(self.optimizer)]).sum())

    def backward(self, carrier: Tensor, retain_graph: bool = False) -> None:
        """Backpropagate `carrier` into the trained weights."""
        self._drop_gradients()
        carrier.backward(retain_graph=retain_graph)

    def step(self) -> None:
        """Take one optimizer step, which uses up the gradients."""
        if self.context.max_grad_norm > 0:
            for parameters in self._by_client():
                nn.utils.clip_grad_norm_(parameters, self.context.max_grad_norm)
        self.optimizer.step()
        # Now: small as they are, they lie between what the pass has freed, and the next one needs that in one piece.
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _by_client(self) -> list[list[Tensor]]:
        """Return the trained weights of each client with their gradients; those of stacked clients are views."""
        weights = list(_parameters(self.optimizer))
        if not self.context.stacked:
            return [weights]
        clients: list[list[Tensor]] = []
        for client in range(self.context.num_stacked):
            rows = [(p.detach()[client], p.grad[client]) for p in weights if p.grad is not None]
            for row, gradient in rows:
                row.grad = gradient
            clients.append([row for row, _ in rows])
        return clients


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])
