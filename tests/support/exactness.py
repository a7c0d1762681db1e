"""The outcome of a pass, and the comparison of two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_coefsfl.split import SplitModel

Result = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


def outcome(model: nn.Module, run: Callable[[], Any]) -> Result:
    """Outputs and gradients of one seeded forward and backward pass."""
    torch.manual_seed(7)
    np.random.seed(7)
    output = run()
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return {key: value.detach() for key, value in output.items() if isinstance(value, torch.Tensor)}, gradients


def assert_equal(got: Result, expected: Result) -> None:
    """Outputs to the last bit; gradients up to the order in which two paths are added."""
    assert "loss" in expected[0] and len(expected[0]) > 1
    assert got[0].keys() == expected[0].keys()
    for key, value in expected[0].items():
        assert torch.equal(got[0][key], value), f"{key} differs by {(got[0][key] - value).abs().max():.1e}"
    assert got[1].keys() == expected[1].keys()
    assert got[1]
    for name, value in expected[1].items():
        torch.testing.assert_close(got[1][name], value, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def assert_exact(model: Any, split: SplitModel, batch: dict[str, Any]) -> None:
    """Equal in training mode, outputs and gradients."""
    split.train()
    expected = outcome(model, lambda: model(**batch))
    assert_equal(outcome(model, lambda: split.server(split.client(**batch))), expected)
