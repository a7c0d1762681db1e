"""Measures whether smashed data could be sent as the difference to what the same samples had before (as AQ-SGD does).

python benchmarks/cached_differences.py [--rounds 12] [--shared ../shared]

CoeF-P trains on SICK (a 30M-parameter RoBERTa) and a part of CIFAR-100 (a ViT of 128 features), five clients a round,
once of 50 (10 %) and once of five (100 %), with the settings of the study. At every exchange each sample is looked up
in a cache of what was last decoded for it. A sample that is not there is sent in 4 bits, any other as its difference to
the cache in 2 bits. The table has

- "seen": the share of uploaded samples that the cache knows,
- "difference": ‖s − cached‖ / ‖s‖ of those,
- "after 2 bits": the error of s that is left once the difference is decoded; int4 of s itself has 0.107, int3 0.193,
- "bits": of a value, in the mean over all uploads,
- "cache, MiB": of one side, in float32, after the last round.

A row without dropout shows how much of the difference is made by dropout's masks, which are new in every round.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from speed import keep_memory  # beside this script; sets the number of OpenMP threads
from torch import Tensor, nn
from transformers.utils import logging

from hf_coefsfl.analysis.tables import format_table
from hf_coefsfl.flower.options import read_run_config
from hf_coefsfl.protocol.client_side import ClientSide
from hf_coefsfl.protocol.codecs import CODECS
from hf_coefsfl.protocol.messages import SmashedData
from hf_coefsfl.tasks.run import make_trainer

SHARED = Path(__file__).resolve().parents[2] / "shared"
SETTING: dict[str, Any] = {
    "method": "coef_p", "cut": 2, "warmup_rounds": 0, "per_device_train_batch_size": 4, "eval_strategy": "no",
    "save_strategy": "no", "max_eval_samples": 20, "use_cpu": True, "disable_tqdm": True,
}  # fmt: skip
SICK: dict[str, Any] = {
    "task": "mnli", "model_name_or_path": "models/granite-30m-roberta", "dataset_name": "data/sick_nli",
    "learning_rate": 1e-3,
}  # fmt: skip
CIFAR: dict[str, Any] = {
    "task": "cifar100", "model_name_or_path": "models/vit-micro", "dataset_name": "data/cifar100_small",
    "learning_rate": 3e-3,
}  # fmt: skip
TENTH = {"num_clients": 50, "participation": 0.1, "max_train_samples": 2400}
ALL = {"num_clients": 5, "participation": 1.0, "max_train_samples": 240}
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "SICK, 10 %": (SICK, TENTH, True),
    "SICK, 100 %": (SICK, ALL, True),
    "SICK, 100 %, no dropout": (SICK, ALL, False),
    "CIFAR-100, 10 %": (CIFAR, TENTH, True),
    "CIFAR-100, 100 %": (CIFAR, ALL, True),
}


class Cache:
    """What was last decoded for each sample, and sums over all uploads."""

    def __init__(self) -> None:
        self.decoded: dict[bytes, Tensor] = {}
        self.uploaded = self.seen = self.values = 0
        self.bits = self.norm = self.difference = self.left = 0.0

    def send(self, key: bytes, s: Tensor) -> None:
        """Count a sample (T, d), and remember it as the other side would have it."""
        known = self.decoded.get(key)
        codec = CODECS["int4" if known is None else "int2"]
        new = s if known is None else s - known
        decoded = codec.decode(*codec.encode(new, self.uploaded), tuple(s.shape), self.uploaded)
        self.decoded[key] = decoded if known is None else known + decoded
        self.uploaded, self.values = self.uploaded + 1, self.values + s.numel()
        self.bits += 8 * codec.nbytes(tuple(s.shape))
        if known is not None:
            self.seen += 1
            self.norm += s.square().sum().item()
            self.difference += new.square().sum().item()
            self.left += (self.decoded[key] - s).square().sum().item()


def samples(batch: dict[str, Tensor], activations: Tensor) -> Iterator[tuple[bytes, Tensor]]:
    """Yield what tells each sample of a batch from others, and its activations without padding."""
    for index, s in enumerate(activations):
        if "input_ids" in batch:
            real = batch["attention_mask"][index].bool()
            yield batch["input_ids"][index][real].numpy().tobytes(), s[real]
        else:
            yield batch["pixel_values"][index].numpy().tobytes(), s


def measure(run: dict[str, Any], setting: dict[str, Any], dropout: bool, rounds: int, shared: Path) -> dict[str, Any]:
    """Train with a cache that looks on."""
    run = run | {name: str(shared / run[name]) for name in ("model_name_or_path", "dataset_name")}
    cache, smash_all = Cache(), ClientSide._smash_all

    def noted(client: ClientSide) -> Iterator[SmashedData]:
        for batch, smashed in zip(client.batches, smash_all(client), strict=True):
            for key, s in samples(batch, smashed.activations.detach().float()):
                cache.send(key, s)
            yield smashed

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(ClientSide, "_smash_all", noted):
        options = read_run_config({**run, **SETTING, **setting, "num_rounds": rounds, "output_dir": folder})
        trainer, _ = make_trainer(options.task(options.arguments), options.config)
        for half in () if dropout else (trainer.split.client, trainer.split.server):
            for module in half.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        trainer.train()
    held = sum(t.nbytes for t in cache.decoded.values())
    return {
        "seen": cache.seen / cache.uploaded,
        "difference": (cache.difference / cache.norm) ** 0.5 if cache.seen else float("nan"),
        "after 2 bits": (cache.left / cache.norm) ** 0.5 if cache.seen else float("nan"),
        "bits": cache.bits / cache.values,
        "cache, MiB": held / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW")
    parser.add_argument("--shared", type=Path, default=SHARED, help="folder with the models and data")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    keep_memory()
    torch.set_num_threads(1)
    rows = [{"run": name} | measure(*ROWS[name], arguments.rounds, arguments.shared) for name in arguments.rows]
    columns = {"run": "", "seen": ".2f", "difference": ".3f", "after 2 bits": ".3f", "bits": ".2f", "cache, MiB": ".1f"}
    print(format_table(rows, columns))


if __name__ == "__main__":
    main()
