"""Measures bytes and seconds of a run over Flower, against the ledger and the simulation, also over a slow link.

python benchmarks/deployment.py [--rates 10 100] [--delay 50] [--rows 48] [--rounds 2] [--methods vanilla coef_j ...]

A method may have a codec of the exchange behind a colon: coef_p:compact, or JSON as in
'coef_p:{"smashed_data": "int3", "gradients": "topk8"}'.

The script runs a real SuperLink and two real SuperNodes on this machine. Each SuperNode reaches the SuperLink through
a TCP proxy of its own (slow_link.py), which counts every byte and can be slow: `--rates` Mbit/s pass in each direction,
and each byte arrives `--delay` ms later. HTTP headers and Flower's polling count, and there is no TLS. Seconds are
wall-clock time.

Wire bytes are counted from the beginning of the first round to the end of the last. The start of a run (sending the
app, introductions) is not part of the ledger. The column "whole run" includes it, and everything else before and after
the rounds. Payload bytes are what hf_coefsfl gives to Flower: the ledger's tensors and the files that hold them.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from datasets.utils.logging import disable_progress_bar
from loopback import APP, ROOT, Loopback
from slow_link import Proxy
from transformers.utils import logging

from hf_coefsfl.analysis.tables import MIB, format_table
from hf_coefsfl.cli import main as coefsfl
from hf_coefsfl.flower.options import read_run_config
from hf_coefsfl.tasks.run import make_trainer

CLIENTS, CUT, TEST_ROWS = 2, 2, 32
IDLE = 20  # seconds for which nodes without work are watched
UNLIMITED = "no limit"
METHODS = ["vanilla", "coef_j", "coef_p:compact", 'coef_p:{"smashed_data": "int3", "gradients": "topk8"}']
ROUNDS = "rounds.jsonl"
# The app of recipes/flower, which also writes down when each round began and ended, and what its messages held.
SERVER_APP = f"""
import json
import time
from pathlib import Path

from hf_coefsfl.flower import server_app as app
from hf_coefsfl.flower.transport import Courier
from hf_coefsfl.flower.deployment import Deployment
from hf_coefsfl.flower.wire import content

ask, run_round, asked = Courier.ask, Deployment.run_round, []


def payload(records):
    return sum(len(value) for value in records["header"].values() if isinstance(value, bytes))


def counted(self, node, kind, header, chunk, deadline):
    reply = ask(self, node, kind, header, chunk, deadline)
    asked.append([kind, payload(reply), payload(content({{}}, chunk))])
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


# ---- A run ----


class Site:
    """The data of the clients, the halves of the model, and the options of a run."""

    def __init__(self, folder: Path, options: argparse.Namespace):
        self.folder = folder
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
            "task": "mnli", "model_name_or_path": str(options.model), "eval_split": "test", "cut": CUT,
            "use_cpu": True, "disable_tqdm": True, "num_clients": CLIENTS, "participation": 1.0,
            "num_rounds": options.rounds, "warmup_rounds": 0, "eval_steps": options.rounds, "learning_rate": 1e-3,
            "per_device_train_batch_size": options.batch_size,
        }  # fmt: skip
        argv = ["--model_name_or_path", str(options.model), "--dataset_name", str(folder / "server")]
        argv += ["--eval_split", "test", "--cut", str(CUT), "--use_cpu", "true", "--output_dir", str(folder / "half")]
        if coefsfl(["split", "mnli", *argv]) != 0:
            raise RuntimeError("the model could not be split")
        self.app = folder / "app"
        shutil.copytree(APP, self.app, ignore=shutil.ignore_patterns("__pycache__"))
        (self.app / "server_app.py").write_text(SERVER_APP)

    def node_config(self, client: int) -> dict[str, Any]:
        half = str(self.folder / "half" / "client")
        return {"partition-id": client, "dataset": str(self.folder / f"client{client}"), "client-half": half}

    def simulate(self, method: str) -> dict[str, Any]:
        """Run all in this process; return its seconds per round and its ledger."""
        data = {"dataset_name": str(self.folder / "all"), "partition": "column", "partition_column": "client"}
        place = asked_for(method) | {"output_dir": str(self.folder / f"{plain(method)}-simulated")}
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
        place = asked_for(method) | {"dataset_name": str(self.folder / "server"), "output_dir": str(output)}
        before, begin = retries(flower), time.time()
        said = flower.run(self.common | place | {"min_clients": CLIENTS}, timeout=3600, app=self.app)
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
            "payload": [sum(up for _, up, _ in messages), sum(down for _, _, down in messages)],
            "wire": [sum(getattr(p, way).count(first, last) for p in proxies) for way in ("up", "down")],
            "requests": added([p.requests(first, last) for p in proxies]),
            "whole run": sum(lane.count(begin, end) for p in proxies for lane in (p.up, p.down)),
            "retries": retries(flower) - before,
            "watched": last - first,
            "rounds": [each["end"] - each["start"] for each in rounds],
            "seconds": sum(each["end"] - each["start"] for each in rounds) / len(rounds),
            "computing": (server + client / CLIENTS) / len(rounds),  # clients work at once, the server in turn
            "messages": len(messages) / len(rounds) / CLIENTS,
            "exchanges": ledger["total"]["transfers"] / len(rounds) / CLIENTS,
        }


