"""The arguments of a block's call: naming them, replacing some, and the numbers inside them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from torch import Tensor, nn


def argument_names(block: nn.Module) -> list[str]:
    """Names of the positional arguments of a block; the first is its hidden state."""
    return list(_argument_names(getattr(type(block), "own_forward", type(block).forward)))  # not that of a stand-in


@lru_cache
def _argument_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(forward).parameters.items())[1:]  # without self
    return tuple(name for name, p in parameters if p.kind in kinds)


def named_arguments(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, the hidden state first."""
    names = argument_names(block)
    names += [str(i) for i in range(len(names), len(args))]
    named = dict(zip(names, args, strict=False)) | kwargs
    hidden = hidden_name(block, named)
    return {hidden: named.pop(hidden), **named}


def hidden_name(block: nn.Module, named: dict[str, Any]) -> str:
    """Name of the argument that holds the hidden state: the first of the block's forward."""
    name = (argument_names(block) or ["0"])[0]
    if not isinstance(named.get(name), Tensor):
        raise ValueError(
            f"The first argument {name!r} of {type(block).__name__} is not a tensor of hidden states "
            f"but {type(named.get(name)).__name__}; name another list of blocks with `blocks=`."
        )
    return name


def replace_arguments(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], new: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with some arguments replaced; positional ones stay so, as reentrant checkpointing needs."""
    names = argument_names(block)
    positional = set(names[: len(args)])
    args = tuple(new.get(name, a) for name, a in zip(names, args, strict=False)) + args[len(names) :]
    return args, kwargs | {name: value for name, value in new.items() if name not in positional}


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The tensors and ints inside nested tuples, lists and dicts, by dotted path."""
    if isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}.{i}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, Tensor) or (isinstance(value, int) and not isinstance(value, bool)):
        yield path, value


def graft(value: Any, path: str, new: dict[str, Any]) -> Any:
    """`value` with the leaves named in `new` replaced, or made from them if it has none."""
    if path in new:
        return new[path]
    if isinstance(value, (tuple, list)):
        items = [graft(item, f"{path}.{i}", new) for i, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {key: graft(item, f"{path}.{key}", new) for key, item in value.items()}
    if value is None and f"{path}.0" in new:
        count = next(i for i in range(len(new) + 1) if f"{path}.{i}" not in new)
        return tuple(new[f"{path}.{i}"] for i in range(count))
    return value
