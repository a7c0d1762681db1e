"""Attention that can be differentiated twice, and models that have another."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...split.placeholders import unwrapped

_ONCE = ("flash", "flex")  # in the names of attention whose kernels have no second derivative


def differentiable_attention() -> AbstractContextManager[Any]:
    """Run scaled-dot-product attention as plain matrix products: the fused kernels have no second derivative."""
    return sdpa_kernel(SDPBackend.MATH)


def check_attention(model: nn.Module, title: str) -> None:
    """Refuse a model whose attention cannot be differentiated twice, for the method of that title."""
    config = unwrapped(model).config
    for part in (config, config.get_text_config()):
        name = getattr(part, "_attn_implementation", None)
        if any(kind in str(name) for kind in _ONCE):
            raise ValueError(
                f"{title} differentiates passes of the server twice, and the kernels of attn_implementation={name!r} "
                "have no second derivative. Load the model with attn_implementation='sdpa' or 'eager', or use another "
                "method."
            )
