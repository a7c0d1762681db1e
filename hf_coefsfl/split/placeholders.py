"""What a server half is driven by instead of the raw inputs, and example inputs to calibrate a split.

The placeholders carry the shape and the padding of a batch and nothing of its content: ids are a
filler where a token is and the padding id elsewhere, everything else is zero.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..protocol.messages import SmashedData

_REFUSED = ("output_hidden_states", "output_attentions", "output_router_logits")


def unwrapped(model: nn.Module) -> Any:
    """The Hugging Face model inside a PEFT wrapper, or the model itself."""
    wrapper: Any = model
    return wrapper.get_base_model() if hasattr(wrapper, "get_base_model") else model


def accepts(model: nn.Module, name: str) -> bool:
    """Whether the forward of the (unwrapped) model has an argument of this name."""
    return name in _signature(type(unwrapped(model)).forward)


def no_cache(model: nn.Module) -> dict[str, Any]:
    """Arguments that keep a forward pass from making a cache: that of a half would hold placeholders."""
    return {"use_cache": False} if accepts(model, "use_cache") else {}


def is_label(name: str) -> bool:
    """Whether an input belongs to the loss or to the decoder, and so to the server."""
    return "label" in name or name in ("start_positions", "end_positions") or name.startswith("decoder_")


@lru_cache
def _signature(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def is_generative_pair(model: nn.Module) -> bool:
    """Whether a model is an encoder-decoder that makes its decoder's inputs from the labels."""
    base = unwrapped(model)
    return bool(getattr(base.config, "is_encoder_decoder", False)) and bool(base.can_generate())


def refuse_block_outputs(inputs: dict[str, Any]) -> None:
    """Refuse to return what every block has computed: a half has only some of them."""
    for name in _REFUSED:
        if inputs.get(name):
            raise ValueError(
                f"{name}=True is not supported by the halves of a model: each has only some of its blocks."
            )


def sort_inputs(
    inputs: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, tuple[int, ...]]]:
    """Sort a batch into the inputs that the client runs on, the labels, and the shapes of the raw tensors."""
    refuse_block_outputs(inputs)
    raw: dict[str, Any] = {}
    labels: dict[str, Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, value in inputs.items():
        if value is None or name == "use_cache":
            continue
        if is_label(name):
            labels[name] = value
        elif isinstance(value, Tensor):
            raw[name] = value
            shapes[name] = tuple(value.shape)
        elif isinstance(value, (bool, int, float)):
            raw[name] = value
        else:
            raise ValueError(f"Input {name!r} is a {type(value).__name__}; tensors, numbers and flags can be split.")
    return raw, labels, shapes


def crossing_context(
    model: nn.Module, raw: dict[str, Any], crossing: tuple[str, ...], device: Any
) -> dict[str, Tensor]:
    """What the server needs of the inputs: padding as bool (1 byte per token), positions, flags.

    `padding` is sent only if it differs from the attention mask, e.g. if the padding id is
    also a token of the text: classifiers that pool at the last token look for it.
    """
    context: dict[str, Tensor] = {}
    for name, value in raw.items():
        if not isinstance(value, Tensor):
            context[name] = torch.tensor(value, device=device)
        elif name.endswith("attention_mask"):
            binary = not value.is_floating_point() and value.dim() == 2 and bool((value <= 1).all())
            context[name] = value.bool() if binary else value
        elif name == "position_ids" or name in crossing:
            context[name] = value
    ids = raw.get("input_ids")
    pad = None if ids is None else _pad_id(_text_config(model))
    if ids is not None and pad is not None:
        mask = raw.get("attention_mask")
        padding = ids == pad
        expected = mask == 0 if mask is not None and mask.shape == ids.shape else torch.zeros_like(padding)
        if not torch.equal(padding, expected):
            context["padding"] = padding
    return context


def placeholder_inputs(model: nn.Module, smashed: SmashedData) -> dict[str, Any]:
    """The inputs that drive a server half over a batch whose smashed data it got."""
    device, dtype = smashed.activations.device, smashed.activations.dtype
    inputs: dict[str, Any] = {}
    for name, value in smashed.context.items():
        if name.startswith("block.") or name == "padding":
            continue
        if value.dim() == 0:
            inputs[name] = value.item()
        else:
            inputs[name] = value.long() if value.dtype == torch.bool else value
    for name, shape in smashed.shapes.items():
        if name == "input_ids":
            inputs[name] = _placeholder_ids(model, smashed, shape)
        elif name not in inputs:
            kind = torch.long if name.endswith("_ids") else dtype
            inputs[name] = torch.zeros((), dtype=kind, device=device).expand(shape)  # takes no memory
    return inputs


def _placeholder_ids(model: nn.Module, smashed: SmashedData, shape: tuple[int, ...]) -> Tensor:
    config = _text_config(model)
    filler, pad = _filler_id(config), _pad_id(config)
    ids = torch.full(shape, filler, device=smashed.activations.device)
    padding, mask = smashed.context.get("padding"), smashed.context.get("attention_mask")
    if padding is None and mask is not None and mask.shape == ids.shape:
        padding = mask == 0
    return ids if padding is None or pad is None else ids.masked_fill(padding, pad)


def _text_config(model: nn.Module) -> Any:
    return unwrapped(model).config.get_text_config()


def _vocab_size(config: Any) -> int:
    return getattr(config, "vocab_size", 256)  # CANINE has none: its ids are those of characters


def _pad_id(config: Any) -> int | None:
    pad = getattr(config, "pad_token_id", None)
    return pad if isinstance(pad, int) else None


def _special_ids(config: Any) -> set[int]:
    """Every id that the config gives a role of its own."""
    special: set[int] = set()
    for name, value in vars(config).items():
        if name.endswith(("_token_id", "_token_index")):
            special |= set(value) if isinstance(value, list) else {value}
    return special


def _filler_id(config: Any) -> int:
    special = _special_ids(config)
    return next(i for i in range(_vocab_size(config)) if i not in special)


# --- example inputs ------------------------------------------------------------------------------


def example_inputs(model: nn.Module) -> dict[str, Tensor]:
    """A small batch with padding that `model` can run on, made from its config.

    Raises a ValueError for models whose input cannot be derived, which asks for `example_inputs=`.
    """
    base = unwrapped(model)
    name: str = getattr(base, "main_input_name", "")
    generator = torch.Generator().manual_seed(0)  # leaves the global generator alone
    makers = {
        "input_ids": _example_text,
        "pixel_values": _example_image,
        "input_values": _example_sound,
        "input_features": _example_features,
    }
    try:
        inputs = makers[name](base, generator)
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"Cannot derive an example of the input {name!r} of {type(base).__name__} from its config ({error!r}). "
            "Pass a small batch as `example_inputs={...}` to split_model."
        ) from error
    if is_generative_pair(model):
        ids = torch.randint(0, _vocab_size(_text_config(model)), (len(inputs[name]), 5), generator=generator)
        inputs["labels"] = ids
    parameter = next((p for p in base.parameters() if p.is_floating_point()), None)
    device, dtype = (parameter.device, parameter.dtype) if parameter is not None else (None, torch.float32)
    return {key: t.to(device, dtype) if t.is_floating_point() else t.to(device) for key, t in inputs.items()}


