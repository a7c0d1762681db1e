"""The clients' data, the halves of a model and the runs of benchmarks/deployment.py, in one process and over Flower."""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from loopback import APP, Loopback
from slow_link import Proxy

from hf_coefsfl.cli import main as coefsfl
from hf_coefsfl.flower.options import read_run_config
from hf_coefsfl.tasks.run import make_trainer

CLIENTS, CUT, TEST_ROWS = 2, 2, 32
TASKS = {"mnli": ("granite-30m-roberta", "sick_nli"), "cifar100": ("vit-micro", "cifar100_small")}  # model, data
ROUNDS = "rounds.jsonl"
# The app of recipes/flower, which also writes down when each round and each message began and ended, and what they
# held.
SERVER_APP = f"""
import json
import time
from pathlib import Path

from hf_coefsfl.flower import server_app as app
from hf_coefsfl.flower.transport import Courier
from hf_coefsfl.flower.deployment import Deployment
from hf_coefsfl.flower.wire import content, header_of

ask, run_round, asked = Courier.ask, Deployment.run_round, []


def payload(records):
    return sum(len(value) for value in records["header"].values() if isinstance(value, bytes))


def counted(self, node, kind, header, chunk, deadline):
    start = time.time()
    reply = ask(self, node, kind, header, chunk, deadline)
    told = dict(kind=kind, client=header.get("client"), start=start, end=time.time())
    told |= dict(up=payload(reply), down=payload(content({{}}, chunk)), seconds=header_of(reply).get("seconds"))
    asked.append(told)
    return reply


def timed(self, *args, **kwargs):
    asked.clear()
    start = time.time()
    reports = run_round(self, *args, **kwargs)
    told = dict(start=start, end=time.time(), messages=asked)
    with (Path(self.args.output_dir) / "{ROUNDS}").open("a") as file:
        print(json.dumps(told), file=file)
    return reports


Courier.ask, Deployment.run_round = counted, timed
__all__ = ["app"]
"""


