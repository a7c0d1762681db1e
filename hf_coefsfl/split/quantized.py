"""Base weights in 8 or 4 bits: what halves share, hold, write and read of them.

The weight of a layer of bitsandbytes is an integer tensor. The scales that turn it into numbers lie in an object beside
it, which is neither a parameter nor a buffer. A weight of torchao looks like a tensor of floats and holds both. This
module imports bitsandbytes only to read a half that was saved.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from .placeholders import unwrapped

EXTRA = "pip install 'hf_coefsfl[quantized]'"
_WEIGHTS = ("Int8Params", "Params4bit")
_STATES = ("MatmulLtState", "QuantState")


class OutputShape(nn.Module):
    """What stands for a quantised layer on the meta device: it knows the shape of the output."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.out_features = int(layer.out_features)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of the layer's output and the dtype of its input."""
        return x.new_empty(*x.shape[:-1], self.out_features)


def is_quantised(weight: object) -> bool:
    """Whether a parameter is one of bitsandbytes."""
    return type(weight).__name__ in _WEIGHTS


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names and the layers with quantised weights."""
    for name, module in model.named_modules():
        if is_quantised(module._parameters.get("weight")):
            yield name, module


def states(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a layer that hold its scales; clones share them, as they share tensors."""
    return {name: value for name, value in vars(module).items() if type(value).__name__ in _STATES}


def without_quantised(twin: nn.Module, original: nn.Module) -> nn.Module:
    """Return a copy of a module on the meta device in which quantised layers only know their shapes."""
    for name, layer in list(quantised_layers(original)):
        if not name:
            return OutputShape(layer)
        twin.set_submodule(name, OutputShape(layer))
    return twin


def scales(layer: Any) -> dict[str, Tensor]:
    """Return what has to be kept beside the weight of a layer, under the names that transformers writes."""
    if type(layer.weight).__name__ == "Int8Params":
        return {"SCB": layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB}
    return {f"weight.{name}": t for name, t in layer.weight.quant_state.as_dict(packed=True).items()}


