"""`torch_compile=True`: the blocks of both halves are compiled one by one, the rest of the model is not."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend

from ..config import SplitFedConfig
from ..split import SplitModel
from ..split.blocks import members
from ..split.stand_ins import PassThrough, Stop
from ..split.surgery import cut_path


def compile_blocks(split: SplitModel, args: SplitFedConfig, accelerator: Accelerator) -> None:
    """Compile each block that a half computes in place, if `args.torch_compile` is set.

    Parameters, their names and what is saved stay as they are. Evaluation runs the unsplit model uncompiled:
    Accelerate, which would compile it as a whole, is told not to.
    """
    accelerator.state.dynamo_plugin.backend = DynamoBackend.NO
    if not args.torch_compile:
        return
    # Methods that send projections run several backward passes through one graph.
    torch._functorch.config.donated_buffer = False
    options = compile_options(args)
    halves = (split.client,) if args.make_method().differentiates_twice else (split.client, split.server)
    for half in halves:
        for block in members(half.get_submodule(cut_path(half))).values():
            if not isinstance(block, (Stop, PassThrough)):
                block.compile(**options)


def compile_options(args: SplitFedConfig) -> dict[str, Any]:
    """Return the arguments for `torch.compile`."""
    if args.torch_compile_backend != "inductor":
        return {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
    # With torch's random numbers instead of inductor's own, dropout draws the masks of the uncompiled model.
    options = torch._inductor.list_mode_options(args.torch_compile_mode) if args.torch_compile_mode else {}
    return {"backend": "inductor", "options": {**options, "fallback_random": True}}
