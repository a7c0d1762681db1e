"""Sends an exchange of a gigabyte over Flower on loopback and prints the memory that each process takes.

python benchmarks/large_exchange.py --gib 1

One client uploads the activations of a wide, shallow BERT on random texts, and the server sends as many gradients back
(method `reuse`), in chunks. The memory of every process is read five times a second. "Grew" is its peak above the first
reading. The client's process is forked, so its first reading is that of the process it is forked from.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from loopback import Loopback
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from hf_coefsfl.cli import main as coefsfl

HIDDEN, TOKENS, BATCH = 1024, 512, 2  # small batches, so that the memory of a pass does not hide that of the exchange
ROLES = {
    "flower-superlink": "SuperLink",
    "flwr-serverapp": "ServerApp",
    "flower-supernode": "SuperNode",
    "hf_coefsfl.flower.supernode": "ClientApp",
}


def make_files(folder: Path, samples: int) -> None:
    """Write a model of two blocks and texts that fill its longest sequence."""
    words = [f"w{i}" for i in range(50)]
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.model_max_length = TOKENS
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=8,
        intermediate_size=64, max_position_embeddings=TOKENS,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    for name, count in (("site/train", samples), ("test/test", 4)):
        texts = [" ".join(words[i] for i in rng.integers(0, len(words), TOKENS)) for _ in range(count)]
        path = folder / f"{name}.parquet"
        path.parent.mkdir(parents=True)
        Dataset.from_dict({"text": texts, "label": [i % 2 for i in range(count)]}).to_parquet(str(path))


class Watch(threading.Thread):
    """Looks at the memory of processes by their role."""

    def __init__(self, flower: Loopback):
        super().__init__(daemon=True)
        self.flower, self.over = flower, threading.Event()
        self.first: dict[int, float] = {}
        self.peak: dict[str, float] = defaultdict(float)
        self.growth: dict[str, float] = defaultdict(float)

    def run(self) -> None:
        while not self.over.wait(0.2):
            for pid in filter(str.isdecimal, os.listdir("/proc")):
                self._look(int(pid))

    def _look(self, pid: int) -> None:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            status = Path(f"/proc/{pid}/status").read_text()
            if f"FLWR_HOME={self.flower.folder}" not in Path(f"/proc/{pid}/environ").read_text():
                return
        except (OSError, UnicodeDecodeError):
            return
        role = next((title for word, title in ROLES.items() if word in words), None)
        found = re.search(r"VmHWM:\s+(\d+)", status)
        if role is None or found is None:
            return
        mib = int(found[1]) / 1024
        start = self.first.setdefault(pid, mib)
        self.peak[role] = max(self.peak[role], mib)
        self.growth[role] = max(self.growth[role], mib - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the upload, and of the gradients")
    parser.add_argument("--chunk-mib", type=int, default=64)
    arguments = parser.parse_args()
    batches = round(arguments.gib * 2**30 / (BATCH * TOKENS * HIDDEN * 4))
    folder = Path(tempfile.mkdtemp())
    try:
        make_files(folder, batches * BATCH)
        common = {
            "model_name_or_path": folder / "model", "dataset_name": folder / "test", "cut": 1, "max_length": TOKENS,
            "use_cpu": True,
        }  # fmt: skip
        argv = [part for name, value in common.items() for part in (f"--{name}", str(value))]
        coefsfl(["split", "newsgroups", *argv, "--output_dir", str(folder / "half")])
        config = {name: value if isinstance(value, (bool, int)) else str(value) for name, value in common.items()}
        config |= {
            "task": "newsgroups", "method": "reuse", "num_rounds": 1, "warmup_rounds": 0, "num_clients": 1,
            "min_clients": 1, "per_device_train_batch_size": BATCH, "output_dir": str(folder / "out"),
            "chunk_size": f"{arguments.chunk_mib}MiB",
        }  # fmt: skip
        node = {
            "partition-id": 0, "dataset": str(folder / "site"), "client-half": str(folder / "half" / "client"),
        }  # fmt: skip
        with Loopback(folder / "flower") as flower:
            watch = Watch(flower)
            watch.start()
            flower.start_node(node)
            start = time.monotonic()
            said = flower.run(config, timeout=3600)
            seconds = time.monotonic() - start
            watch.over.set()
            parts = {kind: flower.log("node0").count(f"Receiving: query.{kind}") for kind in ("fetch", "deliver")}
        if "ServerApp finished running" not in said:
            sys.exit(said[-3000:])
        total = json.loads((folder / "out" / "communication.json").read_text())["total"]
        up, down = total["up"]["smashed_data"] / 2**20, total["down"]["gradients"] / 2**20
        print(
            f"{up:.0f} MiB of activations up in {parts['fetch'] + 1} chunks of {arguments.chunk_mib} MiB, {down:.0f} "
            f"MiB of gradients down in {parts['deliver']}, {seconds:.0f} s in all\n"
        )
        print("process   | peak, MiB | grew, MiB\n----------+-----------+----------")
        for role in watch.peak:
            print(f"{role:9} | {watch.peak[role]:9.0f} | {watch.growth[role]:9.0f}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
