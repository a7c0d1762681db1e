"""One communication round in this process group: the sampled clients one after the other, then the average."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list
from tqdm.auto import tqdm

from .._io import is_disk_full
from ..config import SplitFedConfig
from ..methods import Method
from ..protocol.client_side import ClientSide
from ..protocol.devices import is_device_error, to_device
from ..protocol.link import LocalLink
from ..protocol.seeds import preserved_random_state
from ..protocol.server_side import ServerSide
from ..split import SplitModel
from .averaging import flatten, unflatten_
from .batches import Batches, ClientData
from .clients import Federation
from .coded_weights import ADAPTERS, AUXILIARY, PREFIX, CodedWeights, Residual, from_state, to_state
from .data_checks import RowCheck
from .ledger import DROPPED, ClientReport, gather_reports
from .sampling import assign_clients, is_dropped, sample_clients
from .schedule import set_mode
from .server import ServerRounds
from .stacked import Stacked, Stacking, groups_of
from .stacked_link import StackedLink

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Measures the first sampled client of a round without changing the training."""

    def due(self, round_index: int) -> bool:
        """Return whether this round is measured."""

    def examine(self, method: Method, client: ClientSide, server: ServerSide, num_samples: int) -> Any:
        """Return what was measured, for `take`. Both sides stand at the round-initial weights and may be changed."""

    def take(self, result: Any) -> None:
        """Store a measurement. Called in every process, with the result of the one that measured."""


