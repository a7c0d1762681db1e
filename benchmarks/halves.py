"""Prints the parameters of a model and of its halves, and the memory of a process that loads one half.

python benchmarks/halves.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from peft import PeftModel, get_peft_model
from transformers.utils import logging

from hf_coefsfl import split_model
from hf_coefsfl.analysis.backbones import build_model, default_cut
from hf_coefsfl.analysis.tables import format_table
from hf_coefsfl.split.lora import default_lora

# Prints how much memory a half takes in a fresh process: the resident size after loading it, less the one before.
LOAD = """
import sys
import hf_coefsfl
def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024
from hf_coefsfl import SplitFedTrainer  # with it come PyTorch, transformers and PEFT, which do not count
before = resident()
half = getattr(hf_coefsfl, f"load_{sys.argv[2]}")(sys.argv[1])
total = sum(float(p.float().abs().sum()) for p in half.parameters())  # touches every page
print(resident() - before)
"""


NUM_LABELS = {"vit-tiny": 100, "distilroberta": 3}


def loaded_memory(folder: Path, side: str) -> float | None:
    """MiB that a process of its own needs for a saved half; read from /proc, so on Linux only."""
    if not Path("/proc/self/status").exists():
        return None
    done = subprocess.run([sys.executable, "-c", LOAD, str(folder), side], capture_output=True, text=True, check=True)
    return float(done.stdout)


def rows_of(name: str, model: PeftModel, cut: int) -> list[dict[str, Any]]:
    split = split_model(model, cut)
    parameters = list(model.parameters())
    rows: list[dict[str, Any]] = [
        {
            "model": name,
            "part": "whole",
            "parameters": sum(p.numel() for p in parameters),
            "trainable": sum(p.numel() for p in parameters if p.requires_grad),
            "MiB": sum(t.numel() * t.element_size() for t in (*parameters, *model.buffers())) / 2**20,
        }
    ]
    for half in (split.client, split.server):
        with tempfile.TemporaryDirectory() as folder:
            half.save_pretrained(folder)
            memory = loaded_memory(Path(folder), half.side)
        rows.append(
            {
                "model": f"  cut at {cut}",
                "part": half.side,
                "parameters": half.num_parameters(),
                "trainable": half.num_parameters(only_trainable=True),
                "MiB": half.nbytes() / 2**20,
                "loaded alone, MiB": memory,
            }
        )
    return rows


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    logging.disable_progress_bar()
    rows = []
    for name, num_labels in NUM_LABELS.items():
        base = build_model(name, num_labels)
        rows += rows_of(name, get_peft_model(base, default_lora(base, head="frozen")), default_cut(name))
    numbers = {"parameters": ",", "trainable": ",", "MiB": ".1f", "loaded alone, MiB": ".1f"}
    print(format_table(rows, {"model": "", "part": ""} | numbers))


if __name__ == "__main__":
    main()