class Site:
    """The data of the clients, the halves of the model, and the options of a run."""

    def __init__(self, folder: Path, options: argparse.Namespace):
        self.folder, self.adapter_codec, self.chunk_size = folder, options.adapter_codec, options.chunk_size
        rows = load_dataset("parquet", data_files=str(options.data / "train.parquet"), split="train")
        rows = rows.shuffle(seed=0).select(range(CLIENTS * options.rows))
        parts = [rows.select(range(c, len(rows), CLIENTS)) for c in range(CLIENTS)]
        for client, part in enumerate(parts):
            part.to_parquet(str(folder / f"client{client}" / "train.parquet"))
        everyone = [row | {"client": client} for client, part in enumerate(parts) for row in part]
        Dataset.from_list(everyone).to_parquet(str(folder / "all" / "train.parquet"))
        test = load_dataset("parquet", data_files=str(options.data / "test.parquet"), split="train")
        for place in ("all", "server"):
            test.select(range(TEST_ROWS)).to_parquet(str(folder / place / "test.parquet"))
        self.common: dict[str, Any] = {
            "task": options.task, "model_name_or_path": str(options.model), "eval_split": "test", "cut": CUT,
            "use_cpu": True, "disable_tqdm": True, "num_clients": CLIENTS, "participation": 1.0,
            "num_rounds": options.rounds, "warmup_rounds": 0, "eval_steps": options.rounds, "learning_rate": 1e-3,
            "per_device_train_batch_size": options.batch_size,
        }  # fmt: skip
        argv = ["--model_name_or_path", str(options.model), "--dataset_name", str(folder / "server")]
        argv += ["--eval_split", "test", "--cut", str(CUT), "--use_cpu", "true", "--output_dir", str(folder / "half")]
        if coefsfl(["split", options.task, *argv]) != 0:
            raise RuntimeError("the model could not be split")
        self.app = folder / "app"
        shutil.copytree(APP, self.app, ignore=shutil.ignore_patterns("__pycache__"))
        (self.app / "server_app.py").write_text(SERVER_APP)

    def node_config(self, client: int) -> dict[str, Any]:
        half = str(self.folder / "half" / "client")
        return {"partition-id": client, "dataset": str(self.folder / f"client{client}"), "client-half": half}

    def asked_for(self, method: str) -> dict[str, str]:
        """Return the options of METHOD or METHOD:CODEC. What has a codec has the adapters' codec, too."""
        name, _, codec = method.partition(":")
        return {"method": name} | ({"exchange_codec": codec, "adapter_codec": self.adapter_codec} if codec else {})

    def simulate(self, method: str) -> dict[str, Any]:
        """Run all in this process; return its seconds per round and its ledger."""
        data = {"dataset_name": str(self.folder / "all"), "partition": "column", "partition_column": "client"}
        place = self.asked_for(method) | {"output_dir": str(self.folder / f"{plain(method)}-simulated")}
        options = read_run_config(self.common | data | place)
        trainer, _ = make_trainer(options.task(options.arguments, keep="client"), options.config)
        run_round, seconds = trainer.rounds.run_round, []

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.time()
            reports = run_round(*args, **kwargs)
            seconds.append(time.time() - start)
            return reports

        trainer.rounds.run_round = timed
        trainer.train()
        total = trainer.ledger.total
        return {"seconds": sum(seconds) / len(seconds), "ledger": [sum(total.up.values()), sum(total.down.values())]}

    def deploy(self, flower: Loopback, proxies: list[Proxy], method: str, link: str) -> dict[str, Any]:
        """Run over Flower; return what it took."""
        output = self.folder / f"{plain(method)}-{plain(link)}"
        place = self.asked_for(method) | {"dataset_name": str(self.folder / "server"), "output_dir": str(output)}
        before, begin = retries(flower), time.time()
        deployed = {"min_clients": CLIENTS, "chunk_size": self.chunk_size}
        said = flower.run(self.common | place | deployed, timeout=3600, app=self.app)
        end = time.time()
        if not (output / "communication.json").exists():
            raise RuntimeError(f"{method}, {link}: the run failed.\n{said}")
        ledger = json.loads((output / "communication.json").read_text())
        failures = [entry for entry in ledger["entries"] if "failure" in entry]
        if failures:
            raise RuntimeError(f"{method}, {link}: clients failed: {failures}")
        history = json.loads((output / "trainer_state.json").read_text())["log_history"]
        client, server = (sum(entry.get(f"{side}_seconds", 0.0) for entry in history) for side in ("client", "server"))
        rounds = [json.loads(line) for line in (output / ROUNDS).read_text().splitlines()]
        first, last = rounds[0]["start"], rounds[-1]["end"]
        messages = [message for each in rounds for message in each["messages"]]
        return {
            "method": method,
            "link": link,
            "ledger": [sum(ledger["total"][way].values()) for way in ("up", "down")],
            "payload": [sum(message[way] for message in messages) for way in ("up", "down")],
            "wire": [sum(getattr(p, way).count(first, last) for p in proxies) for way in ("up", "down")],
            "requests": added([p.requests(first, last) for p in proxies]),
            "whole run": sum(lane.count(begin, end) for p in proxies for lane in (p.up, p.down)),
            "retries": retries(flower) - before,
            "watched": last - first,
            "rounds": [each["end"] - each["start"] for each in rounds],
            "seconds": sum(each["end"] - each["start"] for each in rounds) / len(rounds),
            "server": server / len(rounds),  # for all clients, one after the other
            "client": client / len(rounds) / CLIENTS,  # of one: they work at once
            # Of a client's messages, less its computing: bytes, requests, looks, and what its process loads.
            "between": sum(m["end"] - m["start"] - (m["seconds"] or 0.0) for m in messages) / len(rounds) / CLIENTS,
            "messages": len(messages) / len(rounds) / CLIENTS,
            "exchanges": ledger["total"]["transfers"] / len(rounds) / CLIENTS,
        }


def plain(text: str) -> str:
    """Return a text as a part of a file's name."""
    return "".join(letter if letter.isalnum() else "_" for letter in text)


def added(counts: list[dict[str, list[int]]]) -> dict[str, list[int]]:
    """Return the sums of what the proxies have counted."""
    total: dict[str, list[int]] = {}
    for each in counts:
        for name, numbers in each.items():
            total[name] = [a + b for a, b in zip(total.get(name, [0, 0, 0]), numbers, strict=True)]
    return total


def retries(flower: Loopback) -> int:
    """Return how often nodes say that they had to send a request again."""
    return sum(flower.log(f"node{c}").count("Connection attempt failed") for c in range(CLIENTS))
