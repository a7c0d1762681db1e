"""Compares the memory that `coefsfl cost` predicts with what fresh processes take for a round of training.

python benchmarks/memory.py

Each figure is the peak of the resident memory of a fresh process (VmHWM, so on Linux only), less what it had before
the model was built. By then it has trained a tiny model, so that imports and other one-time costs do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from torch.utils.data import Dataset
from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification
from transformers.utils import logging

from hf_coefsfl import SplitFedConfig, SplitFedTrainer, load_client, load_server, split_model
from hf_coefsfl.analysis.backbones import Samples, build_model, default_cut
from hf_coefsfl.analysis.cost import CostModel, Round
from hf_coefsfl.analysis.memory import Run, footprint
from hf_coefsfl.analysis.tables import MIB, format_table
from hf_coefsfl.methods import Method, make_method
from hf_coefsfl.methods.parts.costs import RoundKind
from hf_coefsfl.protocol.client_side import ClientSide
from hf_coefsfl.protocol.context import RoundContext
from hf_coefsfl.protocol.link import packed_upload
from hf_coefsfl.protocol.messages import Feedback, Message, SmashedData
from hf_coefsfl.protocol.packing import Exchange, Store
from hf_coefsfl.protocol.server_side import ServerSide
from hf_coefsfl.protocol.wire import read_message, write_message
from hf_coefsfl.split.lora import default_lora

MODELS = {"vit-tiny": 100, "distilroberta": 3}  # with their number of classes
KEYS = ("num_samples", "batch_size", "sequence_length", "clients", "plain_malloc")
PARTS = {"process": ("vanilla", "coef_j", "acc_sfl"), "client": ("vanilla", "coef_j"), "server": ("vanilla", "coef_j")}


class MadeUp(Dataset[dict[str, Any]]):
    """Samples that are made when they are read. The dataset itself takes no memory."""

    def __init__(self, samples: Samples, size: int):
        self.samples, self.size = samples, size

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.size

    def __getitem__(self, place: int) -> dict[str, Any]:
        """Return a sample of its own memory."""
        if not 0 <= place < self.size:
            raise IndexError(place)
        return {name: t[0].clone() for name, t in self.samples.batch(1).items()}


def status(name: str) -> int:
    """Bytes of one entry of /proc/self/status."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def start_measuring() -> int:
    """Reset the peak and return the present memory."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return status("VmRSS")


# ---- What the fresh processes run ----


def usual_model(name: str, num_labels: int) -> PreTrainedModel:
    model = build_model(name, num_labels)
    model.set_attn_implementation("sdpa")  # as a model is loaded; `build_model` is for counting
    return model


def train(model: PreTrainedModel, case: dict[str, Any]) -> None:
    """Train one round with as many clients as asked for."""
    samples = Samples(model, case["sequence_length"])
    clients, batch_size = case["clients"], case["batch_size"]
    with tempfile.TemporaryDirectory() as folder:
        args = SplitFedConfig(
            folder, method=case["method"], cut=case["cut"], num_clients=clients, participation=1.0, num_rounds=1,
            warmup_rounds=0, per_device_train_batch_size=batch_size, save_strategy="no", disable_tqdm=True,
            use_cpu=True, logging_strategy="no", **case.get("options", {}),
        )  # fmt: skip
        data = MadeUp(samples, clients * case["num_samples"])
        SplitFedTrainer(model=model, args=args, train_dataset=data).train()


def tiny_case(method: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 8}
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=3))
    return model, {"method": method, "cut": 1, "clients": 2, "num_samples": 4, "batch_size": 2, "sequence_length": None}


class OtherSide:
    """Plays a client towards a server: always the same message, and nobody reads what is sent down."""

    def __init__(self, message: SmashedData, sizes: Sequence[int]):
        self.message, self.sizes, self.store = message, sizes, Store()
        self.num_batches, self.local_epochs = len(sizes), 1

    def upload(self, batches: Sequence[int] | None = None) -> Exchange[SmashedData]:
        """Return copies of the message, a sample for each that the batch should have."""
        places = range(self.num_batches) if batches is None else batches
        return Exchange.of((repeated(self.message, self.sizes[place]) for place in places), self.store)

    def stage(self, messages: Iterable[Message]) -> Exchange[Message]:
        """Keep messages as they would be for sending."""
        return Exchange.of(messages, self.store)

    def update(self, messages: Sequence[Message] | None = None, batches: Sequence[int] | None = None) -> None:
        """Do nothing: this is another process's work."""


def repeated(message: SmashedData, size: int) -> SmashedData:
    """Return a message of one sample for several."""
    many = message.map(lambda t: t.repeat(size, *[1] * (t.dim() - 1)) if t.dim() else t)
    return SmashedData(many.activations, many.context, many.labels, {n: (size, *s[1:]) for n, s in many.shapes.items()})


