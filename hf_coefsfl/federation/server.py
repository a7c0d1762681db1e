"""What a round is on the server, wherever the clients are: who is sampled, who is left, and the average."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ..config import SplitFedConfig
from ..methods import Method
from ..methods.base import ClientState
from ..methods.parts.auxiliary import example_smashed
from ..protocol.context import RoundContext
from ..protocol.loss import LossSpec
from ..protocol.packing import Store
from ..protocol.padding import ignores_padding, mirrored
from ..protocol.server_side import ServerSide
from ..split import SplitModel
from ..split.lora import trainable_sides
from .averaging import federated_average, flatten, unflatten_
from .ledger import DROPPED, ClientReport
from .schedule import MethodSchedule, local_optimizer, make_context, make_store

logger = logging.getLogger(__name__)


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
        self.methods = MethodSchedule(args)
        self.set_up_method()
        self.update_norm = 0.0  # of the last round's average

    @property
    def method(self) -> Method:
        """The method of the run."""
        return self.methods.method

    def set_up_method(self) -> None:
        """Give the method the state it starts with."""
        self.method.setup(self.split, self.loss_spec, self.args.seed, first_round=self.args.warmup_rounds)

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
        """Return the server's side of a client at the present weights, with a fresh optimizer."""
        optimizer = self.local_optimizer(self.server_parameters, learning_rate)
        return ServerSide(self.split.server, optimizer, context, self.loss_spec)

    def average(
        self,
        round_index: int,
        reports: dict[int, ClientReport],
        trained: Mapping[int, Tensor],
        owners: Mapping[int, int],
        initial: Tensor,
    ) -> None:
        """Replace the round's initial weights by the mean of the surviving clients.

        Args:
            round_index: of the round.
            reports: of all sampled clients, in client order.
            trained: the flattened weights of the clients that this process trained.
            owners: which process trained a client.
            initial: the flattened weights of the round's start; they stay if no client is left.
        """
        unflatten_(self.parameters, initial)
        weights = self._surviving(round_index, reports)
        if weights:
            unflatten_(self.parameters, federated_average(trained, weights, owners, len(initial), self.accelerator))
            kept = [ClientState(client, reports[client].num_samples, reports[client].kept) for client in weights]
            self.methods.of_round(round_index).merge(kept)
        self.update_norm = (flatten(self.parameters) - initial).norm().item()

    def least_clients(self) -> int:
        """Return how many clients must be left for an average."""
        return 1

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