def _example_text(base: Any, generator: torch.Generator) -> dict[str, Tensor]:
    config = base.config.get_text_config()
    pad, eos = _pad_id(config), getattr(config, "eos_token_id", None)
    # Decoders pool at the last token that is not padding and refuse batches if there is no such id.
    batch, length, padded = (2 if pad is not None else 1), 10, 3
    ordinary = torch.tensor([i for i in range(min(_vocab_size(config), 1000)) if i not in _special_ids(config)])
    ids = ordinary[torch.randint(0, len(ordinary), (batch, length), generator=generator)]
    mask = torch.ones_like(ids)
    if pad is not None:
        ids[1, -padded:], mask[1, -padded:] = pad, 0
    if isinstance(eos, int) and eos != pad and eos < _vocab_size(config):
        ids[torch.arange(batch), mask.sum(1) - 1] = eos  # BART's classifier pools there
    inputs = {"input_ids": ids}
    if accepts(base, "attention_mask"):
        inputs["attention_mask"] = mask
    if accepts(base, "token_type_ids") and (getattr(config, "type_vocab_size", None) or 0) > 1:
        inputs["token_type_ids"] = (torch.arange(length) >= length // 2).long().expand(batch, length).clone()
    return inputs


def _example_image(base: Any, generator: torch.Generator) -> dict[str, Tensor]:
    config = base.config
    if hasattr(base, "timm_model"):
        timm_model = base.timm_model
        size = getattr(getattr(timm_model, "patch_embed", None), "img_size", None)
        channels, *default = timm_model.pretrained_cfg["input_size"]
        shape = (channels, *(size or default))
    else:
        vision = getattr(config, "vision_config", config)
        side = getattr(vision, "image_size", None) or 224
        height, width = (side, side) if isinstance(side, int) else side
        shape = (getattr(vision, "num_channels", 3), height, width)
    if getattr(config, "num_frames", None):
        shape = (config.num_frames, *shape)
    return {"pixel_values": torch.randn(2, *shape, generator=generator)}


def _example_sound(base: Any, generator: torch.Generator) -> dict[str, Tensor]:
    config = base.config
    if not hasattr(config, "conv_stride"):  # a spectrogram (AST)
        return {"input_values": torch.randn(2, config.max_length, config.num_mel_bins, generator=generator)}
    length = 24 * math.prod(config.conv_stride) + sum(config.conv_kernel)
    values, mask = torch.randn(2, length, generator=generator), torch.ones(2, length, dtype=torch.long)
    values[1, length // 2 :], mask[1, length // 2 :] = 0, 0
    return {"input_values": values, "attention_mask": mask}


def _example_features(base: Any, generator: torch.Generator) -> dict[str, Tensor]:
    config = base.config
    if hasattr(config, "feature_projection_input_dim"):
        return {"input_features": torch.randn(2, 24, config.feature_projection_input_dim, generator=generator)}
    return {"input_features": torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)}
