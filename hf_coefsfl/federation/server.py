"""What a round is on the server, wherever the clients are: who is sampled, who is left, and the average."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from ..config import SplitFedConfig
from ..methods import Method
from ..methods.base import ClientState
from ..methods.parts.auxiliary import example_smashed
from ..protocol.adapters import AS_THEY_ARE
from ..protocol.context import RoundContext
from ..protocol.loss import LossSpec
from ..protocol.packing import Store
from ..protocol.padding import ignores_padding, mirrored
from ..protocol.server_side import ServerSide
from ..split import SplitModel
from ..split.lora import trainable_sides
from .averaging import federated_average, fewest_clients, flatten, unflatten_
from .bounds import Parts, Values, excesses, scale_update_, update_norms
from .coded_weights import CodedWeights
from .ledger import DROPPED, ClientReport
from .optimizer_state import PREFIX, OptimizerState
from .sampling import num_sampled
from .schedule import MethodSchedule, local_optimizer, make_context, make_store

logger = logging.getLogger(__name__)
SMASHED = "smashed data"  # of which a method keeps statistics; they are used or not, as they cannot be scaled


class Clients(Protocol):
    """What the server knows of its clients."""

    @property
    def sizes(self) -> list[int]:
        """The number of samples of each client."""

    def __len__(self) -> int:
        """Return the number of clients."""

    def name(self, client: int) -> str:
        """Return what a client is called."""


class ServerRounds:
    """The server of a run: its half, its method and the global weights. Subclasses say how clients are reached."""

    def __init__(
        self, split: SplitModel, loss_spec: LossSpec, clients: Clients, args: SplitFedConfig, accelerator: Accelerator
    ):
        self.split, self.loss_spec, self.clients = split, loss_spec, clients
        self.args, self.accelerator = args, accelerator
        self.example = example_smashed(split)
        # Whether padding before, and after, the tokens can be left out: a model may always read the first position.
        self.ignored_padding = (
            ignores_padding(split.server, mirrored(self.example)),
            ignores_padding(split.server, self.example),
        )
        self.client_parameters, self.server_parameters = trainable_sides(split)
        self._check_rule()
        self.methods = MethodSchedule(args)
        self.set_up_method()
        self.update_norm = 0.0  # of the last round's average

    @property
    def method(self) -> Method:
        """The method of the run."""
        return self.methods.method

    def set_up_method(self) -> None:
        """Give the method, and the server's optimizer if it is kept, the state that training starts with."""
        self.method.setup(self.split, self.loss_spec, self.args.seed, first_round=self.args.warmup_rounds)
        self.optimizer_state: OptimizerState | None = None
        if self.args.keep_server_optimizer:
            rate = self.args.learning_rate
            self.optimizer_state = OptimizerState(lambda ps: self.local_optimizer(ps, rate), self.server_parameters)

    def state_dict(self) -> dict[str, Tensor]:
        """Return what rounds leave beside the trained weights, for a checkpoint."""
        kept = {} if self.optimizer_state is None else self.optimizer_state.named
        return {**self.method.state_dict(), **{PREFIX + name: t for name, t in kept.items()}}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state_dict` returned."""
        self.method.load_state_dict({name: t for name, t in state.items() if not name.startswith(PREFIX)})
        if self.optimizer_state is not None:
            for name, tensor in self.optimizer_state.named.items():
                tensor.copy_(state[PREFIX + name])

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained: the clients' side, then the server's."""
        return [*self.client_parameters.values(), *self.server_parameters.values()]

    def run_round(self, round_index: int, learning_rate: float, progress: bool = False) -> dict[int, ClientReport]:
        """Train the sampled clients from the global weights, average, and return their reports in client order."""
        raise NotImplementedError(f"{type(self).__name__} does not say how clients are reached.")

    def close(self) -> None:
        """Let go of what only training needs."""

    def local_optimizer(self, parameters: dict[str, nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
        """Return a fresh optimizer (`args.optim`, AdamW by default)."""
        return local_optimizer(self.args, parameters, learning_rate)

    def store(self) -> Store:
        """Return where the exchange of a client's round is kept."""
        return make_store(self.args, self.ignored_padding)

    def round_context(self, round_index: int, client: int) -> RoundContext:
        """Return what both sides of a client's round share."""
        return make_context(self.args, round_index, client, self.store(), self.accelerator.autocast)

    def server_side(self, context: RoundContext, learning_rate: float) -> ServerSide:
        """Return the server's side of a client at the present weights; its optimizer is fresh, or as rounds left it."""
        optimizer = self.local_optimizer(self.server_parameters, learning_rate)
        if self.optimizer_state is not None:
            self.optimizer_state.load_into(optimizer)
        return ServerSide(self.split.server, optimizer, context, self.loss_spec)

    def averaged(self, round_index: int) -> list[Tensor]:
        """Return what is averaged at the end of a round: trained weights, those beside the model, optimizer state."""
        return [*self.parameters, *self.methods.of_round(round_index).federated().values(), *self._kept_tensors()]

    def coded_weights(self, round_index: int) -> CodedWeights | None:
        """Return the federated weights of a round in the form in which they are sent; None: as they are."""
        if self.args.adapter_codec == AS_THEY_ARE:
            return None
        federated = self.methods.of_round(round_index).federated()
        return CodedWeights(self.args.adapter_codec, self.client_parameters, federated)

    def _kept_tensors(self) -> list[Tensor]:
        """Return the state that the server's optimizer begins a round with; nothing if it is fresh in each."""
        return [] if self.optimizer_state is None else self.optimizer_state.tensors

    def optimizer_tensors(self, side: ServerSide) -> Sequence[Tensor]:
        """Return the state of a server side's optimizer if it is averaged, else nothing."""
        return [] if self.optimizer_state is None else self.optimizer_state.of(side.optimizer)

    def average(
        self,
        round_index: int,
        reports: dict[int, ClientReport],
        trained: Mapping[int, Tensor],
        owners: Mapping[int, int],
        initial: Tensor,
    ) -> list[int]:
        """Replace the round's initial weights by what `args.aggregation` makes of the surviving clients; return them.

        Args:
            round_index: of the round.
            reports: of all sampled clients, in client order; what is done about a client is noted there.
            trained: the flattened `averaged` of the clients that this process trained; updates beyond
                `args.client_bound` are scaled down in place.
            owners: which process trained a client.
            initial: the same of the round's start; it stays if no client is left.
        """
        args, averaged, method = self.args, self.averaged(round_index), self.methods.of_round(round_index)
        unflatten_(averaged, initial)
        found = self._measure(round_index, reports, trained, initial)
        weights = self._surviving(round_index, reports)
        if args.client_bound and weights:
            self._bound(round_index, list(weights), reports, found, trained, initial)
        if weights:
            rule = args.aggregation, args.hostile_clients
            mean = federated_average(trained, weights, owners, len(initial), self.accelerator, *rule)
            beside = {name: torch.empty_like(t) for name, t in method.federated().items()}
            unflatten_([*self.parameters, *beside.values(), *self._kept_tensors()], mean)
            method.adopt(beside)
            used = [client for client in weights if SMASHED not in reports[client].bounded]
            method.merge([ClientState(c, reports[c].num_samples, reports[c].kept) for c in used])
        now = flatten(self.parameters)
        self.update_norm = (now - initial[: len(now)]).norm().item()
        return list(weights)

    def least_clients(self) -> int:
        """Return how many clients must be left for an average."""
        return fewest_clients(self.args.aggregation, self.args.hostile_clients)

    def _check_rule(self) -> None:
        """Refuse a rule that needs more clients than a round has."""
        args, needed = self.args, fewest_clients(self.args.aggregation, self.args.hostile_clients)
        asked = num_sampled(len(self.clients), args.participation)
        if asked < needed:
            raise ValueError(
                f"aggregation={args.aggregation!r} with hostile_clients={args.hostile_clients} needs at least {needed} "
                f"clients in a round, and a round has {asked} of {len(self.clients)} (participation="
                f"{args.participation:g}). Raise participation, lower hostile_clients, or use aggregation='median'."
            )

    def _parts(self, length: int) -> Parts:
        """Return where the parts of a flattened `averaged` of this length lie."""
        ends = [0]
        for side in (self.client_parameters, self.server_parameters):
            ends.append(ends[-1] + sum(p.numel() for p in side.values()))
        ends += [length - sum(t.numel() for t in self._kept_tensors()), length]
        names = ("client update", "server update", "auxiliary update", "server optimizer")
        return {name: slice(ends[i], ends[i + 1]) for i, name in enumerate(names) if ends[i] < ends[i + 1]}

    def _measure(
        self, round_index: int, reports: dict[int, ClientReport], trained: Mapping[int, Tensor], initial: Tensor
    ) -> dict[int, Values]:
        """Return how large each client's contribution is, by part. One that is not finite is the client's failure."""
        method, parts = self.methods.of_round(round_index), self._parts(len(initial))
        sound = [client for client, report in reports.items() if report.failure is None]
        found: dict[int, Values] = {c: {SMASHED: method.magnitude(reports[c].kept)} for c in sound}
        if self.args.client_bound:
            mine = [(c, update_norms(trained[c], initial, parts)) for c in sound if c in trained]
            for client, norms in mine if self.accelerator.num_processes == 1 else gather_object(mine):
                found[client] |= norms
        for client, values in found.items():
            broken = [name for name, value in values.items() if not math.isfinite(value)]
            if broken:
                reports[client] = replace(reports[client], failure=f"the size of its {broken[0]} is not finite")
        return found

    def _bound(
        self,
        round_index: int,
        surviving: list[int],
        reports: dict[int, ClientReport],
        found: Mapping[int, Values],
        trained: Mapping[int, Tensor],
        initial: Tensor,
    ) -> None:
        """Scale updates that exceed `args.client_bound` times the median of the surviving clients."""
        factor = self.args.client_bound
        for client, scales in excesses({client: found[client] for client in sorted(surviving)}, factor).items():
            if client in trained:
                scale_update_(trained[client], initial, self._parts(len(initial)), scales)
            reports[client] = replace(reports[client], bounded=scales)
            if self.accelerator.is_main_process:
                times = [
                    f"{name} {f'{factor / scale:.3g} times' if scale else 'beyond'}" for name, scale in scales.items()
                ]
                done = [f"Its update counts for {factor:g} times the median."] if scales.keys() - {SMASHED} else []
                done += ["Its statistics of smashed data are left out."] if SMASHED in scales else []
                logger.warning(
                    "Round %d, client %s: %s the median of the round. %s",
                    round_index + 1,
                    self.clients.name(client),
                    ", ".join(times),
                    " ".join(done),
                )

    def _surviving(self, round_index: int, reports: dict[int, ClientReport]) -> dict[int, float]:
        """Return the weights of the clients to average; a failure is an error, or is logged and skipped."""
        for client, report in reports.items():
            if report.failure is None:
                continue
            failed = f"Round {round_index + 1}, client {self.clients.name(client)}: {report.failure}."
            if self.args.on_client_failure == "raise" and report.failure != DROPPED:
                raise ValueError(
                    f"{failed} The global weights are those of the round before and checkpoints are untouched. Lower "
                    "learning_rate or the method's compensation, set max_grad_norm, look at this client's data, or "
                    "set on_client_failure='skip'."
                )
            if self.accelerator.is_main_process:
                logger.warning("%s It is left out of the average.", failed)
        weights = {c: float(report.num_samples) for c, report in reports.items() if report.failure is None}
        if len(weights) >= self.least_clients():
            return weights
        if self.accelerator.is_main_process:
            left = f"{len(weights)} of {len(reports)} clients are" if weights else "no client is"
            logger.warning("Round %d: %s left. The weights stay as they are.", round_index + 1, left)
        return {}
