"""Tiny runs on a device, and how two of them are compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from hf_coefsfl import SplitFedTrainer
from hf_coefsfl.federation.simulation import Simulation
from tests.support.accelerator.emulated import memory_allocated
from tests.support.federated import QUICK, images, texts, tiny_bert, tiny_vit, trainer, weights

HOST, DEVICE, SECOND = "cpu", "emulated:0", "emulated:1"
ROWS, EVALUATED, CLIENTS = 24, 8, 3
# The device's kernels are the CPU's, but other ones: PyTorch takes fused or vectorised paths on the CPU that it does
# not take on a device, and each rounds in its own way. Dropout draws other masks, and so is off in what is compared
# with the CPU.
TOLERANCE = 1e-3


def make(
    folder: Path, device: str, kind: str = "bert", dropout: float = 0.0, rows: int = ROWS, **changes: Any
) -> SplitFedTrainer:
    """Return the trainer of a run with three clients and two rounds."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = device
    model, data = (tiny_vit(dropout), images) if kind == "vit" else (tiny_bert(dropout), texts)
    model.set_attn_implementation("eager")  # the fused kernels round differently on each device
    settings: dict[str, Any] = {
        "num_rounds": 2,
        "warmup_rounds": 0,
        "num_clients": CLIENTS,
        "participation": 1.0,
        "use_cpu": False,
    }
    settings |= {"eval_dataset": data(EVALUATED, seed=1), "method_kwargs": QUICK.get(changes.get("method", ""))}
    run = trainer(folder, model, data(rows), **settings | changes)
    expected = torch.device(device)
    assert {run.args.device, *(p.device for p in run.split.model.parameters())} == {expected}
    return run


def trained(folder: Path, device: str, kind: str = "bert", dropout: float = 0.0, **changes: Any) -> SplitFedTrainer:
    """Return the trainer of a run that has trained, evaluated and saved."""
    resumed = changes.pop("resume", None)
    run = make(folder, device, kind, dropout, **changes)
    run.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    run.evaluate()
    run.save_model()
    return run


def on_host(run: SplitFedTrainer) -> dict[str, torch.Tensor]:
    """Return the trained weights."""
    return {name: t.cpu() for name, t in weights(run).items()}


def saved(run: SplitFedTrainer) -> dict[str, torch.Tensor]:
    """Return what lies in the folders of both halves."""
    folder = Path(run.args.output_dir or "")
    files = [path for side in ("client", "server") for path in sorted((folder / side).glob("*.safetensors"))]
    assert len(files) == 2, files
    return {f"{path.parent.name} {name}": t for path in files for name, t in load_file(path).items()}


def numbers(run: SplitFedTrainer) -> list[dict[str, float]]:
    """Return what was logged, without what depends on the clock."""
    clock = ("seconds", "runtime", "per_second", "preparation_time")
    return [
        {k: v for k, v in entry.items() if not k.endswith(clock) and isinstance(v, (int, float))}
        for entry in run.state.log_history
        if "train_loss" not in entry  # the mean since the resume
    ]


def assert_close(got: SplitFedTrainer, expected: SplitFedTrainer, tolerance: float = TOLERANCE) -> None:
    """Weights, files and logged numbers agree, relative to the largest entry of each tensor."""
    for view in (on_host, saved):
        ours, theirs = view(got), view(expected)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if name.endswith("k_proj.bias"):  # softmax does not see it: AdamW magnifies a gradient that is all rounding
                continue
            gap = ((ours[name] - value).abs().max() / value.abs().max().clamp(min=1e-6)).item()
            assert gap < tolerance, f"{name} differs by {gap:.1e} of its largest entry"
    ours_logged, theirs_logged = numbers(got), numbers(expected)
    assert [list(entry) for entry in ours_logged] == [list(entry) for entry in theirs_logged]
    for mine, other in zip(ours_logged, theirs_logged, strict=True):
        for name, number in other.items():
            assert abs(mine[name] - number) <= tolerance * max(abs(number), 0.1), f"{name}: {mine[name]}, not {number}"


def assert_same(got: SplitFedTrainer, expected: SplitFedTrainer) -> None:
    """Weights, files and logged numbers are the same to the last bit."""
    for view in (on_host, saved):
        ours, theirs = view(got), view(expected)
        differing = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
        assert ours.keys() == theirs.keys() and not differing, f"other bits: {differing}"
    assert numbers(got) == numbers(expected)


@contextmanager
def switched(switch: Callable[[bool], None]) -> Iterator[None]:
    """Have a switch of the device on."""
    switch(True)
    try:
        yield
    finally:
        switch(False)


@contextmanager
def live_bytes_of_clients() -> Iterator[list[int]]:
    """Note the bytes of device memory that are in use after each client of a round."""
    found: list[int] = []
    run_client = Simulation._run_client

    def noted(self: Simulation, *args: Any) -> Any:
        report = run_client(self, *args)
        found.append(memory_allocated(self.args.device))
        return report

    with mock.patch.object(Simulation, "_run_client", noted):
        yield found
