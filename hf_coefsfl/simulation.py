"""One communication round in this process group: the sampled clients one after the other, then the average."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn
from tqdm.auto import tqdm
from transformers import Trainer

from .adapters import trainable_sides
from .auxiliary import example_smashed
from .client_data import Batches, ClientData
from .config import SplitFedConfig
from .double_backward import differentiable_attention
from .exchange import Store
from .fedavg import federated_average, flatten, unflatten_
from .federation import Federation
from .flops import CountedLink, OperationCounter
from .ledger import DROPPED, ClientReport, gather_reports
from .links import LocalLink, synchronize
from .methods import GradientReuse, Method, make_method
from .methods.base import Kept
from .outputs import Task
from .padding import ignores_padding, mirrored
from .probe import ProbePoint, probe_staleness
from .rounds import (
    assign_clients,
    is_dropped,
    preserved_random_state,
    sample_clients,
)
from .sides import ClientSide, ServerSide, Setting
from .split import SplitModel

logger = logging.getLogger(__name__)


class Simulation:
    """Clients and their server sides as objects in this process; the clients of a round are spread over processes."""

    def __init__(
        self,
        split: SplitModel,
        task: Task,
        federation: Federation,
        collate: Callable[[list[Any]], dict[str, Any]],
        args: SplitFedConfig,
        accelerator: Accelerator,
    ):
        self.split, self.task, self.federation = split, task, federation
        self.args, self.accelerator = args, accelerator
        self.data = ClientData(federation, collate, task, args)
        example = example_smashed(split)
        # Whether padding before, and after, the tokens can be left out: a model may always read the first position.
        self._ignored_padding = tuple(ignores_padding(split.server, data) for data in (mirrored(example), example))
        self.client_parameters, self.server_parameters = trainable_sides(split)
        self.warmup, self.method = make_method("vanilla"), args.make_method()
        self.set_up_method()
        self.update_norm = 0.0  # of the last round's average
        self.staleness: list[ProbePoint] = []  # what `args.staleness_probe` measured
        self.gflops: dict[str, float] = {}  # of each side and sample in the last round, if `args.count_flops`

    def set_up_method(self) -> None:
        """Give the method the state it starts with."""
        self.method.setup(self.split, self.task, self.args.seed, first_round=self.args.warmup_rounds)

    def run_round(self, round_index: int, learning_rate: float, progress: bool = False) -> dict[int, ClientReport]:
        """Train the sampled clients from the global weights, average, and return their reports in client order."""
        clients = sample_clients(self.args.seed, round_index, len(self.federation), self.args.participation)
        sizes = {client: self.federation.sizes[client] for client in clients}
        owners = assign_clients(sizes, self.accelerator.num_processes)
        mine = [client for client in clients if owners[client] == self.accelerator.process_index]
        parameters = [*self.client_parameters.values(), *self.server_parameters.values()]
        initial = flatten(parameters)
        trained: dict[int, torch.Tensor] = {}
        reports: dict[int, ClientReport] = {}
        known = len(self.staleness)
        self._set_mode()
        with preserved_random_state():
            present = [client for client in mine if not self._is_dropped(round_index, client)]
            fetched = self.data.round(round_index, present)
            for client in tqdm(mine, desc=f"round {round_index + 1}: clients", leave=False, disable=not progress):
                unflatten_(parameters, initial)
                reports[client] = self._run_client(round_index, client, fetched, learning_rate)
                trained[client] = flatten(parameters)
                if client == clients[0] and reports[client].failure is None:
                    self._examine(round_index, client, learning_rate, initial)
                for parameter in parameters:
                    parameter.grad = None
        unflatten_(parameters, initial)  # they stay if a client failed
        if self.args.staleness_probe or self.args.count_flops:  # measured by one process, logged by another
            measured = [self.staleness[known:], self.gflops]
            self.staleness[known:], self.gflops = broadcast_object_list(measured, owners[clients[0]])
        reports = gather_reports(reports, self.accelerator)
        weights = self._surviving(round_index, reports)
        if weights:
            mean = federated_average(trained, weights, owners, len(initial), self.accelerator)
            unflatten_(parameters, mean)
            kept = [Kept(client, reports[client].num_samples, reports[client].kept) for client in weights]
            self.round_method(round_index).merge(kept)
        self.update_norm = (flatten(parameters) - initial).norm().item()
        return reports

    def _is_dropped(self, round_index: int, client: int) -> bool:
        return is_dropped(self.args.seed, round_index, client, self.args.client_dropout_rate)

    def _run_client(
        self, round_index: int, client: int, fetched: Iterator[list[Any]], learning_rate: float
    ) -> ClientReport:
        """Train a client on what is fetched next; what it raises is reported where failing clients are skipped."""
        size = self.federation.sizes[client]
        if self._is_dropped(round_index, client):
            return ClientReport.of_absent(DROPPED, size)
        try:
            batches = self.data.checked(client, next(fetched))
            return self._train_client(round_index, client, batches, learning_rate)
        except Exception as error:
            if self.args.on_client_failure == "raise":
                raise
            return ClientReport.of_absent(f"{type(error).__name__}: {error}", size)

    def _surviving(self, round_index: int, reports: dict[int, ClientReport]) -> dict[int, float]:
        """Return the weights of the clients to average; a failure is an error, or is told and passed over."""
        for client, report in reports.items():
            if report.failure is None:
                continue
            told = f"Round {round_index + 1}, client {self.federation.name(client)}: {report.failure}."
            if self.args.on_client_failure == "raise" and report.failure != DROPPED:
                raise ValueError(
                    f"{told} The global weights are those of the round before and checkpoints are untouched. Lower "
                    "learning_rate or the method's compensation, set max_grad_norm, look at this client's data, or "
                    "set on_client_failure='skip'."
                )
            if self.accelerator.is_main_process:
                logger.warning("%s It is left out of the average.", told)
        weights = {c: float(report.num_samples) for c, report in reports.items() if report.failure is None}
        if not weights and self.accelerator.is_main_process:
            logger.warning("Round %d: no client is left. The weights stay as they are.", round_index + 1)
        return weights

    def _examine(self, round_index: int, client: int, learning_rate: float, initial: torch.Tensor) -> None:
        """Measure staleness and count operations on one client, where asked for; the weights are left changed."""
        parameters = [*self.client_parameters.values(), *self.server_parameters.values()]
        if self._is_probed(round_index):
            unflatten_(parameters, initial)
            self._probe(round_index, client, self.data.batches(round_index, client), learning_rate)
        if self.args.count_flops:
            unflatten_(parameters, initial)
            self._count_operations(round_index, client, self.data.batches(round_index, client), learning_rate)

    def round_method(self, round_index: int) -> Method:
        """Return vanilla SFL in the warm-up rounds, then the method of the run."""
        return self.warmup if round_index < self.args.warmup_rounds else self.method

    def local_optimizer(self, parameters: dict[str, nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
        """Return a fresh optimizer (`args.optim`, AdamW by default)."""
        cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(self.args)
        kwargs["lr"] = learning_rate
        return cls([{"params": list(parameters.values()), "weight_decay": self.args.weight_decay}], **kwargs)

    def _store(self) -> Store:
        args = self.args
        limit = args.exchange_memory_limit
        assert not isinstance(limit, str)
        return Store(args.exchange_dtype, limit, args.output_dir, *self._ignored_padding)

    def _sides(
        self, round_index: int, client: int, batches: Batches, learning_rate: float
    ) -> tuple[ClientSide, ServerSide]:
        """Return both sides of a client at the present weights, with fresh optimizers."""
        setting = Setting(
            seed=self.args.seed,
            round_index=round_index,
            client=client,
            local_epochs=self.args.local_epochs,
            max_grad_norm=self.args.max_grad_norm,
            device=self.args.device,
            autocast=self.accelerator.autocast,
            store=self._store(),
        )
        optimizer = self.local_optimizer(self.client_parameters, learning_rate)
        client_side = ClientSide(self.split.client, batches, optimizer, setting, self.task)
        optimizer = self.local_optimizer(self.server_parameters, learning_rate)
        return client_side, ServerSide(self.split.server, optimizer, setting, self.task)

    def _train_client(self, round_index: int, client: int, batches: Batches, learning_rate: float) -> ClientReport:
        """Run the round's method with one client, both sides starting from the present weights."""
        client_side, server_side = self._sides(round_index, client, batches, learning_rate)
        method = self.round_method(round_index)
        link = LocalLink(method, client_side)
        start = time.perf_counter()
        method.round(link, server_side)
        link.federate(self.client_parameters, method.federated())
        for side in (client_side, server_side):
            side.finish()
        synchronize(self.args.device)
        seconds = time.perf_counter() - start
        return ClientReport.of(link, server_side, seconds, self.federation.sizes[client])

    def _is_probed(self, round_index: int) -> bool:
        since = round_index - self.args.warmup_rounds
        return bool(self.args.staleness_probe) and since >= 0 and since % self.args.staleness_probe == 0

    def _probe(self, round_index: int, client: int, batches: Batches, learning_rate: float) -> None:
        """Measure the staleness of one client's round; the caller gives the weights back."""
        assert isinstance(self.method, GradientReuse)
        self.staleness += probe_staleness(self.method, *self._sides(round_index, client, batches, learning_rate))

    def _count_operations(self, round_index: int, client: int, batches: Batches, learning_rate: float) -> None:
        """Repeat one client's round under a counter; the caller gives the weights back."""
        method = copy.deepcopy(self.round_method(round_index))  # what it keeps is none of the run's
        client_side, server_side = self._sides(round_index, client, batches, learning_rate)
        counter = OperationCounter()
        with differentiable_attention(), counter:  # a fused attention would not be seen
            method.round(CountedLink(method, client_side, counter), server_side)
        samples = self.federation.sizes[client]
        self.gflops = {f"{side}_gflops": flops / 1e9 / samples for side, flops in counter.flops.items()}

    def _set_mode(self) -> None:
        """Put the halves in training mode, with batch statistics frozen and dropout as the config says."""
        for half in (self.split.client, self.split.server):
            half.train(self.args.dropout == "synced")
            for module in half.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()  # running statistics are not averaged over clients
