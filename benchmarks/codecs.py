"""Measures the codecs of what crosses the cut: bits, errors on real batches, and their share of a round's time.

python benchmarks/codecs.py [--rounds 5] [--shared ../shared] [--json codecs.json]

The first table has the bits of a value and the error ‖decoded − t‖ / ‖t‖ over the tensors of one client's round of
CoeF-J after a round of warm-up: SICK with a 30M-parameter RoBERTa, and a part of CIFAR-100 with a ViT of 128 features,
both cut after block 2, batches of 4. "zstd" is how much smaller Zstandard (level 3) would make the encoded values.

The second table has the processor time in encode and decode, of both sides, as a share of one client's round: ViT-Tiny
and a RoBERTa of 6 blocks and 384 features, as in speed.py, on one thread. The median of some rounds counts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import pyarrow
import torch
from speed import keep_memory, make_trainer  # beside this script; sets the number of OpenMP threads
from torch import Tensor
from transformers.utils import logging

from hf_coefsfl.analysis.tables import format_table
from hf_coefsfl.flower.options import read_run_config
from hf_coefsfl.protocol.codecs import CODECS, KINDS, Codec
from hf_coefsfl.tasks.run import make_trainer as make_task_trainer

SHARED = Path(__file__).resolve().parents[2] / "shared"
RUNS: dict[str, dict[str, Any]] = {
    "text": {"task": "mnli", "model_name_or_path": "models/granite-30m-roberta", "dataset_name": "data/sick_nli"},
    "image": {"task": "cifar100", "model_name_or_path": "models/vit-micro", "dataset_name": "data/cifar100_small"},
}
SETTING: dict[str, Any] = {
    "method": "coef_j", "cut": 2, "num_clients": 50, "participation": 0.02, "num_rounds": 2, "warmup_rounds": 1,
    "per_device_train_batch_size": 4, "learning_rate": 1e-3, "max_train_samples": 2400, "max_eval_samples": 20,
    "eval_strategy": "no", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True,
}  # fmt: skip


class Noting(Codec):
    """Keeps what is encoded."""

    def __init__(self) -> None:
        self.noted: list[Tensor] = []

    def encode(self, values: Tensor, seed: int) -> tuple[Tensor, Tensor | None]:
        self.noted.append(values.detach().float().clone())
        return values, None


def real_tensors(run: dict[str, Any], shared: Path) -> dict[str, list[Tensor]]:
    """Return what crossed the cut in the last round of a run, by kind."""
    run = run | {name: str(shared / run[name]) for name in ("model_name_or_path", "dataset_name")}
    noting = {kind: Noting() for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(CODECS, noting):
        codecs = json.dumps({kind: kind for kind in KINDS})  # the names under which they are patched in
        options = read_run_config({**run, **SETTING, "exchange_codec": codecs, "output_dir": folder})
        trainer, _ = make_task_trainer(options.task(options.arguments), options.config)
        trainer.train()
    last = len(noting["curvature"].noted)  # of the last round; the warm-up has none
    return {kind: noting[kind].noted[-last:] for kind in KINDS}


def judged(codec: Codec, tensors: list[Tensor]) -> tuple[float, float, float]:
    """Return bits of a value, the relative error, and what Zstandard would leave of the encoded values."""
    squeeze = pyarrow.Codec("zstd", compression_level=3).compress
    bits = error = norm = plain = squeezed = 0.0
    for seed, t in enumerate(tensors):
        values, scales = codec.encode(t, seed)
        back = codec.decode(values, scales, tuple(t.shape), seed).float()
        bits += 8 * codec.nbytes(tuple(t.shape)) / sum(t.numel() for t in tensors)
        error, norm = error + (back - t).square().sum().item(), norm + t.square().sum().item()
        data = values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        plain, squeezed = plain + len(data), squeezed + len(squeeze(data))
    return bits, (error / norm) ** 0.5, squeezed / plain


def timed(seconds: list[float], function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        start = time.process_time()
        result = function(*args)
        seconds[0] += time.process_time() - start
        return result

    return call


def time_share(model: str, method: str, name: str, rounds: int) -> float:
    """Return the share of a client's round that is spent in a codec."""
    codec, seconds, shares = CODECS[name], [0.0], []
    trainer: Any = make_trainer(model, method, exchange_dtype=name)
    with (
        mock.patch.object(codec, "encode", timed(seconds, codec.encode)),
        mock.patch.object(codec, "decode", timed(seconds, codec.decode)),
    ):
        for index in range(rounds + 1):
            seconds[0], start = 0.0, time.process_time()
            (report,) = trainer.rounds.run_round(index, 1e-4).values()
            assert report.failure is None, f"{model}, {method}, {name}: {report.failure}"
            shares.append(seconds[0] / (time.process_time() - start))
    return median(shares[1:])  # the first one warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds whose time is measured; 0: none")
    parser.add_argument("--shared", type=Path, default=SHARED, help="folder with the models and data of RUNS")
    parser.add_argument("--codecs", nargs="+", default=[name for name in CODECS if name != "float32"])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    keep_memory()
    torch.set_num_threads(1)
    errors: list[dict[str, Any]] = []
    for run, options in RUNS.items():
        tensors = real_tensors(options, arguments.shared)
        for name in arguments.codecs:
            row: dict[str, Any] = {"run": run, "codec": name}
            for kind in KINDS:
                row["bits"], row[kind], row[f"{kind}, zstd"] = judged(CODECS[name], tensors[kind])
            errors.append(row)
    print(format_table(errors, {"run": "", "codec": ""} | dict.fromkeys(list(errors[0])[2:], ".4f")), flush=True)
    times: list[dict[str, Any]] = []
    for name in arguments.codecs if arguments.rounds else []:
        if not CODECS[name].for_smashed_data:
            continue
        row = {"codec": name}
        for model in ("vit-tiny", "text"):
            for method in ("vanilla", "coef_p", "coef_j"):
                row[f"{model}, {method}"] = time_share(model, method, name, arguments.rounds)
        times.append(row)
    if times:
        print("\n" + format_table(times, {"codec": ""} | dict.fromkeys(list(times[0])[1:], ".2%")))
    if arguments.json:
        arguments.json.write_text(json.dumps({"errors": errors, "times": times}, indent=1))


if __name__ == "__main__":
    main()
