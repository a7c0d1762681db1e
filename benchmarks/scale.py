"""Measures how a round and the set-up of a run grow with clients, samples, tokens, the cut and rows.

python benchmarks/scale.py

Seconds are processor time on one thread, so that other programs do not count. Of three rounds the fastest counts.
Memory is the peak of the bytes of live tensors in a round, beside the model, and the peak of what Python allocates in
it (tracemalloc).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from transformers import BertConfig, BertForSequenceClassification
from transformers.utils import logging

from hf_coefsfl import SplitFedConfig, SplitFedTrainer
from hf_coefsfl.analysis.memory import LiveMemory, existing_tensors
from hf_coefsfl.analysis.tables import MIB, format_table

CLASSES, LAYERS, VOCABULARY = 10, 6, 1000
SAMPLED = 2  # clients of a round
BASE = {"clients": 10, "samples": 16, "tokens": 32, "cut": 2}
VARIED: dict[str, tuple[int, ...]] = {
    "clients": (10, 1_000, 10_000),
    "samples": (16, 32, 64),
    "tokens": (32, 64, 128),
    "cut": (1, 3, 5),
}
ROWS, CLIENTS = 100_000, 10_000


def model() -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 256}
    return BertForSequenceClassification(BertConfig(vocab_size=VOCABULARY, **sizes, num_labels=CLASSES))


def texts(rows: int, tokens: int) -> Dataset:
    rng = np.random.default_rng(0)
    ids = rng.integers(5, VOCABULARY, (rows, tokens))
    data = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": rng.integers(0, CLASSES, rows)}
    return Dataset.from_dict(data).with_format("torch")


def make_trainer(
    folder: str, data: Any, clients: int | None, cut: int = BASE["cut"], **changes: Any
) -> SplitFedTrainer:
    args = SplitFedConfig(
        folder, method="coef_j", cut=cut, num_clients=clients, participation=SAMPLED / (clients or len(data)),
        num_rounds=1, warmup_rounds=0, per_device_train_batch_size=8, save_strategy="no", logging_strategy="no",
        disable_tqdm=True, use_cpu=True, **changes,
    )  # fmt: skip
    return SplitFedTrainer(model=model(), args=args, train_dataset=data)


def of_a_round(clients: int, samples: int, tokens: int, cut: int) -> dict[str, Any]:
    """Seconds and peaks of memory of one round."""
    data = texts(clients * samples, tokens)
    with tempfile.TemporaryDirectory() as folder:
        run = make_trainer(folder, data, clients, cut)
        simulation = run.rounds
        assert simulation is not None
        seconds = []
        for index in range(3):
            start = time.process_time()
            simulation.run_round(index, 1e-3)
            seconds.append(time.process_time() - start)
        with LiveMemory(existing_tensors(run.split)) as live:
            simulation.run_round(0, 1e-3)
        tracemalloc.start()
        simulation.run_round(0, 1e-3)
        python = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    peak = max(total for total, *_ in live.history)
    return {"seconds": min(seconds), "tensors, MiB": peak / MIB, "Python, MiB": python / MIB}


def of_a_set_up(kind: str) -> dict[str, Any]:
    """Seconds from the dataset to the first round, and of this round."""
    if kind == "list of client datasets":
        whole, each = texts(ROWS, 8), ROWS // CLIENTS
        data = [whole.select(range(start, start + each)) for start in range(0, ROWS, each)]
        settings = {"clients": None}
    else:
        data = texts(ROWS, 8)
        settings = {"clients": CLIENTS, "partition": kind, "dirichlet_alpha": 10.0}
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        run = make_trainer(folder, data, **settings)
        ready = time.process_time()
        run.train()
        done = time.process_time()
    return {"rows": ROWS, "clients": CLIENTS, "data": kind, "set-up, s": ready - start, "train(), s": done - ready}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    disable_progress_bar()
    rounds, done = [], {}
    of_a_round(**BASE)  # what is done once is not measured
    for name, values in VARIED.items():
        for value in values:
            case = BASE | {name: value}
            key = tuple(case.values())
            if key not in done:
                done[key] = of_a_round(**case)
            rounds.append({"varied": name, **case, **done[key]})
            print(rounds[-1], file=sys.stderr)
    set_ups = [of_a_set_up(kind) for kind in ("iid", "dirichlet", "list of client datasets")]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"rounds": rounds, "set-ups": set_ups}, indent=1) + "\n")
    shown = {"varied": ""} | dict.fromkeys(BASE, ",") | {"seconds": ".2f", "tensors, MiB": ".1f", "Python, MiB": ".1f"}
    print(format_table(rounds, shown))
    print(f"\n{SAMPLED} clients a round, {LAYERS} blocks; samples are those of each client, tokens of each sample.\n")
    print(format_table(set_ups, {"rows": ",", "clients": ",", "data": "", "set-up, s": ".1f", "train(), s": ".1f"}))


if __name__ == "__main__":
    main()