class Simulation(ServerRounds):
    """Clients and their server sides as objects in this process; the clients of a round are spread over processes."""

    def __init__(
        self,
        split: SplitModel,
        check: RowCheck,
        federation: Federation,
        collate: Callable[[list[Any]], dict[str, Any]],
        args: SplitFedConfig,
        accelerator: Accelerator,
        observers: Sequence[Observer] = (),
    ):
        super().__init__(split, check.loss_spec, federation, args, accelerator)
        self.federation = federation
        self.observers = observers
        self.data = ClientData(federation, collate, check, args)
        self.stacking: Stacking | None = None
        if args.stacked_clients > 1:
            if len(set(federation.sizes)) == len(federation):
                logger.warning(
                    "stacked_clients=%d does nothing here: no two clients have as many samples.", args.stacked_clients
                )
            self.stacking = Stacking(
                split, self.client_parameters | self.server_parameters, check.loss_spec, args, self.ignored_padding[1]
            )

    def set_up_method(self) -> None:
        """Give method, server's optimizer and clients the state that training starts with."""
        super().set_up_method()
        self.residuals: dict[int, Residual] = {}  # of the clients, in every process: each may train any of them

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what rounds leave beside the trained weights, for a checkpoint."""
        return super().state_dict() | to_state(self.residuals)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take back what `state_dict` returned."""
        self.residuals = from_state(state)
        super().load_state_dict({name: t for name, t in state.items() if not name.startswith(PREFIX)})

    def close(self) -> None:
        """End the workers that collate."""
        self.data.close()

    def run_round(self, round_index: int, learning_rate: float, progress: bool = False) -> dict[int, ClientReport]:
        """Train the sampled clients from the global weights, average, and return their reports in client order.

        A round that is interrupted leaves the weights that it began with, not those of some client.
        """
        parameters = self.averaged(round_index)
        initial = flatten(parameters)
        try:
            return self._run_round(round_index, learning_rate, initial, progress)
        except BaseException:
            with suppress(Exception):  # of a broken device
                unflatten_(parameters, initial)
            raise

    def _run_round(
        self, round_index: int, learning_rate: float, initial: torch.Tensor, progress: bool
    ) -> dict[int, ClientReport]:
        clients = sample_clients(self.args.seed, round_index, len(self.federation), self.args.participation)
        sizes = {client: self.federation.sizes[client] for client in clients}
        owners = assign_clients(sizes, self.accelerator.num_processes)
        mine = [client for client in clients if owners[client] == self.accelerator.process_index]
        parameters, federated = self.averaged(round_index), self.methods.of_round(round_index).federated()
        coded = self.coded_weights(round_index)
        start, residuals = initial, dict[int, Residual]()
        if coded is not None:
            coded.begin()
            start = flatten(parameters)
        trained: dict[int, torch.Tensor] = {}
        reports: dict[int, ClientReport] = {}
        observers = [observer for observer in self.observers if observer.due(round_index)]
        results: list[Any] = [None] * len(observers)
        for half in (self.split.client, self.split.server):
            set_mode(half, self.args)
        with preserved_random_state(self.args.device):
            running = self._run_clients(round_index, mine, learning_rate, start)
            shown: dict[str, Any] = {"desc": f"round {round_index + 1}: clients", "total": len(mine), "leave": False}
            for client, report, kept in tqdm(running, **shown, disable=not progress):
                reports[client] = report
                if coded is not None and reports[client].failure is None:
                    reports[client], residuals[client] = self._returned(coded, client, reports[client])
                beside = [to_device(reports[client].kept.get(name, p), p.device) for name, p in federated.items()]
                trained[client] = flatten([*self.parameters, *beside, *kept])
                if client == clients[0] and reports[client].failure is None:
                    results = [self._examine(o, round_index, client, learning_rate, start) for o in observers]
                for parameter in parameters:
                    parameter.grad = None
        if observers:  # one process has measured
            broadcast_object_list(results, owners[clients[0]])
        for observer, result in zip(observers, results, strict=True):
            if result is not None:  # the first client did not fail
                observer.take(result)
        reports = gather_reports(reports, self.accelerator)
        used = self.average(round_index, reports, trained, owners, initial)
        if coded is not None:
            self._keep(residuals, coded, used, owners)
        return reports

    @torch.no_grad()
    def _returned(self, coded: CodedWeights, client: int, report: ClientReport) -> tuple[ClientReport, Residual]:
        """Put what arrives of a client's weights in their place; return its report and its next residual."""
        before = self.residuals.get(client, {})
        beside = {name: report.kept.get(name, p) for name, p in coded.weights[AUXILIARY].items()}
        try:
            adapters, left = coded.passed(ADAPTERS, self.client_parameters, before.get(ADAPTERS))
            auxiliary, left_beside = coded.passed(AUXILIARY, beside, before.get(AUXILIARY))
        except ValueError as error:  # too large for the codec
            return replace(report, failure=str(error)), {}
        for name, value in adapters.items():
            self.client_parameters[name].copy_(value)
        report = replace(report, kept=report.kept | {name: t.cpu() for name, t in auxiliary.items()})
        return report, {ADAPTERS: left, AUXILIARY: left_beside}

    def _keep(
        self, mine: Mapping[int, Residual], coded: CodedWeights, used: Sequence[int], owners: Mapping[int, int]
    ) -> None:
        """Have every process keep the new residuals of the clients that were averaged; others keep their old ones."""
        for client in used:
            for part, initial in coded.initial.items():
                if len(initial):
                    left = mine[client][part] if client in mine else torch.empty_like(initial)
                    if self.accelerator.num_processes > 1:
                        left = broadcast(left, from_process=owners[client])
                    self.residuals.setdefault(client, {})[part] = left.cpu()

    def _is_dropped(self, round_index: int, client: int) -> bool:
        return is_dropped(self.args.seed, round_index, client, self.args.client_dropout_rate)

    def _run_clients(
        self, round_index: int, clients: Sequence[int], learning_rate: float, start: torch.Tensor
    ) -> Iterator[tuple[int, ClientReport, Sequence[torch.Tensor]]]:
        """Train clients from the weights `start`, some of them at once if they are stacked.

        Yield each with its report and its server's optimizer state, while the model has the weights that it came to.
        """
        parameters = self.averaged(round_index)

        def alone(client: int, fetched: Iterator[list[Any]]) -> tuple[int, ClientReport, Sequence[torch.Tensor]]:
            unflatten_(parameters, start)
            return client, *self._run_client(round_index, client, fetched, learning_rate)

        lost = [client for client in clients if self._is_dropped(round_index, client)]
        present = [client for client in clients if client not in lost]
        groups = groups_of(present, self.federation.sizes, self.args.stacked_clients)
        fetched = self.data.round(round_index, [client for group in groups for client in group])
        for client in lost:
            yield alone(client, fetched)
        for group in groups:
            if self.stacking is None or len(group) == 1:
                yield from (alone(client, fetched) for client in group)
                continue
            for batches in self.stacking.alike({client: next(fetched) for client in group}):
                unflatten_(parameters, start)
                stacked = self._train_stacked(self.stacking, round_index, batches, learning_rate)
                if stacked is None:
                    yield from (alone(client, iter([own])) for client, own in batches.items())
                    continue
                for place, (client, report) in enumerate(stacked.reports.items()):
                    self.stacking.give_back(stacked.weights, place)
                    yield client, report, stacked.kept[place]

    def _train_stacked(
        self, stacking: Stacking, round_index: int, batches: Mapping[int, Batches], learning_rate: float
    ) -> Stacked | None:
        """Run the round's method with clients at once; None: they are to train alone, as one may have failed."""
        clients = tuple(batches)
        if len(clients) == 1:
            return None
        method, weights = self.methods.of_round(round_index), stacking.stacks(len(clients))
        context = replace(self.round_context(round_index, clients[0]), stacked=clients)
        loss_spec = replace(self.loss_spec, clients=len(clients))
        ours, theirs = (
            self.local_optimizer({name: weights[name] for name in side}, learning_rate)
            for side in (self.client_parameters, self.server_parameters)
        )
        on_server = [weights[name] for name in self.server_parameters]
        if self.optimizer_state is not None:
            self.optimizer_state.load_into(theirs, on_server)
        try:
            alone = list(batches.values())
            together = self.data.pinned(stacking.stacked(alone))
            client_side = ClientSide(self.split.client, together, ours, context, loss_spec)
            link = StackedLink(method, client_side, alone, self.client_parameters, stacking.shared)
            server_side = ServerSide(self.split.server, theirs, context, loss_spec)
            start = time.perf_counter()
            with stacking.applied(weights):
                method.round(link, server_side)
            server_side.finish()
            link.finish()
            seconds = time.perf_counter() - start
        except Exception as error:
            if self.args.on_client_failure == "raise" or is_device_error(error) or is_disk_full(error):
                raise
            logger.warning(
                "Round %d: clients %s train one after the other. Stacked they raise %s: %s",
                round_index + 1,
                ", ".join(map(self.federation.name, clients)),
                type(error).__name__,
                error,
            )
            return None
        report = ClientReport.of(link, server_side, seconds, 0)
        if report.failure is not None:
            return None
        state = self.optimizer_state
        kept = [[] if state is None else state.of(theirs, on_server, place) for place in range(len(clients))]
        return Stacked(weights, link.reports(report, self.federation.sizes), kept)

    def _run_client(
        self, round_index: int, client: int, fetched: Iterator[list[Any]], learning_rate: float
    ) -> tuple[ClientReport, Sequence[torch.Tensor]]:
        """Train a client on what is fetched next. Return its report, and its server's optimizer state if it is kept.

        What it raises is reported if failing clients are skipped. An error of the device or a full disk is not the
        client's: without the clients that do not fit, the average would be another.
        """
        size = self.federation.sizes[client]
        if self._is_dropped(round_index, client):
            return ClientReport.of_absent(DROPPED, size), []
        try:
            batches = self.data.checked(client, next(fetched))
            return self._train_client(round_index, client, batches, learning_rate)
        except Exception as error:
            if self.args.on_client_failure == "raise" or is_device_error(error) or is_disk_full(error):
                raise
            return ClientReport.of_absent(f"{type(error).__name__}: {error}".rstrip("."), size), []

    def _examine(
        self, observer: Observer, round_index: int, client: int, learning_rate: float, initial: torch.Tensor
    ) -> Any:
        """Measure one client from the round-initial weights; the caller gives the weights back."""
        unflatten_(self.averaged(round_index), initial)
        sides = self._sides(round_index, client, self.data.batches(round_index, client), learning_rate)
        return observer.examine(self.methods.of_round(round_index), *sides, self.federation.sizes[client])

    def _sides(
        self, round_index: int, client: int, batches: Batches, learning_rate: float
    ) -> tuple[ClientSide, ServerSide]:
        """Return both sides of a client at the present weights."""
        context = self.round_context(round_index, client)
        optimizer = self.local_optimizer(self.client_parameters, learning_rate)
        client_side = ClientSide(self.split.client, batches, optimizer, context, self.loss_spec)
        return client_side, self.server_side(context, learning_rate)

    def _train_client(
        self, round_index: int, client: int, batches: Batches, learning_rate: float
    ) -> tuple[ClientReport, Sequence[torch.Tensor]]:
        """Run the round's method with one client, both sides starting from the present weights."""
        client_side, server_side = self._sides(round_index, client, batches, learning_rate)
        method = self.methods.of_round(round_index)
        link = LocalLink(method, client_side)
        start = time.perf_counter()
        method.round(link, server_side)
        server_side.finish()
        link.finish()  # which waits for an accelerator, for all that is to be timed
        seconds = time.perf_counter() - start
        report = ClientReport.of(link, server_side, seconds, self.federation.sizes[client])
        return report, self.optimizer_tensors(server_side)
