"""Rounds with clients on other machines, all of a round at once."""

from __future__ import annotations

import logging
import math
import secrets
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm

from ..config import SplitFedConfig
from ..federation.averaging import flatten, unflatten_
from ..federation.coded_weights import CodedWeights
from ..federation.ledger import ClientReport
from ..federation.sampling import sample_clients
from ..federation.schedule import set_mode
from ..federation.server import ServerRounds
from ..protocol.adapters import AS_THEY_ARE
from ..protocol.clock import synchronize
from ..protocol.loss import LossSpec
from ..protocol.messages import Parameters
from ..protocol.packing import Store
from ..protocol.seeds import derive_seed, preserved_random_state
from ..split import SplitModel
from ..split.placeholders import unwrapped
from .checks import UploadCheck
from .link import FlowerLink, Turn
from .options import DeploymentOptions
from .residuals import NONE
from .roster import Roster, one_line
from .transport import Cancelled, Channel, Courier, Deadline

logger = logging.getLogger(__name__)
NOT_NEEDED = "not needed, enough others have answered"
_RUN, _COUNTED = "residuals.run", "residuals.counted"  # in a checkpoint
_FOLDER = ".exchange"  # in the output folder: payloads that are being received


@dataclass(frozen=True)
class _Round:
    """What all clients of a round share."""

    index: int
    learning_rate: float
    turn: Turn
    weights: Parameters  # that clients begin with
    start: Tensor  # the weights that their server sides begin with
    coded: CodedWeights | None = None  # what `weights` are, unless they are as they are