def asked_for(method: str) -> dict[str, str]:
    """Return the options of METHOD or METHOD:CODEC."""
    name, _, codec = method.partition(":")
    return {"method": name} | ({"exchange_codec": codec} if codec else {})


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


# ---- Tables ----


def wire_row(run: dict[str, Any], idle: float) -> dict[str, Any]:
    ledger, wire = sum(run["ledger"]), sum(run["wire"])
    return {
        "method": run["method"],
        "link": run["link"],
        "ledger, MiB": ledger / MIB,
        "wire, MiB": wire / MIB,
        "wire/ledger": wire / ledger,
        "up": run["wire"][0] / run["ledger"][0],
        "down": run["wire"][1] / run["ledger"][1],
        "payload/ledger": sum(run["payload"]) / ledger,
        "polling/ledger": idle * CLIENTS * run["watched"] / ledger,
        "whole run": run["whole run"] / ledger,
        "retries": run["retries"],
    }


def time_row(run: dict[str, Any], simulated: dict[str, Any]) -> dict[str, Any]:
    return {
        "method": run["method"],
        "simulation, s/round": simulated["seconds"],
        "Flower, s/round": run["seconds"],
        "ratio": run["seconds"] / simulated["seconds"],
        "messages": run["messages"],
        "beyond it, s/message": (run["seconds"] - simulated["seconds"]) / run["messages"],
        "same ledger": "yes" if run["ledger"] == simulated["ledger"] else "no",
    }


def request_rows(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a message costs beside its payload, by request."""
    messages = run["messages"] * len(run["rounds"]) * CLIENTS
    rows = []
    for name, (number, up, down) in sorted(run["requests"].items()):
        up -= run["payload"][0] if name == "push-object" else 0
        down -= run["payload"][1] if name == "pull-object" else 0
        rows.append({"request": name, "number": number / messages, "up": up / messages, "down": down / messages})
    total = {column: sum(row[column] for row in rows) for column in ("number", "up", "down")}
    return [*rows, {"request": "all", **total}]


def speed_row(method: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the seconds of a method's round on each link, and its bytes on the wire without a limit."""
    mine = [run for run in runs if run["method"] == method]
    free = next(run for run in mine if run["link"] == UNLIMITED)
    rounds = len(free["rounds"])
    return {
        "method": method,
        "messages": free["messages"],
        "up, MiB": free["wire"][0] / rounds / MIB,
        "down, MiB": free["wire"][1] / rounds / MIB,
        "computing, s": free["computing"],
        **{f"{run['link']}, s": run["seconds"] for run in mine},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rates", type=float, nargs="*", default=[10.0, 100.0], help="Mbit/s of the links, each way, of each client"
    )
    parser.add_argument("--delay", type=float, default=50.0, help="ms by which it delays, each way")
    parser.add_argument("--rows", type=int, default=48, help="of each client")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--methods", nargs="+", default=METHODS, help="METHOD or METHOD:CODEC")
    parser.add_argument("--model", type=Path, default=ROOT.parent / "shared" / "models" / "granite-30m-roberta")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "sick_nli")
    parser.add_argument("--cold", action="store_true", help="use flower-supernode, which starts a process per message")
    parser.add_argument("--keep", type=Path, help="keep logs and results in this folder")
    parser.add_argument("--json", type=Path, help="write the figures here after each run, too")
    options = parser.parse_args()
    options.model, options.data = options.model.resolve(), options.data.resolve()
    for needed in (options.model / "config.json", options.data / "train.parquet", options.data / "test.parquet"):
        if not needed.exists():
            parser.error(f"{needed} is not there. Name others with --model and --data (premise, hypothesis, label).")
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep.resolve() if options.keep else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        measure(folder, options)


