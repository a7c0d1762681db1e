"""Trained weights in float32 over a frozen bfloat16 model: most steps of training are too small for bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.utils._pytree import tree_map


def train_in_float32(model: nn.Module) -> int:
    """Turn trained bfloat16 weights into float32 in place; return how many tensors they are.

    A model of which everything is trained becomes a float32 model. Else the modules that own trained weights become
    float32 modules, between which activations stay bfloat16.
    """
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad and p.dtype == torch.bfloat16]
    if trained and all(p.requires_grad for p in parameters):
        model.float()
    elif trained:
        owners = _owners(model, torch.bfloat16)
        beside = [t for m in owners for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
        for t in (*trained, *beside):
            if t.dtype == torch.bfloat16:
                t.data = t.data.float()
        _bridge(owners)
    return len(trained)


def bridge_dtypes(model: nn.Module) -> None:
    """Let the float32 modules of a half that was saved after `train_in_float32` take bfloat16 again."""
    if any(p.dtype == torch.bfloat16 for p in model.parameters()):
        _bridge(_owners(model, torch.float32))


def adapter_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers that PEFT put in, with all that is in them but the layer that each adapts."""
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            yield layer
            for name, child in layer.named_children():
                if name != "base_layer":
                    yield from child.modules()


def _owners(model: nn.Module, dtype: torch.dtype) -> list[nn.Module]:
    """Return the modules that own trained weights of a dtype. PEFT's compute in the dtype of theirs already."""
    adapters = {id(m) for m in adapter_modules(model)}
    return [
        m
        for m in model.modules()
        if id(m) not in adapters and any(p.requires_grad and p.dtype == dtype for p in m.parameters(recurse=False))
    ]


def _bridge(modules: list[nn.Module]) -> None:
    for module in modules:
        module.register_forward_pre_hook(_enter, with_kwargs=True)
        module.register_forward_hook(_leave)


def _enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map(_widened, (args, kwargs))


def _leave(_: nn.Module, args: Any, output: Any) -> Any:
    return tree_map(_narrowed, output)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _narrowed(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, Tensor) and value.dtype == torch.float32 else value