def feedback(method: Method, data: SmashedData) -> Feedback:
    """Return made-up feedback on a batch."""
    gradient = torch.randn_like(data.activations)
    if method.name != "coef_j":
        return Feedback(gradient)
    return Feedback(gradient, torch.randn_like(gradient)[:, None, None], torch.rand(len(gradient), 1))


def run_side(case: dict[str, Any], folder: Path) -> None:
    """Run a round of one half alone."""
    method, setting = make_method(case["method"]), RoundContext(seed=0, round_index=0, client=0)
    half = (load_client if case["part"] == "client" else load_server)(folder / case["part"]).train()
    for parameter in half.parameters():
        parameter.sum()  # touches every page: a file is mapped, and rows of an embedding that nobody asks for stay out
    optimizer = torch.optim.AdamW([p for p in half.parameters() if p.requires_grad])
    samples: Samples = pickle.loads((folder / "samples").read_bytes())  # of this program's own making
    sizes = Round(case["num_samples"], case["batch_size"]).sizes
    if case["part"] == "server":
        message = read_message(folder / "message", SmashedData)
        method.round(OtherSide(message, sizes), ServerSide(half, optimizer, setting, samples.loss_spec))
        return
    client = ClientSide(half, samples.batches(sizes), optimizer, setting, samples.loss_spec)
    if method.name == "vanilla":
        for place in range(len(sizes)):
            (data,) = packed_upload(method, client, [place])
            method.update(client, [feedback(method, data)], [place])
        return
    sent = packed_upload(method, client, None)
    method.update(client, Exchange.of((feedback(method, data) for data in sent), setting.store), None)


def child(case: dict[str, Any]) -> int:
    """Run a case in this process and return how far its memory rose."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    train(*tiny_case(case["method"]))
    if case["part"] == "process":
        before = start_measuring()
        train(usual_model(case["model"], case["num_labels"]), case)
    else:
        before = start_measuring()
        run_side(case, Path(case["folder"]))
    return status("VmHWM") - before


# ---- What starts them ----


def measured(case: dict[str, Any]) -> int:
    """Bytes by which the memory of a fresh process rises for a case."""
    command = [sys.executable, __file__, "--child", json.dumps(case)]
    # The GNU C library keeps freed memory of a few MiB in a heap with holes, unless it is told to map it.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment |= {} if case["plain_malloc"] else {"MALLOC_MMAP_THRESHOLD_": str(MIB)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return int(done.stdout.splitlines()[-1])


def save_sides(case: dict[str, Any], folder: Path) -> None:
    """Write both halves, made-up samples, and a message of one sample between the halves."""
    model = usual_model(case["model"], case["num_labels"])
    samples = Samples(model, case["sequence_length"])
    split = split_model(get_peft_model(model, default_lora(model)), case["cut"])
    for half in (split.client, split.server):
        half.save_pretrained(folder / half.side)
    (folder / "samples").write_bytes(pickle.dumps(samples))
    with torch.no_grad():
        write_message(split.client(**samples.batch(1)), folder / "message")


def row_of(case: dict[str, Any], cost: CostModel) -> dict[str, Any]:
    plan = Round(case["num_samples"], case["batch_size"])
    run = Run(num_rounds=1, clients_per_round=case["clients"], num_clients=case["clients"])
    predicted = footprint(cost, RoundKind(make_method(case["method"])), case["cut"], plan, run)
    part: dict[str, int] = getattr(predicted, case["part"])
    if case["part"] == "process":
        found = measured(case)
    else:
        with tempfile.TemporaryDirectory() as folder:
            save_sides(case, Path(folder))
            found = measured(case | {"folder": folder})
    total = sum(part.values())
    print(f"{case['model']} {case['part']} {case['method']}: {total / found:.2f}", file=sys.stderr)
    return {
        "model": case["model"],
        "samples": case["num_samples"],
        "part": case["part"],
        "method": case["method"],
        "weights": part["weights"] / MIB,
        "predicted": total / MIB,
        "measured": found / MIB,
        "ratio": total / found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--num-samples", type=int, default=64, help="of each client (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--sequence-length", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--clients", type=int, default=1, help="of the round (default: %(default)s)")
    parser.add_argument("--plain-malloc", action="store_true", help="without MALLOC_MMAP_THRESHOLD_=1048576")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.child:
        print(child(json.loads(arguments.child)))
        return
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    rows = []
    for name in arguments.models:
        common = {"model": name, "num_labels": MODELS[name], "cut": default_cut(name)}
        common |= {key: getattr(arguments, key) for key in KEYS}
        cost = CostModel(build_model(name, MODELS[name]), sequence_length=arguments.sequence_length)
        cases = [{"part": part, "method": method} for part, methods in PARTS.items() for method in methods]
        rows += [row_of(common | case, cost) for case in cases]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    numbers = dict.fromkeys(("weights", "predicted", "measured"), ",.1f") | {"ratio": ".2f"}
    print(format_table(rows, {"model": "", "samples": "", "part": "", "method": ""} | numbers))
    print("\nMiB; weights are those of the part alone.")


if __name__ == "__main__":
    main()
