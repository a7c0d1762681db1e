"""A tiny deployed run: a model and the data of some sites on disk, and a grid whose nodes are threads."""

from __future__ import annotations

import copy
import functools
import itertools
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from datasets import Image as ImageFeature
from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from PIL import Image
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from hf_coefsfl.cli import main as coefsfl
from hf_coefsfl.flower import roster
from hf_coefsfl.flower.client import client_app
from hf_coefsfl.flower.options import read_run_config
from hf_coefsfl.flower.server import DeployedTrainer, serve
from hf_coefsfl.tasks.run import make_trainer
from hf_coefsfl.trainer.trainer import SplitFedTrainer
from tests.support.words import words_tokenizer

WORDS = ["the", "cat", "sat", "on", "a", "mat", "dog", "ran", "far"]
LONG = 1000.0  # seconds that no test waits for, unless what it waits for never happens
roster._GRACE = roster._LATER = LONG  # type: ignore[misc]  # no client is left out because it is slow to say who it is
Fault = Callable[[int, Message, Message], Any]


class Site:
    """Files of a run with some sites, each with a few texts of its own."""

    task = "newsgroups"

    def __init__(self, folder: Path, sizes: Iterable[int] = (7, 5), dropout: float = 0.0):
        self.folder, self.sizes = folder, list(sizes)
        rows: list[dict[str, Any]] = []
        for site, size in enumerate(self.sizes):
            mine = [self.row(site, i) for i in range(size)]
            self.save(mine, folder / f"site{site}" / "train.parquet")
            rows += [row | {"site": site} for row in mine]
        self.save(rows, folder / "all" / "train.parquet")
        for place in ("all", "test"):
            self.save([self.row(9, i) for i in range(8)], folder / place / "test.parquet")
        torch.manual_seed(0)
        self.make_model(folder / "model", dropout)

    def save(self, rows: list[dict[str, Any]], path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Dataset.from_list(rows).to_parquet(str(path))

    def make_model(self, folder: Path, dropout: float) -> None:
        config = BertConfig(
            vocab_size=15, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=32, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        )  # fmt: skip
        BertForSequenceClassification(config).save_pretrained(folder)
        words_tokenizer().save_pretrained(folder)

    def row(self, site: int, i: int) -> dict[str, Any]:
        text = " ".join(WORDS[(3 * site + i + k * (i % 4 + 1)) % len(WORDS)] for k in range(2 + (site + i) % 5))
        return {"text": text, "label": (i + i // 2) % 2}

    def options(self, **changes: Any) -> dict[str, Any]:
        """Return what a simulated and a deployed run have in common."""
        return {
            "num_clients": len(self.sizes), "participation": 1.0, "num_rounds": 2, "warmup_rounds": 0,
            "per_device_train_batch_size": 2, "eval_steps": 2, "learning_rate": 1e-2, "use_cpu": True, "cut": 1,
            "model_name_or_path": str(self.folder / "model"), "disable_tqdm": True,
        } | ({"max_length": 8} if self.task == "newsgroups" else {}) | changes  # fmt: skip

    def simulated(self, **changes: Any) -> SplitFedTrainer:
        """Return the trainer of the same run in one process, trained."""
        data = {"dataset_name": str(self.folder / "all"), "partition": "column", "partition_column": "site"}
        config = self.options(**data, output_dir=self.new_folder("simulated")) | changes
        options = read_run_config({"task": self.task, **config})
        trainer, _ = make_trainer(options.task(options.arguments, keep="site"), options.config)
        trainer.train()
        return trainer

    def new_folder(self, name: str) -> str:
        """Return a folder for the results of a run."""
        return str(self.folder / f"{name}-{next(_RUNS)}")

    def run_config(self, **changes: Any) -> dict[str, Any]:
        """Return Flower's run config."""
        ours = self.options(dataset_name=str(self.folder / "test"), output_dir=self.new_folder("deployed")) | changes
        return {"task": self.task, "min_clients": 1, "round_timeout": LONG, "start_timeout": LONG} | ours

    def make_half(self, cut: int = 1) -> None:
        """Write the clients' half, where it is not there."""
        if not (self.folder / "half").exists():
            ours = self.options(dataset_name=str(self.folder / "test"), cut=cut)
            names = (
                "model_name_or_path",
                "dataset_name",
                "cut",
                "max_length",
                "use_cpu",
                "load_in_8bit",
                "load_in_4bit",
            )
            argv = [part for name in names if name in ours for part in (f"--{name}", str(ours[name]))]
            assert coefsfl(["split", self.task, *argv, "--output_dir", str(self.folder / "half")]) == 0

    def node_config(self, client: int) -> dict[str, Any]:
        """Return the node config of a client."""
        folder = self.folder
        return {
            "partition-id": client,
            "dataset": str(folder / f"site{client}"),
            "client-half": str(folder / "half/client"),
        }

    def deployed(self, fault: Fault | None = None, **changes: Any) -> tuple[DeployedTrainer, LocalGrid]:
        """Return the trainer of the run over a grid, trained, and the grid."""
        self.make_half()
        config = self.run_config(**changes)
        grid = LocalGrid(config, [self.node_config(client) for client in range(len(self.sizes))], fault)
        return serve(grid, config), grid


class ImageSite(Site):
    """The same with images of noise."""

    task = "cifar100"

    def row(self, site: int, i: int) -> dict[str, Any]:
        pixels = np.random.default_rng([site, i]).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        return {"image": Image.fromarray(pixels), "label": i % 2}

    def save(self, rows: list[dict[str, Any]], path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        Dataset.from_dict(columns).cast_column("image", ImageFeature()).to_parquet(str(path))

    def make_model(self, folder: Path, dropout: float) -> None:
        config = ViTConfig(
            hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, image_size=8,
            patch_size=4, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        )  # fmt: skip
        ViTForImageClassification(config).save_pretrained(folder)
        ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(folder)


def identify() -> None:
    """Set what Flower's own processes do."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


@functools.cache
def client_process() -> ProcessPoolExecutor:
    """Return the process in which all clients of these tests live: apart from the server's."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, context, initializer=_start_clients, initargs=(tempfile.mkdtemp(),))


def _start_clients(folder: str) -> None:
    os.environ["HF_COEFSFL_WORK"] = folder
    torch.set_num_threads(1)
    identify()


def ask(kind: str, content: RecordDict, context: Context) -> Message:
    """Return the reply of the ClientApp, in this process."""
    identify()
    message = Message(content, 1, kind)
    message.metadata.__dict__["_message_id"] = "1"
    return client_app(message, context)


def _handle(kind: str, content: RecordDict, context: Context) -> RecordDict | Error:
    """Return what the ClientApp answers."""
    reply = ask(kind, content, context)
    return reply.error if reply.has_error() else reply.content


class LocalGrid(Grid):
    """A grid without a network: each message runs the ClientApp in another process, one at a time.

    `fault(node, message, reply)` may change what comes back: a message, several, None (it never comes), or what makes
    the message when it is pulled.
    """

    def __init__(self, run_config: dict[str, Any], node_configs: list[dict[str, Any]], fault: Fault | None = None):
        self.run_config, self.fault = run_config, fault
        client_process()  # before the threads ask for it, each of which would start one of its own
        identify()
        self.contexts = {
            100 + i: Context(next(_RUNS), 100 + i, config, RecordDict(), run_config)
            for i, config in enumerate(node_configs)
        }
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self.replies: dict[str, list[Any]] = {}
        self.gone: set[int] = set()
        self._numbers = itertools.count()

    def get_node_ids(self) -> list[int]:
        return [node for node in self.contexts if node not in self.gone]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        numbers = []
        for message in messages:
            number = f"m{next(self._numbers)}"
            message.metadata.__dict__["_message_id"] = number
            self.sent.append(message)
            threading.Thread(target=self._answer, args=(number, message), daemon=True).start()
            numbers.append(number)
        return numbers

    def _answer(self, number: str, message: Message) -> None:
        node = message.metadata.dst_node_id
        answer = self.ask(node, message.metadata.message_type, message.content)
        reply = Message(answer, reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = node
        self.received.append(copy.copy(reply))
        found = reply if self.fault is None else self.fault(node, message, reply)
        if found is not None:
            self.replies[number] = found if isinstance(found, list) else [found]

    def ask(self, node: int, kind: str, content: RecordDict) -> Any:
        """Return what the ClientApp of a node answers."""
        return client_process().submit(_handle, kind, content, self.contexts[node]).result()

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = [reply for number in message_ids for reply in self.replies.pop(number, [])]
        return [reply() if callable(reply) else reply for reply in replies]

    # What a Grid must have besides; the courier asks for none of it.

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, *args: Any, **kwargs: Any) -> list[Message]:
        raise NotImplementedError


_RUNS = itertools.count(1)
