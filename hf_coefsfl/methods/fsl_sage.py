"""FSL-SAGE (Nair et al., 2025): an auxiliary network, aligned every few rounds, estimates the server's gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ..protocol.client_side import ClientSide
from ..protocol.devices import to_host
from ..protocol.link import ClientLink
from ..protocol.loss import LossSpec
from ..protocol.messages import Message, Parameters, SmashedData
from ..protocol.modes import evaluating
from ..protocol.server_side import ServerSide
from .base import ClientState, Method, above_zero, at_least, expect, option
from .parts.auxiliary import AuxiliaryNetwork, example_smashed
from .parts.costs import RoundKind, StoredWork, Workload
from .parts.math_attention import check_attention, differentiable_attention

if TYPE_CHECKING:
    from ..split import SplitModel

INITS = ("random", "copy_server")
_WEIGHT_DECAY, _EPS = 0.01, 1e-6  # of the alignment's AdamW


@dataclass(frozen=True)
class Alignment:
    """What the server keeps of one client: its auxiliary network, steps of alignment so far, and samples to align on.

    Empty weights are the initial ones. The samples are parts of batches, oldest first, off the device.
    """

    auxiliary: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0
    buffer: tuple[SmashedData, ...] = ()


@dataclass
class FSLSAGE(Method):
    """g̃ = ∇ₛL_aux(s) of an auxiliary network that the client does not train. 1 transfer, 2 in an alignment round.

    The network is the first `num_blocks` blocks of the server, its final norm and head: one for each
    client, persistent, never averaged. Every `buffer_every`-th batch of an upload goes into the
    client's buffer. In the first round after the warm-up, and every `align_every` rounds from there, the server
    takes the true gradients of the buffer at its present weights (after its local updates), trains the network on
    Σ ‖∇ₛL_aux − ∇ₛL‖² and sends it down.

    The random network of the paper makes the method unstable: until a client's first alignment its
    gradients mean nothing. `init="copy_server"` starts from the server's weights before training, which every
    client can rebuild from the checkpoint and the seed.
    """

    name: ClassVar[str] = "fsl_sage"
    title: ClassVar[str] = "FSL-SAGE"
    table_position: ClassVar[int] = 6
    deployable: ClassVar[bool] = False  # clients hold a copy of server blocks
    trains_block_copies: ClassVar[bool] = True

    align_every: int = option(10, "l, rounds between alignments")
    align_epochs: int = option(40, "E, epochs of an alignment")
    align_batch_size: int = option(8, "samples of a step of the alignment")
    align_learning_rate: float = option(2e-4, "of the alignment's AdamW")
    align_warmup_steps: int = option(500, "of a linear warm-up, counted over all alignments of a client")
    buffer_size: int = option(64, "samples that the server keeps of each client")
    buffer_every: int = option(5, "the buffer takes one of so many batches")
    num_blocks: int = option(3, "server blocks in the auxiliary network")
    init: str = option("random", "weights that the auxiliary network starts from: random or copy_server")

    def __post_init__(self) -> None:
        """Check the ranges of the options."""
        for name in ("align_every", "align_epochs", "align_batch_size", "buffer_size", "buffer_every", "num_blocks"):
            at_least(name, getattr(self, name), 1)
        at_least("align_warmup_steps", self.align_warmup_steps, 0)
        above_zero("align_learning_rate", self.align_learning_rate)
        if self.init not in INITS:
            raise ValueError(f"init={self.init!r} is not allowed. Choose one of: {', '.join(INITS)}.")

    def round_kinds(self, work: Workload) -> list[RoundKind]:
        """Return a plain round and an alignment round, which costs as much as a plain one and the alignment."""
        quiet = replace(self, align_every=max(2, self.align_every))  # so that round 1 does not align
        once, twice = (replace(self, buffer_size=1, align_epochs=epochs) for epochs in (1, 2))
        alignment = StoredWork(once, twice, self.align_epochs, self._buffered(work))
        share = 1 / self.align_every
        kinds = [
            RoundKind(quiet, index=1, share=1 - share),
            RoundKind(quiet, index=1, label="alignment", stored=alignment, share=share),
        ]
        return kinds if self.align_every > 1 else kinds[1:]

    def state_nbytes(self, measured: int, work: Workload) -> int:
        """Return the bytes of the initial network, of one for each aligned client, and of the buffers."""
        network = sum(t.nbytes for t in self.initial.values())
        data = self.clients[0].buffer[0]
        sample = sum(data.nbytes().values()) // len(data.activations)
        aligned = work.distinct_clients(-(-work.rounds // self.align_every))
        return network * (1 + aligned) + work.distinct_clients(work.rounds) * self._buffered(work) * sample

    def _buffered(self, work: Workload) -> int:
        return min(self.buffer_size, sum(work.sizes[:: self.buffer_every]))

    def setup(self, split: SplitModel, loss_spec: LossSpec, seed: int, first_round: int = 0) -> None:
        """Build the network that all clients start from; its alignment differentiates it twice."""
        check_attention(split.model, self.title)
        select(example_smashed(split), torch.tensor([0]))  # refuses what the buffer could not hold
        self.first_round = first_round
        # One module for all clients: their weights are loaded before each use.
        self.network = AuxiliaryNetwork(split, self.num_blocks)
        if self.init == "random":
            self.network.draw(split.model, seed)
        self.initial = self.network.weights()
        self.clients: dict[int, Alignment] = {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the initial weights, and those and the buffer of each client that took part, under `client.<n>.`."""
        state = {f"auxiliary.{name}": t for name, t in self.initial.items()}
        for client, alignment in self.clients.items():
            state |= {f"client.{client}.{name}": t for name, t in encode(alignment).items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        clients: dict[int, dict[str, Tensor]] = {}
        for name, t in state.items():
            if name.startswith("client."):
                _, client, rest = name.split(".", 2)
                clients.setdefault(int(client), {})[rest] = t
        self.initial = {name: state[f"auxiliary.{name}"].cpu() for name in self.initial}
        self.clients = {client: decode(tensors) for client, tensors in sorted(clients.items())}

    def merge(self, kept: Sequence[ClientState]) -> None:
        """Replace the state of each client."""
        for k in kept:
            self.clients[k.client] = decode(k.tensors)

    def round(self, client: ClientLink, server: ServerSide) -> None:
        """Train the server on the upload, and align in an alignment round."""
        smashed = client.upload()
        state = self.clients.get(server.context.client, Alignment())
        state = replace(state, buffer=push(state.buffer, smashed[:: self.buffer_every], self.buffer_size))
        server.local_updates(smashed, client.local_epochs)
        if (server.context.round_index - self.first_round) % self.align_every == 0:
            state = self.align(server, state)
            server.kept |= encode(state)
            client.update([Parameters(auxiliary=state.auxiliary)])
        else:
            server.kept |= encode(state)
            client.update()

    def update(self, client: ClientSide, messages: Sequence[Message] | None, batches: Sequence[int] | None) -> None:
        """Do the local updates with the gradients of the client's auxiliary network. Runs on the client."""
        if messages is not None:
            (received,) = expect(Parameters, messages)
            weights = received.auxiliary
        else:
            weights = self.clients.get(client.context.client, Alignment()).auxiliary
        self.network.load(weights or self.initial)
        for _ in range(client.context.local_epochs):
            for batch in range(len(client.batches)):
                smashed = client.smash(batch)
                with client.context.autocast():
                    loss, gradient = self.network.gradient(smashed)
                client.observed.add("client_loss", loss)
                client.descend(gradient)

    def align(self, server: ServerSide, state: Alignment) -> Alignment:
        """Train one client's auxiliary network towards the true gradients of its buffer."""
        context = server.context
        generator = torch.Generator().manual_seed(context.derive_seed("method", 0))
        # The batches stay the same over the epochs, their order does not: a true gradient belongs to the mean
        # loss of its batch, so each is computed just once.
        with evaluating(server.half):
            pairs = [
                (batch, server.gradient(batch, 0))
                for batch in (b.to(context.device) for b in batched(state.buffer, self.align_batch_size, generator))
            ]
        # A batch without any label has no mean loss. Asked so that 0, of a tensor without values, is the usual answer.
        pairs = [pair for pair in pairs if not pair[1].isfinite().logical_not().any()]
        self.network.load(state.auxiliary or self.initial)
        parameters = list(self.network.parameters.values())
        optimizer = torch.optim.AdamW(
            parameters, self.align_learning_rate, weight_decay=_WEIGHT_DECAY, eps=_EPS, fused=True
        )
        steps = state.steps
        for _ in range(self.align_epochs):
            for index in torch.randperm(len(pairs), generator=generator).tolist():
                steps += 1
                rise = min(1.0, steps / self.align_warmup_steps) if self.align_warmup_steps else 1.0
                optimizer.param_groups[0]["lr"] = self.align_learning_rate * rise
                with context.autocast():
                    loss = self.mismatch(*pairs[index])
                for p, g in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
                    p.grad = g
                optimizer.step()
                server.observed.add("alignment_loss", loss)
        optimizer.zero_grad(set_to_none=True)
        return replace(state, auxiliary=self.network.weights(), steps=steps)

    def mismatch(self, smashed: SmashedData, gradient: Tensor) -> Tensor:
        """Return Σ ‖∇ₛL_aux − ∇ₛL‖², differentiable w.r.t. the network's weights."""
        with differentiable_attention():
            _, estimate = self.network.gradient(smashed, create_graph=True)
        return (estimate - gradient).float().square().sum()


# ---- The buffer ----


def push(buffer: Sequence[SmashedData], new: Sequence[SmashedData], size: int) -> tuple[SmashedData, ...]:
    """Return the youngest `size` samples of the buffer and what is new, first in, first out, off the device."""
    youngest: list[SmashedData] = []
    room = size
    for part in chain(reversed(new), reversed(buffer)):  # one at a time: `new` may lie in a file
        count = min(len(part.activations), room)
        if count == 0:
            break
        here = part.activations.device
        youngest.append(select(part, torch.arange(len(part.activations) - count, len(part.activations), device=here)))
        room -= count
    tensors = [t for part in youngest for t in part.tensors().values()]
    arrived = dict(zip(map(id, tensors), to_host(tensors), strict=True))  # one copy, so that it is waited for once
    return tuple(part.map(lambda t: arrived[id(t)]) for part in reversed(youngest))


def select(smashed: SmashedData, index: Tensor) -> SmashedData:
    """Return some samples of a message. What the samples share (a position bias, a flag) goes with each."""
    count = len(smashed.activations)

    def rows(t: Tensor) -> Tensor:
        if t.dim() == 0:
            return t
        if len(t) not in (1, count):
            raise ValueError(
                f"FSL-SAGE keeps samples in a buffer, but a tensor of shape {tuple(t.shape)} that crosses the cut with "
                f"{count} samples cannot be taken apart by samples. Use another method for this model."
            )
        return t.expand(count, *t.shape[1:])[index]

    shapes = {name: (len(index), *shape[1:]) for name, shape in smashed.shapes.items()}
    return replace(smashed.map(rows), shapes=shapes)


def batched(buffer: Iterable[SmashedData], size: int, generator: torch.Generator) -> list[SmashedData]:
    """Return the samples in shuffled batches of at most `size`, each of samples padded to one length."""
    groups: dict[Any, list[SmashedData]] = {}
    for part in buffer:
        groups.setdefault(_form(part), []).append(part)
    batches = []
    for parts in groups.values():
        joined = _concatenate(parts)
        order = torch.randperm(len(joined.activations), generator=generator)
        batches += [select(joined, index) for index in order.split(size)]
    return batches


def _form(smashed: SmashedData) -> Any:
    """What two messages must have in common to be one: names, dtypes, shapes of a sample, and flags."""
    tensors = smashed.tensors().items()
    return tuple((name, t.dtype, tuple(t.shape[1:]) if t.dim() else t.item()) for name, t in sorted(tensors))


def _concatenate(parts: Sequence[SmashedData]) -> SmashedData:
    def join(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors)) if tensors[0].dim() else tensors[0]

    first = parts[0]
    activations = join([p.activations for p in parts])
    return SmashedData(
        activations,
        {name: join([p.context[name] for p in parts]) for name in first.context},
        {name: join([p.labels[name] for p in parts]) for name in first.labels},
        {name: (len(activations), *shape[1:]) for name, shape in first.shapes.items()},
    )


