"""A deployment of tiny models without a network: one honest round is recorded, and answers of it are forged."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from flwr.app import Message as FlowerMessage
from peft import LoraConfig, get_peft_model
from torch import Tensor

from hf_coefsfl.config import SplitFedConfig
from hf_coefsfl.federation.averaging import flatten, unflatten_
from hf_coefsfl.federation.ledger import ClientReport
from hf_coefsfl.federation.schedule import local_optimizer, set_mode
from hf_coefsfl.flower.deployment import Deployment
from hf_coefsfl.flower.link import FlowerLink
from hf_coefsfl.flower.options import DeploymentOptions
from hf_coefsfl.flower.roster import Member, Roster
from hf_coefsfl.flower.transport import Courier, Deadline
from hf_coefsfl.flower.wire import Manifest, chunk_of, content, has_chunk, header_of
from hf_coefsfl.methods import make_method
from hf_coefsfl.protocol.client_side import ClientSide
from hf_coefsfl.protocol.link import packed_upload
from hf_coefsfl.protocol.loss import LossSpec
from hf_coefsfl.protocol.messages import ClientResult, Message
from hf_coefsfl.protocol.packing import Places
from hf_coefsfl.protocol.wire import read_exchange, write_exchange, write_message
from hf_coefsfl.split import SplitModel, split_model
from hf_coefsfl.split.lora import trainable_sides
from tests.support.deployed import LocalGrid
from tests.support.federated import FEWER_PASSES
from tests.support.models import MODELS

Answer = tuple[dict[str, Any], bytes]
CLIENTS, BATCH_SIZE, ECHOED = 3, 3, ("protocol", "client", "round", "token", "sequence")


@dataclass
class Task:
    """A tiny model, its parts on both sides, and two batches for each client."""

    name: str
    split: SplitModel
    loss_spec: LossSpec
    batches: list[list[dict[str, Tensor]]]
    labels: dict[str, Tensor]

    @classmethod
    def of(cls, name: str) -> Task:
        entry = MODELS[name]
        base = entry.make()
        data = [[entry.batch(2 * client + i) for i in range(2)] for client in range(CLIENTS)]
        names = [key for key in data[0][0] if key == "labels" or key.endswith("_positions")]
        loss_spec = LossSpec.of(base, names)
        model = get_peft_model(base, LoraConfig(r=2, target_modules=list(entry.lora)))
        labels = {key: data[0][0][key][:1] for key in names}
        return cls(name, split_model(model, 2), loss_spec, data, labels)


class ReplayingGrid(LocalGrid):
    """A grid that answers at once, by `answer(kind, header, chunk)`. `decode` may change how a reply is pulled."""

    def __init__(self) -> None:
        super().__init__({}, [])
        self.answer: Callable[[str, dict[str, Any], bytes | None], tuple[dict[str, Any], bytes | None]]
        self.decode: Callable[[FlowerMessage], Any] = lambda reply: reply
        self.names: dict[int, str] = {}  # of the nodes that are there
        self._count = itertools.count()

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=node, name=name) for node, name in self.names.items()]

    def push_messages(self, messages: Iterable[FlowerMessage]) -> list[str]:
        numbers = []
        for message in messages:
            asked = header_of(message.content)
            chunk = chunk_of(message.content) if has_chunk(message.content) else None
            number = f"m{next(self._count)}"
            message.metadata.__dict__["_message_id"] = number
            header, chunk = self.answer(message.metadata.message_type, asked, chunk)
            echoed = {name: asked[name] for name in ECHOED if name in asked}
            reply = FlowerMessage(content(echoed | header, chunk), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
            self.replies[number] = [self.decode(reply)]
            numbers.append(number)
        return numbers


@dataclass
class Target:
    """The server of a run with three clients, and the answers of an honest round."""

    task: Task
    method: str
    codecs: Any
    folder: Path
    args: SplitFedConfig
    accelerator: Accelerator
    adapter_codec: str
    answers: list[list[Answer]] = field(default_factory=list)  # of each client
    asked: list[Any] = field(default_factory=list)  # the batches of each upload, and "finish"
    reports: list[ClientReport] = field(default_factory=list)
    flat: list[Tensor] = field(default_factory=list)  # what each client trained

    def __post_init__(self) -> None:
        self.args = copy.copy(self.args)
        self.args.method, self.args.exchange_codec = self.method, self.codecs
        self.args.client_bound, self.args.adapter_codec = 5.0, self.adapter_codec
        self.args.method_kwargs, self.args.output_dir = FEWER_PASSES.get(self.method), str(self.folder)
        self.grid = ReplayingGrid()
        courier, options = Courier(self.grid), DeploymentOptions(min_clients=1, round_timeout=60.0)
        roster = Roster(courier, "h", CLIENTS, 1000)
        roster.members = {c: Member(100 + c, f"client {c}", 2 * BATCH_SIZE, False) for c in range(CLIENTS)}
        entry = self.task
        self.deployment = Deployment(
            entry.split, entry.loss_spec, roster, courier, self.args, options, self.accelerator, entry.labels, None
        )
        set_mode(entry.split.server, self.args)
        server = self.deployment
        self.initial = flatten(server.averaged(0))
        self.round = server._shared(0, 1e-2)
        for client in range(CLIENTS):
            self._record(client)

    def _record(self, client: int) -> None:
        honest = HonestClient(self, client)
        recorded: list[Answer] = []
        asked: list[Any] = []

        def answer(kind: str, header: dict[str, Any], chunk: bytes | None) -> Answer:
            last = json.loads(header["calls"])[-1]
            asked.append(last["batches"] if last["do"] == "upload" else "finish")
            recorded.append(honest(header, chunk))
            return recorded[-1]

        self.grid.answer = answer
        report, flat = self.run(client)
        assert report.failure is None and flat is not None, report.failure
        self.asked = asked
        self.answers.append(recorded)
        self.reports.append(report)
        self.flat.append(flat)

    def run(self, client: int) -> Any:
        """Return the report of a client's round, and its weights."""
        return self.deployment._run_client(self.round, client, Deadline(60.0))

    def link(self, client: int) -> FlowerLink:
        """Return a link to a client."""
        return self.deployment._link(self.round, client, Deadline(60.0))

    def average(self, report: ClientReport, flat: Tensor) -> Tensor:
        """Return what the average makes of client 0's weights and the others' honest ones; nothing is left changed."""
        server = self.deployment
        state = {name: t.clone() for name, t in server.method.state_dict().items()}
        reports = {0: report} | dict(enumerate(self.reports[1:], start=1))
        trained = {0: flat} | {client: self.flat[client].clone() for client in range(1, CLIENTS)}
        try:
            server.average(0, reports, trained, dict.fromkeys(reports, 0), self.initial)
            return flatten(server.averaged(0))
        finally:
            server.method.load_state_dict(state)
            unflatten_(server.averaged(0), self.initial)

    def on_disk(self) -> int:
        """Return the bytes in the folder of the exchange, which is then emptied."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        for path in files:
            path.unlink()
        return size


class HonestClient:
    """What a client answers, with a half of its own."""

    def __init__(self, target: Target, client: int):
        task, args, server = target.task, target.args, target.deployment
        split = copy.deepcopy(task.split)
        set_mode(split.client, args)
        self.parameters, _ = trainable_sides(split)
        self.method = make_method(target.method, args.method_kwargs)
        self.method.setup(split, task.loss_spec, args.seed)
        context = server.round_context(0, client)
        optimizer = local_optimizer(args, self.parameters, 1e-2)
        self.coded = target.round.coded
        self.side = ClientSide(split.client, task.batches[client], optimizer, context, task.loss_spec)
        self.file = target.folder / "honest"
        self.uploaded: tuple[list[int], Any] = ([], None)

    def __call__(self, header: dict[str, Any], chunk: bytes | None) -> Answer:
        for call in json.loads(header["calls"]):
            if call["do"] == "upload":
                sent = packed_upload(self.method, self.side, call["batches"])
                self.uploaded = (call["batches"] or list(range(len(sent))), sent)
                write_exchange(sent, self.file)
            elif call["do"] == "update":
                self.method.update(self.side, self._messages(call["batches"], header, chunk), call["batches"])
            else:
                self.side.finish()
                observed = {name: torch.stack(values) for name, values in self.side.observed.values.items()}
                adapters = {name: p.detach() for name, p in self.parameters.items()}
                kept = self.side.kept
                if self.coded is not None:
                    codecs, sent = self.coded.codecs, self.coded.sent
                    adapters, _ = codecs["adapters"].encode_update(sent.adapters, adapters, None)
                    kept, _ = codecs["auxiliary"].encode_update(sent.auxiliary, kept, None)
                write_message(ClientResult(adapters, kept, observed), self.file)
        manifest, data = Manifest.of(self.file), self.file.read_bytes()
        self.file.unlink()
        counts = {"num_batches": 2, "num_samples": 2 * BATCH_SIZE, "seconds": 0.0}
        return counts | manifest.entries(), data

    def _messages(self, batches: list[int] | None, header: dict[str, Any], chunk: bytes | None) -> Any:
        if "payload_size" not in header or header["sequence"] == 0:
            return None
        assert chunk is not None
        path = self.file.with_name("received")
        path.write_bytes(chunk)
        numbers, sent = self.uploaded
        places = {b: i for i, b in enumerate(numbers)}
        walked = batches if batches is not None else numbers

        def kept(place: int, message: Message) -> Places | None:
            found: Places | None = sent.places(places[walked[place]])
            return found

        messages: Any = read_exchange(path, Message, self.side.context.store, kept, batches=batches)
        path.unlink()
        return messages
