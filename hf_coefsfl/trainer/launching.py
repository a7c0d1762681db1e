"""How this process was started, and how it leaves the others."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed

from ..config import SplitFedConfig

_at_work = False  # whether training has begun and not come to its end


def check_processes(args: SplitFedConfig) -> None:
    """Refuse processes that do not know of each other."""
    started = int(os.environ.get("WORLD_SIZE", 1))
    if "LOCAL_RANK" in os.environ and started > args.world_size:
        raise ValueError(
            f"{started} processes were started (WORLD_SIZE), but this one runs alone: each would train all clients and "
            f"write to {args.output_dir}. Without GPUs set use_cpu=True, or launch with "
            f"`ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes {started} script.py`."
        )


def set_timeout(args: SplitFedConfig) -> None:
    """Let processes wait for each other for `args.ddp_timeout` seconds.

    Transformers gives it to a group of GPUs only, and to none that an earlier config has opened.
    """
    if distributed.is_available() and distributed.is_initialized():
        # PyTorch 2.9 has it by another name.
        change = getattr(distributed, "set_timeout", None) or distributed.distributed_c10d._set_pg_timeout
        change(args.ddp_timeout_delta)


@contextmanager
def at_work() -> Iterator[None]:
    """Note that other processes wait for this one, and still do after an error."""
    global _at_work
    _at_work = True
    yield
    _at_work = False


@atexit.register
def _leave_group() -> None:
    """Close the process group that Accelerate has opened: NCCL warns if it stays open.

    A process that finishes while gloo's threads still run is aborted now and then. After an error the others wait for
    this process, and NCCL would wait for them: its group stays, and the launcher ends all.
    """
    if distributed.is_available() and distributed.is_initialized():
        failed = _at_work or hasattr(sys, "last_value")
        if distributed.get_backend() == "gloo" or not failed:
            distributed.destroy_process_group()