# ---- As named tensors, for the checkpoint and for other processes ----


def encode(state: Alignment) -> dict[str, Tensor]:
    """Return a client's state as named tensors."""
    tensors = {f"auxiliary.{name}": t for name, t in state.auxiliary.items()}
    tensors["steps"] = torch.tensor(state.steps)
    for index, part in enumerate(state.buffer):
        tensors |= {f"buffer.{index}.{name}": t for name, t in part.tensors().items()}
        tensors |= {f"buffer.{index}.shapes.{name}": torch.tensor(shape) for name, shape in part.shapes.items()}
    return tensors


def decode(tensors: Mapping[str, Tensor]) -> Alignment:
    """Read what `encode` wrote."""
    auxiliary: dict[str, Tensor] = {}
    parts: dict[int, dict[str, Any]] = {}
    for name, t in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "auxiliary":
            auxiliary[rest] = t.cpu()
        elif kind == "buffer":
            index, fields, *key = rest.split(".", 2)
            part = parts.setdefault(int(index), {"context": {}, "labels": {}, "shapes": {}})
            if key:
                part[fields][key[0]] = tuple(t.tolist()) if fields == "shapes" else t.cpu()
            else:
                part[fields] = t.cpu()
    return Alignment(auxiliary, int(tensors["steps"]), tuple(SmashedData(**parts[index]) for index in sorted(parts)))