class Deployment(ServerRounds):
    """The server's half computes for one client after the other, while the clients work and send at the same time.

    Args:
        split: the model.
        loss_spec: what it is trained for.
        roster: the clients.
        courier: who reaches them.
        args: the configuration.
        options: of the deployment.
        accelerator: of the trainer.
        labels: of a batch of one sample, of the form that clients must send.
        max_tokens: of a sample, if the task says so.
    """

    clients: Roster

    def __init__(
        self,
        split: SplitModel,
        loss_spec: LossSpec,
        roster: Roster,
        courier: Courier,
        args: SplitFedConfig,
        options: DeploymentOptions,
        accelerator: Accelerator,
        labels: Mapping[str, Tensor],
        max_tokens: int | None = None,
    ):
        super().__init__(split, loss_spec, roster, args, accelerator)
        self.roster, self.courier, self.options = roster, courier, options
        assert isinstance(options.chunk_size, int) and isinstance(options.max_payload, int)
        self.chunk_size, self.max_payload = options.chunk_size, options.max_payload
        self.folder = Path(args.output_dir or ".") / _FOLDER
        config: Any = unwrapped(split.model).config.get_text_config()
        tokens = math.prod(self.example.activations.shape[1:-1])
        dtype = self.example.activations.dtype
        self.check = UploadCheck(
            loss_spec,
            split.client.cut,
            self.example,
            labels,
            (dtype, torch.bfloat16) if args.bf16 else (dtype,),
            args.per_device_train_batch_size,
            max_tokens or max(tokens, getattr(config, "max_position_embeddings", None) or 0),
            getattr(config, "vocab_size", None),
            getattr(config, "type_vocab_size", None) or getattr(config, "vocab_size", None),
        )
        if any(self.methods.of_round(t).exchanges_each_batch() for t in range(args.num_rounds)):
            logger.warning(
                "Some rounds (the warm-up's, or those of a method that exchanges every batch) cost a message and a new "
                "process on the client for each batch over Flower: seconds each. warmup_rounds=0 leaves the warm-up "
                "out."
            )

    def set_up_method(self) -> None:
        """Give method and server's optimizer the state that training starts with; no client has counted yet."""
        super().set_up_method()
        self.run_number = secrets.randbits(63)  # by which clients know the run, also after a restart
        self.counted: dict[int, int] = {}  # the last round of each client that was averaged
        self.counted_at_save: dict[int, int] = {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return what rounds leave beside the trained weights, for a checkpoint."""
        state = super().state_dict()
        if self.args.adapter_codec == AS_THEY_ARE:
            return state
        self.counted_at_save = dict(self.counted)
        counted = torch.tensor(list(self.counted.items()), dtype=torch.int64).view(-1, 2)
        return state | {_RUN: torch.tensor(self.run_number), _COUNTED: counted}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state_dict` returned."""
        if self.args.adapter_codec != AS_THEY_ARE:
            if _RUN not in state:
                raise ValueError(
                    "The checkpoint was made without adapter_codec. Resume with adapter_codec='float32', or start anew."
                )
            self.run_number = int(state[_RUN])
            self.counted = {int(client): int(round_index) for client, round_index in state[_COUNTED].tolist()}
            self.counted_at_save = dict(self.counted)
        super().load_state_dict({name: t for name, t in state.items() if name not in (_RUN, _COUNTED)})

    def least_clients(self) -> int:
        """Return how many clients must be left for an average."""
        return max(self.options.min_clients, super().least_clients())

    def store(self) -> Store:
        """Return where the exchange of a client's round is kept: a chunk of it in memory unless told otherwise."""
        limit = self.args.exchange_memory_limit
        assert not isinstance(limit, str)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        limit = self.chunk_size if limit is None else limit
        return Store(self.args.exchange_codecs, limit, self.folder, *self.ignored_padding)

    def run_round(self, round_index: int, learning_rate: float, progress: bool = False) -> dict[int, ClientReport]:
        """Train the sampled clients from the global weights, average, and return their reports in client order."""
        shutil.rmtree(self.folder, ignore_errors=True)  # what a kill may have left
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self.roster.wait_for(self.options.min_clients, self.options.round_timeout):
            raise RuntimeError(
                f"Round {round_index + 1}: {len(self.roster.online())} of at least {self.options.min_clients} clients "
                f"are there after {self.options.round_timeout:g} s. Start the run again to go on from its checkpoint."
            )
        needed, clients = self.sample(round_index)
        set_mode(self.split.server, self.args)
        initial = flatten(self.averaged(round_index))
        deadlines: dict[int, Deadline] = {}
        outcomes: dict[int, tuple[ClientReport, Tensor | None]] = {}
        finished, bar = (
            threading.Condition(),
            tqdm(total=len(clients), desc=f"round {round_index + 1}: clients", leave=False, disable=not progress),
        )
        shared = self._shared(round_index, learning_rate)

        def work(client: int) -> None:
            outcome = self._run_client(shared, client, deadlines[client])
            with finished:
                outcomes[client] = outcome
                finished.notify()
                bar.update()

        with preserved_random_state(self.args.device):
            for client in clients:
                deadlines[client] = Deadline(self.options.round_timeout)
                threading.Thread(target=work, args=(client,), daemon=True).start()
            with finished:
                while len(outcomes) < len(clients):
                    if sum(report.failure is None for report, _ in outcomes.values()) >= needed:
                        for client in clients:
                            deadlines[client].cancelled.set()
                    finished.wait(1.0)
        bar.close()
        if self.courier.broken is not None:  # the weights and checkpoints are those of the round before
            unflatten_(self.averaged(round_index), initial)
            raise self.courier.broken
        reports = {client: outcomes[client][0] for client in clients}
        for client in [c for c in clients if reports[c].failure == NOT_NEEDED]:
            logger.info("Round %d, client %s: %s.", round_index + 1, self.clients.name(client), NOT_NEEDED)
            del reports[client]
        self.roster.note({client: report.failure is None for client, report in reports.items()})
        trained = {client: t for client in reports if (t := outcomes[client][1]) is not None}
        used = self.average(round_index, reports, trained, dict.fromkeys(reports, 0), initial)
        self.counted |= dict.fromkeys(used, round_index)
        shutil.rmtree(self.folder, ignore_errors=True)
        return reports

    def _shared(self, round_index: int, learning_rate: float) -> _Round:
        """Return what all clients of a round share, at the present weights."""
        coded, trained_here = self.coded_weights(round_index), list(self.server_parameters.values())
        if coded is not None:
            coded.begin()  # also here: a round script may use what clients have
            weights = coded.sent.to("cpu")
        else:
            federated = self.methods.of_round(round_index).federated()
            weights = Parameters(_snapshot(self.client_parameters), _snapshot(federated))
        return _Round(round_index, learning_rate, Turn(trained_here), weights, flatten(trained_here), coded)

    def sample(self, round_index: int) -> tuple[int, list[int]]:
        """Return how many clients a round needs, and whom it asks.

        They are the simulation's; others are drawn instead of those who are not there or fail again and again, and
        for over-sampling.
        """
        there = set(self.roster.ready(self.least_clients()))
        wanted = sample_clients(self.args.seed, round_index, len(self.roster), self.args.participation)
        needed = len(wanted)
        total = math.ceil(needed * (1 + self.options.over_sampling))
        chosen = [client for client in wanted if client in there]
        others = sorted(there - set(chosen))
        generator = np.random.default_rng(derive_seed(self.args.seed, "replacements", round_index))
        generator.shuffle(others)
        return needed, sorted([*chosen, *others][:total])

    def _run_client(self, shared: _Round, client: int, deadline: Deadline) -> tuple[ClientReport, Tensor | None]:
        """Return a client's report and its trained weights, client then server, if it came through."""
        member = self.roster.members[client]
        try:
            with shared.turn.taken(client, shared.start, deadline):
                link = self._link(shared, client, deadline)
                side = self.server_side(link.context, shared.learning_rate)
                method = self.methods.of_round(shared.index)
                method.round(link, side)
                link.finish()
                side.finish()
                synchronize(self.args.device)
                trained = [*(link.trained[name] for name in self.client_parameters), *self.server_parameters.values()]
                trained += [*(link.kept[name] for name in method.federated()), *self.optimizer_tensors(side)]
                flat = flatten([t.to(self.args.device) for t in trained])
            seconds = link.client_seconds + shared.turn.seconds[client]
            return ClientReport.of(link, side, seconds, member.num_samples), flat
        except Cancelled:
            return ClientReport.of_absent(NOT_NEEDED, member.num_samples), None
        except BaseException as error:  # whatever it is: the round waits for this report
            deadline.cancelled.set()  # what still goes on in the background ends, too
            return ClientReport.of_absent(f"{type(error).__name__}: {one_line(error)}", member.num_samples), None

    def _link(self, shared: _Round, client: int, deadline: Deadline) -> FlowerLink:
        member, context = self.roster.members[client], self.round_context(shared.index, client)
        leading, trailing = self.ignored_padding
        header: dict[str, Any] = {
            "client": client,
            "round": shared.index,
            "learning_rate": float(shared.learning_rate),
            "leading": leading,
            "trailing": trailing,
            "memory_limit": context.store.memory_limit or 0,
        }
        if shared.coded is not None:
            header |= {
                "residuals": f"{self.run_number:x}",
                "residual_round": self.counted.get(client, NONE),
                "residual_saved": self.counted_at_save.get(client, NONE),
            }
        title = None if self.args.disable_tqdm else f"client {member.name}"
        channel = Channel(
            self.courier, member.node, deadline, header, self.folder, self.chunk_size, self.max_payload, title
        )
        tensors = self.methods.of_round(shared.index).upload_tensors
        return FlowerLink(
            channel, context, self.check, shared.turn, shared.weights, member.num_samples, tensors, shared.coded
        )


def _snapshot(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the CPU: what is sent may be trained on meanwhile."""
    return {name: t.detach().cpu().clone() for name, t in tensors.items()}
