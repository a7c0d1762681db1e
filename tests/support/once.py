"""The check of `split_model`, made once for each kind of model.

It takes half of the time of a split, and most tests split the same few tiny models. `tests/split` checks each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_coefsfl.split import splitting
from hf_coefsfl.split.exactness import Gap
from hf_coefsfl.split.placeholders import unwrapped

Check = Callable[..., Gap | None]
EXACT = 1e-5  # what is further apart is checked anew


def kind(split: Any, inputs: dict[str, Any]) -> tuple[Any, ...]:
    """Return all that tells a split model from another but its weights."""
    inner = unwrapped(split.model)
    adapters = {name: found.to_dict() for name, found in getattr(split.model, "peft_config", {}).items()}
    weights = [(n, type(p), p.shape, p.dtype, p.device, p.requires_grad) for n, p in split.model.named_parameters()]
    modules = [(type(m), getattr(m, "gradient_checkpointing", None)) for m in split.model.modules()]
    given = [(name, getattr(value, "shape", value)) for name, value in inputs.items()]
    config = inner.config.to_json_string(use_diff=False), str(inner.config._attn_implementation)
    place = split.blocks, split.cut, sorted(split.client.cut.shipped), split.client.cut.crossing
    return (config, str(adapters), *map(str, (weights, modules, given, place, torch.is_autocast_enabled("cpu"))))


def once(check: Check) -> Check:
    """Return a check that remembers what it has found to be exact."""
    found: dict[tuple[Any, ...], Gap] = {}

    def checked(split: Any, inputs: dict[str, Any]) -> Gap | None:
        key = kind(split, inputs)
        if key not in found:
            gap = check(split, inputs)
            if gap is None or gap.describe(EXACT) is not None:
                return gap
            found[key] = gap
        return found[key]

    return checked


CHECKS = {name: once(getattr(splitting, name)) for name in ("evaluation_gap", "training_gap")}


def use(patch: Callable[[Any, str, Any], None]) -> None:
    """Have splits checked once for each kind; `patch` is `setattr`, or pytest's for a test."""
    for name, check in CHECKS.items():
        patch(splitting, name, check)
