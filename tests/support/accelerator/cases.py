"""What a process runs on the emulated device, by group: each case raises if something is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hf_coefsfl import METHODS, split_model
from tests.support.accelerator.emulated import device_code
from tests.support.accelerator.runs import (
    CLIENTS,
    DEVICE,
    HOST,
    SECOND,
    TOLERANCE,
    assert_close,
    assert_same,
    live_bytes_of_clients,
    make,
    numbers,
    on_host,
    switched,
    trained,
)
from tests.support.exactness import assert_exact
from tests.support.federated import same
from tests.support.models import MODELS, TinyModel

Case = Callable[[Path], None]
AMPLIFIED = {"fsl_sage": 0.02}  # tolerance: AdamW aligns what AdamW trains with, and each divides by small numbers


# ---- Every method ----


def as_on_the_cpu(folder: Path, **changes: Any) -> None:
    """A device that has no float64 in a round, as MPS has none, comes to what the CPU comes to."""
    ours = make(folder / "device", DEVICE, **changes)
    with switched(device_code.refuse_float64):
        ours.train()
        ours.evaluate()
        ours.save_model()
    assert_close(ours, trained(folder / "host", HOST, **changes), AMPLIFIED.get(changes["method"], TOLERANCE))


def resumes(folder: Path, method: str) -> None:
    """With dropout, on another device than the current one, where copies to the host arrive late: the same bits.

    Each client leaves no more device memory in use than its weights.
    """
    changes: dict[str, Any] = {"kind": "vit", "dropout": 0.1, "method": method, "save_strategy": "steps"}
    with live_bytes_of_clients() as live:
        whole = trained(folder / "whole", DEVICE, save_steps=1, **changes)
    assert whole.rounds is not None
    for start in range(0, len(live), CLIENTS):
        averaged = whole.rounds.averaged(start // CLIENTS)
        weights = 4 * sum(int(p.numel()) for p in averaged)  # bytes of a client, until the average
        second, third = live[start + 1 : start + 3]
        assert third - second <= weights, f"{third - second} bytes more after a client with {weights} bytes of weights"
    with switched(device_code.defer_copies):
        checkpoint = folder / "whole" / "checkpoint-1"
        resumed = trained(folder / "resumed", SECOND, save_steps=1, resume=checkpoint, **changes)
    assert torch.accelerator.current_device_index() == 0
    assert_same(resumed, whole)


def methods() -> dict[str, Case]:
    return {
        **{f"{method} as on the CPU": partial(as_on_the_cpu, method=method) for method in sorted(METHODS)},
        **{f"{method} resumes": partial(resumes, method=method) for method in sorted(METHODS)},
    }


# ---- Options ----

ONE_ROUND: dict[str, Any] = {"method": "coef_j", "num_rounds": 1}
# Compared with the CPU. The noise is the CPU's too: a generator of the emulated device draws the same numbers.
COMPARED: dict[str, dict[str, Any]] = {
    "float16": {"exchange_dtype": "float16"},
    "bfloat16": {"exchange_dtype": "bfloat16"},
    "int8": {"exchange_dtype": "int8"},
    "int4": {"exchange_dtype": "int4"},
    "codecs": {"exchange_codec": {"gradients": "int3_stochastic", "curvature": "topk8"}},
    "adapters": {"adapter_codec": "int8", "method": "acc_sfl", "num_rounds": 2},
    "int8 in a file": {"exchange_dtype": "int8", "exchange_memory_limit": 0, "method": "ggn"},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "full fine-tuning": {"full_finetuning": True, "kind": "vit"},
    "noise": {"smashed_noise": 0.1},
    "clipping": {"max_grad_norm": 0.1},
    "stacked": {"stacked_clients": 3, "max_grad_norm": 0.1},
    "walk": {"method_kwargs": {"feedback_at": "walk"}},
    "exact": {"method_kwargs": {"exact": True}},
    "gas per batch": {"method": "gas", "method_kwargs": {"samples_per_class": 4, "per_batch": True}},
    "fsl_sage from the server": {"method": "fsl_sage", "method_kwargs": {"init": "copy_server", "align_every": 1}},
    "krum": {"aggregation": "krum", "client_bound": 1.0, "num_clients": 5},
    "median": {"aggregation": "median", "method": "acc_sfl"},
    "lost clients": {"client_dropout_rate": 0.4, "on_client_failure": "skip"},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "best model": {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps",
                   "save_steps": 1, "num_rounds": 2},
}  # fmt: skip
COARSE = 0.05  # a value that rounds to the other side moves by 1/127 of the largest, or more


def compared(folder: Path, **changes: Any) -> None:
    ours, theirs = (trained(folder / device, device, **ONE_ROUND | changes) for device in (DEVICE, HOST))
    coarse = {"exchange_codec", "adapter_codec"} & changes.keys()
    is_coarse = coarse or changes.get("exchange_dtype", "").startswith("int")
    assert_close(ours, theirs, COARSE if is_coarse else AMPLIFIED.get(ours.args.method, TOLERANCE))


@cache
def plain(folder: Path, device: str = DEVICE, dropout: float = 0.0) -> Any:
    """Return a run of CoeF-J without options, made once."""
    return trained(folder / f"plain {device} {dropout}", device, dropout=dropout, **ONE_ROUND)


def measured(folder: Path) -> None:
    """The probe and the count of FLOPs see what they see on the CPU, and change nothing."""
    measuring: dict[str, Any] = {"staleness_probe": 1, "count_flops": True}
    ours, theirs = (trained(folder / device, device, **ONE_ROUND, **measuring) for device in (DEVICE, HOST))
    assert_close(ours, theirs)
    assert len(ours.probe.points) == len(theirs.probe.points) > 0
    assert same(on_host(ours), on_host(plain(folder.parent)))


def in_a_file(folder: Path) -> None:
    """What goes to a file has arrived on the host before."""
    with switched(device_code.defer_copies):
        limited = trained(folder, DEVICE, exchange_memory_limit=0, **ONE_ROUND)
    assert_same(limited, plain(folder.parent))


def workers(folder: Path) -> None:
    """Batches that workers made come from pinned memory, and are the same."""
    before = device_code.counts().get("upload pinned", 0)
    with_workers = trained(folder, DEVICE, dataloader_num_workers=1, **ONE_ROUND)
    assert device_code.counts()["upload pinned"] > before
    assert_same(with_workers, plain(folder.parent))


def dropout_twice(folder: Path) -> None:
    """Dropout gives the same bits twice, and other weights than none."""
    again = trained(folder, DEVICE, dropout=0.1, **ONE_ROUND)
    assert_same(again, plain(folder.parent, dropout=0.1))
    assert numbers(again) != numbers(plain(folder.parent))


def masks(folder: Path) -> None:
    """Each pass over a batch has the masks of the first: where weights stay, activations do, on any device."""
    still = trained(folder, SECOND, dropout=0.1, learning_rate=1e-9, **ONE_ROUND)
    moved = [entry["displacement_norm"] for entry in numbers(still) if "displacement_norm" in entry]
    assert moved and max(moved) < 1e-4, moved


def checkpointed_dropout(folder: Path) -> None:
    """A pass that is repeated draws the masks of the first."""
    checkpointed = trained(folder, DEVICE, dropout=0.1, gradient_checkpointing=True, **ONE_ROUND)
    assert_close(checkpointed, plain(folder.parent, dropout=0.1))


def autocast(folder: Path, method: str) -> None:
    """In bfloat16 the weights end near those of float32, and elsewhere."""
    with (  # which ask for a CUDA device by name
        mock.patch("transformers.training_args.is_torch_bf16_gpu_available", return_value=True),
        mock.patch("accelerate.accelerator.is_bf16_available", return_value=True),
    ):
        narrow = trained(folder / "bf16", DEVICE, method=method, num_rounds=1, bf16=True)
    wide = trained(folder / "float32", DEVICE, method=method, num_rounds=1)
    a, b = (torch.cat([t.flatten() for t in on_host(run).values()]) for run in (narrow, wide))
    gap = ((a - b).norm() / b.norm()).item()
    assert 1e-6 < gap < 0.05, gap


def options() -> dict[str, Case]:
    return {
        **{name: partial(compared, **changes) for name, changes in COMPARED.items()},
        **{f"bf16 {name}": partial(autocast, method=name) for name in ("coef_j", "acc_sfl", "fsl_sage")},
        "measured": measured,
        "in a file": in_a_file,
        "workers": workers,
        "dropout twice": dropout_twice,
        "masks": masks,
        "gradient checkpointing with dropout": checkpointed_dropout,
    }


# ---- The split ----

WITHOUT_A_KERNEL = {"mixtral"}  # off the CPU its experts are counted by a histogram of integers, which the CPU has not


def exact(folder: Path, entry: TinyModel) -> None:
    """The halves on a device, which is not the current one, give the outputs and gradients of the model there."""
    torch.manual_seed(0)
    model = entry.make().to(SECOND)
    batch = {name: t.to(SECOND) for name, t in entry.batch().items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".* draws random numbers")  # other masks than the unsplit model's
        halves = split_model(model, entry.cuts[-1])
    assert_exact(model, halves, batch)


def split() -> dict[str, Case]:
    torch.__future__.set_swap_module_params_on_conversion(True)  # or moving a model would part its tied weights
    return {name: partial(exact, entry=entry) for name, entry in MODELS.items() if name not in WITHOUT_A_KERNEL}


GROUPS = {"methods": methods, "options": options, "split": split}