def inner_tensors(t: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a tensor is made of: those inside one of torchao, else itself."""
    if not is_traceable_wrapper_subclass(t):
        yield t
    else:
        for name in t.__tensor_flatten__()[0]:
            yield from inner_tensors(getattr(t, name))


def beside_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the scales of all layers, with their names."""
    for path, layer in quantised_layers(model):
        yield from ((f"{path}.{name}", t) for name, t in scales(layer).items())


def scale_nbytes(model: nn.Module) -> int:
    """Return the bytes that the scales of all layers take in memory."""
    held: dict[int, Tensor] = {}
    for _, layer in quantised_layers(model):
        if type(layer.weight).__name__ == "Int8Params":
            tensors = list(scales(layer).values())
        else:
            state = layer.weight.quant_state
            parts = [state, state.state2] if state.nested else [state]
            tensors = [t for part in parts for t in (part.absmax, part.code, part.offset) if t is not None]
        held |= {id(t): t for t in tensors}
    return sum(t.nbytes for t in held.values())


def bits_of(model: nn.Module) -> str | None:
    """Return what quantised weights are kept as, such as "int8" or "nf4"; None if there are none."""
    for _, layer in quantised_layers(model):
        state = getattr(layer.weight, "quant_state", None)
        return "int8" if state is None else str(state.quant_type)
    return "int8 (torchao)" if _wrapped(model) else None


def numel(parameter: Tensor) -> int:
    """Return the number of weights in a parameter; a byte of a 4-bit one holds two."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else int(state.shape.numel())


# ---- Refusals ----


def prepare_quantised(model: nn.Module) -> None:
    """Refuse quantised models that cannot be split, and have the others compute in one way."""
    method = quantisation(model)
    kind = getattr(getattr(unwrapped(model).config, "quantization_config", None), "quant_type", None)
    if method == "torchao" and type(kind).__name__ != "Int8WeightOnlyConfig":
        method = f"torchao with {type(kind).__name__}"
    if method not in (None, "bitsandbytes", "torchao"):
        raise ValueError(
            f"The model is quantised by {method}: whether its halves share and train through such weights is not "
            "known. Load the model with BitsAndBytesConfig(load_in_8bit=True) or (load_in_4bit=True, "
            "bnb_4bit_quant_type='nf4'), with TorchAoConfig(Int8WeightOnlyConfig()), or without quantisation."
        )
    for name, layer in quantised_layers(model):
        weight = layer.weight
        if type(weight).__name__ == "Int8Params":
            if weight.dtype != torch.int8:
                raise ValueError(
                    f"The weight of {name} is {weight.dtype}, not 8-bit, by llm_int8_has_fp16_weight=True. Load the "
                    "model without it."
                )
            # It would say once for each product that inputs are cast to float16.
            logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        elif getattr(weight.quant_state, "packing_format_for_cpu", False):
            raise ValueError(
                f"The weight of {name} is packed for inference on this CPU and cannot be trained through: "
                "bitsandbytes does that in the first evaluation without gradients. Load the model anew, and split it "
                "or make the trainer before you evaluate it."
            )
        elif weight.dtype != torch.uint8:
            raise ValueError(
                f"The weight of {name} is stored as {weight.dtype} (bnb_4bit_quant_storage), which only FSDP needs. "
                "Load the model without it."
            )
        else:
            layer.support_avx512bf16_for_cpu = False  # packing would change the weights that the halves share


def quantisation(model: nn.Module) -> str | None:
    """Return how a model was quantised, such as "bitsandbytes"; None: not at all."""
    method = _quantisation_of(getattr(unwrapped(model), "config", None))
    return "bitsandbytes" if method is None and any(True for _ in quantised_layers(model)) else method


def _quantisation_of(config: Any) -> str | None:
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found.quant_method
    return str(getattr(method, "value", method))


def check_trained(model: nn.Module, names: Collection[str]) -> None:
    """Refuse to train modules of these names in full if their weights are quantised."""
    quantised = [name for name, _ in quantised_layers(model)] + _wrapped(model)
    inside = [q for q in quantised if any(f".{q}.".endswith(f".{n}.") or f".{n}." in f".{q}." for n in names)]
    if inside:
        raise ValueError(
            f"The weights of {', '.join(inside[:2])}{' ...' * (len(inside) > 2)} are quantised, and integers cannot be "
            f"trained. Load the model with BitsAndBytesConfig(..., llm_int8_skip_modules={sorted(names)}), or "
            "TorchAoConfig(..., modules_to_not_convert=...), or choose head='lora' or 'frozen'."
        )


def _wrapped(model: nn.Module) -> list[str]:
    """Return the names of the layers whose weights are of torchao."""
    weights = {name: module._parameters.get("weight") for name, module in model.named_modules()}
    return [name for name, weight in weights.items() if is_traceable_wrapper_subclass(weight)]


# ---- Halves in folders ----


def check_can_be_saved(model: nn.Module) -> None:
    """Refuse to save quantised layers that nothing in the folder would tell of."""
    wrapped = _wrapped(model)
    if wrapped:
        raise ValueError(
            f"The weight of {wrapped[0]} is quantised by torchao, of which a half cannot be saved. Quantise the model "
            "with bitsandbytes, or keep the half in memory."
        )
    layers = [name for name, _ in quantised_layers(model)]
    if layers and _quantisation_of(getattr(unwrapped(model), "config", None)) is None:
        raise ValueError(
            f"{layers[0]} is quantised, but the model's config has no quantization_config to load it by. Quantise the "
            "model with from_pretrained(..., quantization_config=BitsAndBytesConfig(...))."
        )


def quantise_skeleton(model: PreTrainedModel, folder: Path) -> None:
    """Give a model on the meta device the quantised layers of its config."""
    method = _quantisation_of(model.config)
    if method is None:
        return
    if method != "bitsandbytes":
        raise ValueError(f"{folder} holds a half that is quantised by {method}; only bitsandbytes can be read.")
    check_installed(f"The half in {folder}")
    from transformers.quantizers import AutoHfQuantizer

    try:
        quantizer = AutoHfQuantizer.from_config(model.config.quantization_config, pre_quantized=True)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"The quantization_config of {folder} cannot be read ({error}).") from error
    quantizer.preprocess_model(model, device_map=None)
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer


def check_installed(request: str) -> None:
    """Refuse a request for quantised weights if bitsandbytes is missing."""
    from importlib.util import find_spec

    if find_spec("bitsandbytes") is None:
        raise ValueError(f"{request} needs bitsandbytes: {EXTRA}.")


def fill_quantised(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put loaded weights and scales into the quantised layers of a half; what does not fit is a ValueError."""
    for path, layer in list(quantised_layers(model)):
        parts = {name.removeprefix(f"{path}."): t for name, t in tensors.items() if name.startswith(f"{path}.")}
        parts.pop("bias", None)
        try:
            layer.weight = _read_weight(layer, parts)
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError) as error:
            raise ValueError(
                f"{path}.weight, which is quantised, cannot be read ({type(error).__name__}: {error}). Copy or write "
                "the half anew."
            ) from error
    prepare_quantised(model)


