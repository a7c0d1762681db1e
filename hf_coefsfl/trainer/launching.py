"""How this process was started."""

from __future__ import annotations

import os

from ..config import SplitFedConfig


def check_processes(args: SplitFedConfig) -> None:
    """Refuse processes that do not know of each other."""
    started = int(os.environ.get("WORLD_SIZE", 1))
    if "LOCAL_RANK" in os.environ and started > args.world_size:
        raise ValueError(
            f"{started} processes were started (WORLD_SIZE), but this one runs alone: each would train all clients and "
            f"write to {args.output_dir}. Without GPUs set use_cpu=True, or launch with "
            f"`ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes {started} script.py`."
        )