def measure(folder: Path, options: argparse.Namespace) -> None:
    links: dict[str, tuple[float, ...]] = {UNLIMITED: ()}
    links |= {f"{rate:g} Mbit/s": (rate * 1e6 / 8, options.delay / 1000) for rate in options.rates}
    with contextlib.redirect_stdout(sys.stderr):
        site = Site(folder, options)
        simulated = {method: site.simulate(method) for method in options.methods}
    runs: list[dict[str, Any]] = []
    flower = Loopback(folder, warm=not options.cold)
    proxies = [Proxy(flower.port) for _ in range(CLIENTS)]
    try:
        with flower:
            for client, proxy in enumerate(proxies):
                flower.start_node(site.node_config(client), port=proxy.port)
            for link, limits in links.items():
                for proxy in proxies:
                    proxy.limit(*limits)
                for method in options.methods:
                    runs.append(site.deploy(flower, proxies, method, link))
                    if options.json is not None:
                        options.json.write_text(json.dumps({"simulated": simulated, "runs": runs}, indent=1) + "\n")
                    print(f"{method}, {link}: {runs[-1]['seconds']:.1f} s/round", file=sys.stderr, flush=True)
            start = time.time()
            time.sleep(IDLE)
            seen = sum(lane.count(start, start + IDLE) for p in proxies for lane in (p.up, p.down))
    finally:
        for proxy in proxies:
            proxy.close()
    idle = seen / IDLE / CLIENTS
    free = {run["method"]: run for run in runs if run["link"] == UNLIMITED}
    wire = [wire_row(run, idle) for run in runs]
    times = [time_row(free[m], simulated[m]) for m in options.methods]
    speeds = [speed_row(method, runs) for method in options.methods]
    print(f"{CLIENTS} clients of {options.rows} rows, batches of {options.batch_size}, {options.rounds} rounds.")
    print("Flower's own time and bytes for each message are in all that follows.\n")
    print("Bytes on the wire against the ledger: all, by direction, and as far as they are payload or polling.")
    print(f"A node without work moves {idle:.0f} bytes/s: its polling. Retries: of requests, by Flower.")
    columns = {"method": "", "link": "", "ledger, MiB": ".2f", "wire, MiB": ".2f", "wire/ledger": ".4f", "up": ".4f"}
    print(
        format_table(
            wire,
            columns | dict.fromkeys(("down", "payload/ledger", "polling/ledger", "whole run"), ".4f") | {"retries": ""},
        )
    )
    print("\nSeconds of a round without a limit, against the same run in one process. Messages: per client and round.")
    columns = {"method": "", "simulation, s/round": ".2f", "Flower, s/round": ".2f", "ratio": ".1f", "messages": ".1f"}
    print(format_table(times, columns | {"beyond it, s/message": ".2f", "same ledger": ""}))
    for method in options.methods:
        print(f"\n{method}: requests of a message, and their bytes beside the payload. Pulls include polling.")
        print(format_table(request_rows(free[method]), {"request": "", "number": ".2f", "up": ".0f", "down": ".0f"}))
    print(
        f"\nSeconds of a round; slow links delay by {options.delay:g} ms each way. Bytes: on the wire, of all clients."
    )
    print("Messages: of a client. Computing: of the server for all clients, and of one client; they overlap in part.")
    columns = {"method": "", "messages": ".1f", "up, MiB": ".2f", "down, MiB": ".2f", "computing, s": ".1f"}
    print(format_table(speeds, columns | {f"{link}, s": ".1f" for link in links}))


if __name__ == "__main__":
    main()
