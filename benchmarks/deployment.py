"""Measures bytes and seconds of a run over Flower, against the ledger and the simulation, also over a slow link.

python benchmarks/deployment.py [--task mnli] [--links none 10 100] [--delay 50] [--rows 48] [--methods vanilla ...]

A method may have a codec of the exchange behind a colon: coef_w:compact, or JSON as in
'coef_w:{"smashed_data": "int4", "gradients": "int8"}'. Its adapters are then sent by `--adapter-codec`.

The script runs a real SuperLink and two real SuperNodes on this machine. Each SuperNode reaches the SuperLink through
a TCP proxy of its own (slow_link.py), which counts every byte and can be slow: `--links` Mbit/s pass in each direction,
and each byte arrives `--delay` ms later. "none" is a link without a limit. HTTP headers and Flower's polling count, and
there is no TLS. Seconds are wall-clock time.

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
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets.utils.logging import disable_progress_bar
from deployed_site import CLIENTS, TASKS, Site
from loopback import ROOT, Loopback
from slow_link import Proxy
from transformers.utils import logging

from hf_coefsfl.analysis.tables import MIB, format_table
from hf_coefsfl.protocol.adapters import ADAPTER_CODECS

IDLE = 20  # seconds for which nodes without work are watched
UNLIMITED = "no limit"
METHODS = ["vanilla", "coef_j", "coef_w:int4", "coef_w:compact"]


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


def speed_row(run: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a round takes, and how often that fits into the first method's on the same link."""
    rounds = len(run["rounds"])
    first = next(other for other in runs if other["link"] == run["link"])
    return {
        "method": run["method"],
        "link": run["link"],
        "messages": run["messages"],
        "up, MiB": run["wire"][0] / rounds / MIB,
        "down, MiB": run["wire"][1] / rounds / MIB,
        "server, s": run["server"],
        "client, s": run["client"],
        "between, s": run["between"],
        "round, s": run["seconds"],
        "times as fast": first["seconds"] / run["seconds"],
    }


def report(options: argparse.Namespace, runs: list[dict[str, Any]], simulated: dict[str, Any], idle: float) -> None:
    """Print the tables."""
    firsts = {method: next(run for run in runs if run["method"] == method) for method in options.methods}
    print(
        f"{options.task}: {CLIENTS} clients of {options.rows} rows, batches of {options.batch_size}, rounds: "
        f"{options.rounds}. Adapters of methods with a codec: {options.adapter_codec}. Chunks: {options.chunk_size}."
    )
    print("Flower's own time and bytes for each message are in all that follows.\n")
    print("Bytes on the wire against the ledger: all, by direction, and as far as they are payload or polling.")
    print(f"A node without work moves {idle:.0f} bytes/s: its polling. Retries: of requests, by Flower.")
    columns = {"method": "", "link": "", "ledger, MiB": ".2f", "wire, MiB": ".2f"}
    shares = ("wire/ledger", "up", "down", "payload/ledger", "polling/ledger", "whole run")
    print(format_table([wire_row(run, idle) for run in runs], columns | dict.fromkeys(shares, ".4f") | {"retries": ""}))
    if simulated:
        link = runs[0]["link"]
        print(f"\nSeconds of a round ({link}), against the same run in one process. Messages: per client and round.")
        columns = {"method": "", "simulation, s/round": ".2f", "Flower, s/round": ".2f", "ratio": ".1f"}
        columns |= {"messages": ".1f", "beyond it, s/message": ".2f", "same ledger": ""}
        print(format_table([time_row(run, simulated[method]) for method, run in firsts.items()], columns))
    for method, run in firsts.items():
        print(f"\n{method}: requests of a message, and their bytes beside the payload. Pulls include polling.")
        print(format_table(request_rows(run), {"request": "", "number": ".2f", "up": ".0f", "down": ".0f"}))
    print(f"\nSeconds of a round; slow links delay by {options.delay:g} ms each way. Bytes: on the wire, of all.")
    print(
        "Server: its computing for all clients, in turn. Client: that of one; both overlap in part. Between: all else"
    )
    print(f"in a client's messages (bytes, requests, looks, loading). Times as fast: as {options.methods[0]}.")
    columns = {"method": "", "link": "", "messages": ".1f", "up, MiB": ".2f", "down, MiB": ".2f"}
    seconds = ("server, s", "client, s", "between, s", "round, s", "times as fast")
    print(format_table([speed_row(run, runs) for run in runs], columns | dict.fromkeys(seconds, ".1f")))


# ---- The runs ----


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="mnli", help="mnli: SICK, a RoBERTa; cifar100: a small ViT")
    parser.add_argument(
        "--links", nargs="+", default=["none", "10", "100"], help="Mbit/s each way of each client; none: no limit"
    )
    parser.add_argument("--delay", type=float, default=50.0, help="ms by which a slow link delays, each way")
    parser.add_argument("--rows", type=int, default=48, help="of each client")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--methods", nargs="+", default=METHODS, help="METHOD or METHOD:CODEC")
    parser.add_argument(
        "--adapter-codec", choices=ADAPTER_CODECS, default="int8", help="of the adapters, for METHOD:CODEC"
    )
    parser.add_argument("--chunk-size", default="16MiB", help="largest part of a payload in one message")
    parser.add_argument("--model", type=Path, help="default: beside the clone, in shared/models")
    parser.add_argument("--data", type=Path, help="train.parquet and test.parquet; default: in shared/data")
    parser.add_argument("--no-simulation", action="store_true", help="do not run it in one process, too")
    parser.add_argument("--cold", action="store_true", help="use flower-supernode, which starts a process per message")
    parser.add_argument("--keep", type=Path, help="keep logs and results in this folder")
    parser.add_argument("--json", type=Path, help="write the figures here after each run, too")
    options = parser.parse_args()
    model, data = TASKS[options.task]
    shared = ROOT.parent / "shared"
    options.model = (options.model or shared / "models" / model).resolve()
    options.data = (options.data or shared / "data" / data).resolve()
    for needed in (options.model / "config.json", options.data / "train.parquet", options.data / "test.parquet"):
        if not needed.exists():
            parser.error(f"{needed} is not there. Name others with --model and --data (columns as in {data}).")
    links: dict[str, tuple[float, ...]] = {}
    for link in options.links:
        try:
            limits = () if link == "none" else (float(link) * 1e6 / 8, options.delay / 1000)
        except ValueError:
            parser.error(f"--links {link}: give Mbit/s, or none for no limit.")
        links[f"{link} Mbit/s" if limits else UNLIMITED] = limits
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep.resolve() if options.keep else Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        measure(folder, options, links)


def measure(folder: Path, options: argparse.Namespace, links: dict[str, tuple[float, ...]]) -> None:
    with contextlib.redirect_stdout(sys.stderr):
        site = Site(folder, options)
        simulated = {} if options.no_simulation else {method: site.simulate(method) for method in options.methods}
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
    report(options, runs, simulated, seen / IDLE / CLIENTS)


if __name__ == "__main__":
    main()