def _read_weight(layer: Any, parts: dict[str, Tensor]) -> nn.Parameter:
    """Return the weight of a layer. The kernels trust sizes, so these are checked."""
    import bitsandbytes as bnb

    weight, shape = parts.pop("weight"), (layer.out_features, layer.in_features)
    if type(layer.weight).__name__ == "Int8Params":
        _expect("weight", weight, torch.int8, *shape)
        _expect("SCB", parts["SCB"], torch.float32, shape[0])
        return bnb.nn.Int8Params(weight, requires_grad=False, CB=weight, SCB=parts["SCB"])
    count = shape[0] * shape[1]
    stats = {name.removeprefix("weight."): t for name, t in parts.items()}
    loaded = bnb.nn.Params4bit.from_prequantized(weight, stats, device="cpu", module=layer)
    state = loaded.quant_state
    if tuple(state.shape) != shape or state.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"it is {state.dtype} of shape {tuple(state.shape)} instead of {shape}")
    if state.quant_type not in ("nf4", "fp4"):
        raise ValueError(f"quant_type is {state.quant_type!r}")
    blocks = ceil(count / _block_size(state.blocksize))
    _expect("weight", weight, torch.uint8, ceil(count / 2), 1)
    _expect("quant_map", state.code, torch.float32, 16)
    _expect("absmax", state.absmax, torch.uint8 if state.nested else torch.float32, blocks)
    if state.nested:
        _expect("nested_absmax", state.state2.absmax, torch.float32, ceil(blocks / _block_size(state.state2.blocksize)))
        _expect("nested_quant_map", state.state2.code, torch.float32, 256)
        _expect("nested_offset", state.offset, torch.float32)
        if state.state2.dtype != torch.float32:
            raise ValueError(f"nested_dtype is {state.state2.dtype}")
    return loaded


def _block_size(value: Any) -> int:
    if type(value) is not int or value not in (32, 64, 128, 256, 512, 1024, 2048, 4096):
        raise ValueError(f"blocksize is {value!r}")
    return value


def _expect(name: str, t: Tensor, dtype: torch.dtype, *shape: int) -> None:
    if t.dtype != dtype or tuple(t.shape) != shape:
        raise ValueError(f"{name} is {t.dtype} of shape {tuple(t.shape)} instead of {dtype} of shape {shape}")
    if t.is_floating_point() and not t.isfinite().all():
        raise ValueError(f"{name} holds NaN or infinity")
