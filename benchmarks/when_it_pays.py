"""Accuracy over seconds on several links, from the finished runs of a comparison: docs/when_it_pays.md.

    coefsfl compare recipes/compare/when_it_pays.yaml
    python benchmarks/when_it_pays.py outputs/compare/when_it_pays

Accuracies, bytes and transfers are those of the runs, round by round. The time of the bytes follows from the link,
that of computing from the operations of each method (`coefsfl cost`) and the speeds of the devices. The clients of a
round work at the same time, and a round lasts as long as its slowest client.
"""

import argparse
import json
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from hf_coefsfl.analysis.backbones import build_model
from hf_coefsfl.analysis.cost import Cost, CostModel, Round
from hf_coefsfl.analysis.plots import plot_lines
from hf_coefsfl.analysis.tables import format_table
from hf_coefsfl.analysis.timing import Devices, Network, RoundWork
from hf_coefsfl.methods import WARM_UP_METHOD, make_method

FLOWER = 3.2  # seconds of a message over Flower, docs/deployment.md: its nodes look for messages every 3 s
LINKS = {
    "10 Mbit/s, 50 ms": Network(10e6, 0.05),
    "100 Mbit/s, 20 ms": Network(100e6, 0.02),
    "data centre: 10 Gbit/s, 0.5 ms": Network(10e9, 0.0005),
    "10 Mbit/s over Flower": Network(10e6, 0.05 + FLOWER),
}


@cache
def cost_model(path: str, tokens: int) -> CostModel:
    return CostModel(build_model(path, 3, "sequence-classification"), sequence_length=tokens)


@cache
def cost_of(path: str, cut: int, batch_size: int, tokens: int, method: str, kwargs: str) -> Cost:
    """Return the cost of ten batches."""
    model, plan = cost_model(path, tokens), Round(10 * batch_size, batch_size)
    return model.costs(make_method(method, json.loads(kwargs)), cut, plan)[0]


class Timed:
    """The runs of one comparison with one model, and how long their rounds take."""

    def __init__(self, folder: Path, client_speed: float, server_speed: float):
        self.folder = folder
        self.devices = Devices(client_speed, server_speed)
        self.results = json.loads((folder / "results.json").read_text())
        self.runs: dict[str, Any] = self.results["runs"]

    def seed(self, run: str) -> int:
        return int(self.runs[run]["options"]["seed"])

    def curve(self, run: str, link: Network) -> list[tuple[float, float]]:
        """Return (seconds so far, score) for each evaluated round."""
        summary, options = self.runs[run], self.runs[run]["options"]
        entries = json.loads((self.folder / "runs" / run / "communication.json").read_text())["entries"]
        seconds, rounds = 0.0, {0: 0.0}
        for index in range(1, summary["num_rounds"] + 1):
            warm = index <= summary["warmup_rounds"]
            method = (WARM_UP_METHOD, {}) if warm else (summary["method"], summary["method_kwargs"] or {})
            clients = [entry for entry in entries if entry["round"] == index]
            seconds += max(self.seconds(entry, link, options, *method) for entry in clients)
            rounds[index] = seconds
        return [(rounds[point["round"]], next(iter(point["scores"].values()))) for point in summary["curve"]]

    def seconds(self, entry: dict[str, Any], link: Network, options: dict[str, Any], method: str, kwargs: Any) -> float:
        num_bytes = sum(entry["up"].values()) + sum(entry["down"].values())
        batch_size = options["per_device_train_batch_size"]
        samples, tokens = samples_and_tokens(entry, options)
        cost = cost_of(options["model_name_or_path"], options["cut"], batch_size, tokens, method, json.dumps(kwargs))
        scale = samples / cost.num_samples
        work = cost.work
        scaled = RoundWork(*(round(scale * part) for part in vars(work).values()))
        return link.seconds(num_bytes, entry["transfers"]) + self.devices.seconds(scaled)


def samples_and_tokens(entry: dict[str, Any], options: dict[str, Any]) -> tuple[float, int]:
    """Return how many samples a client had and their mean length, both from what it sent."""
    hidden = json.loads(Path(options["model_name_or_path"], "config.json").read_text())["hidden_size"]
    samples = ROWS / options["num_clients"]
    return samples, max(2, round(entry["up"]["smashed_data"] / (4 * hidden * samples)))


ROWS = 4439  # of SICK's training set


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder of the comparison")
    parser.add_argument("--picture", type=Path, help="file to draw (PNG or SVG)")
    parser.add_argument("--client_speed", type=float, default=50e9, help="operations a second (default: 50 GFLOPS)")
    parser.add_argument("--server_speed", type=float, default=5e12, help="for one client (default: 5 TFLOPS)")
    arguments = parser.parse_args()
    timed = Timed(arguments.folder, arguments.client_speed, arguments.server_speed)
    settings = [setting for setting in timed.results["settings"] if setting["runs"]]
    seeds = set.intersection(*({timed.seed(run) for run in setting["runs"]} for setting in settings))
    for setting in settings:  # the same seeds of all, if some have more already
        setting["runs"] = [run for run in setting["runs"] if timed.seed(run) in seeds]
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for setting in settings:
        of_runs = [timed.runs[run] for run in setting["runs"]]
        score = mean(next(iter(run["scores"].values())) for run in of_runs)
        rows[setting["name"]] = {
            "method": setting["name"], "seeds": len(of_runs), "accuracy, %": f"{score:.1f}",
            "MiB": f"{mean(run['mib'] for run in of_runs):.1f}",
            "transfers": f"{mean(run['transfers'] for run in of_runs):.0f}",
        }  # fmt: skip
    for name, link in LINKS.items():
        panels[name] = {}
        for setting in settings:
            curves = [timed.curve(run, link) for run in setting["runs"]]
            points = [(mean(x for x, _ in point), mean(y for _, y in point)) for point in zip(*curves, strict=True)]
            panels[name][setting["name"]] = points
            rows[setting["name"]][name] = f"{points[-1][0]:,.0f} s"
    print(format_table(list(rows.values()), markdown=True))
    if arguments.picture is not None:
        labelled = {f"accuracy, %\n({name})": lines for name, lines in panels.items()}
        plot_lines(labelled, arguments.picture, xlabel="seconds")


if __name__ == "__main__":
    main()
