"""In which numbers a task loads the weights of its model: float32, bfloat16, or blocks in 8 or 4 bits."""

from __future__ import annotations

import torch
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..config import SplitFedConfig
from ..split.blocks import find_blocks
from ..split.quantized import check_installed
from .arguments import TaskArguments


def check_weights(arguments: TaskArguments, config: SplitFedConfig) -> None:
    """Refuse numbers that cannot be had, or that training would change, before anything is loaded."""
    asked = asked_to_quantise(arguments)
    if asked:
        check_installed(f"--{asked}")
    if config.full_finetuning and (asked or arguments.dtype != "float32"):
        given = f"--{asked}" if asked else f"--dtype {arguments.dtype}"
        raise ValueError(
            f"{given} and --full_finetuning do not go together: what is trained is float32, and that is every weight. "
            "Leave one of them out."
        )


def asked_to_quantise(arguments: TaskArguments) -> str:
    """Return the option that asks for quantised weights; "" if none does."""
    return "load_in_8bit" if arguments.load_in_8bit else "load_in_4bit" if arguments.load_in_4bit else ""


def quantisation_config(
    skeleton: PreTrainedModel, arguments: TaskArguments, blocks: str | None = None
) -> BitsAndBytesConfig:
    """Return the config that quantises the linear layers of the blocks, and no head that may be trained.

    Args:
        skeleton: the model, whose weights are not looked at.
        arguments: of the task.
        blocks: path of the list of blocks, if it is not to be guessed.
    """
    path, _ = find_blocks(skeleton, blocks)
    kept = [
        name
        for name, module in skeleton.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and not name.startswith(f"{path}.")
    ]
    return BitsAndBytesConfig(
        **{asked_to_quantise(arguments): True},
        llm_int8_skip_modules=kept,  # of both kinds
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=getattr(torch, arguments.dtype),
    )
