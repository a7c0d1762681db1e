"""Where a model lies, and in which numbers: what does not work so is refused before it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..config import SplitFedConfig
from ..split.placeholders import unwrapped
from ..split.quantized import prepare_quantised, quantisation


def check_one_device(model: nn.Module) -> None:
    """Refuse a model that is spread over devices or offloaded."""
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(places) > 1 or "disk" in places:
        raise ValueError(
            f"The model lies on {', '.join(sorted(places))} (device_map): its halves share its tensors, and hooks that "
            "move them between devices do not follow into the halves. Load it without device_map: each process holds "
            "the whole model on one device."
        )


def check_quantised(model: nn.Module, args: SplitFedConfig) -> None:
    """Refuse what a model with quantised weights cannot do."""
    method, quantised = args.make_method(), quantisation(model)
    if quantised is None:
        return
    prepare_quantised(model)
    problem = None
    if args.full_finetuning:
        problem = "full_finetuning=True trains every weight, and integers cannot be trained. Train an adapter"
    elif method.trains_block_copies:
        problem = (
            f"method={args.method!r} trains copies of the model's blocks ({method.title}), and integers cannot be "
            "trained. Choose another method"
        )
    elif args.torch_compile:
        problem = "torch_compile=True cannot compile layers that replace their own weights. Leave it out"
    if problem is not None:
        raise ValueError(f"The model is quantised ({quantised}). {problem}, or load the model without quantisation.")


def check_recomputation(model: nn.Module, args: SplitFedConfig) -> None:
    """Refuse gradient checkpointing where it recomputes passes with other dropout masks."""
    if not args.gradient_checkpointing or args.device.type != "mps":
        return
    found = list(_dropouts(model))
    if found:
        raise ValueError(
            "gradient_checkpointing=True does not work with dropout on MPS: PyTorch does not keep the state of its "
            "random numbers, so that recomputed passes would have other masks and gradients would be wrong. The model "
            f"has {', '.join(found[:3])}{' ...' if len(found) > 3 else ''}. Load it with dropout 0, or leave gradient "
            "checkpointing out."
        )


def _dropouts(model: nn.Module) -> Iterator[str]:
    """Yield what may draw masks: the settings of the config, of which attention is one, and the modules."""
    config: dict[str, Any] = unwrapped(model).config.get_text_config().to_dict()
    for name, value in config.items():
        if "drop" in name and isinstance(value, float) and value > 0:
            yield f"{name}={value:g}"
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            yield f"{name}.p={module.p:g}"
