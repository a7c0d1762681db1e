"""Models without weights: tensors with a shape, a layout and a dtype, and without values.

PyTorch's fake tensors are such tensors. Here only what depends on a weight is fake. Token ids, masks, positions and
adapters are real, so that what a model asks of their values is answered as usual. `Shapes` hands the operations on fake
tensors to the kernels of the meta device itself: the mode of PyTorch does so too, but takes ten times as long. Most of
those kernels are written in Python, so what one has given for some shapes is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

_aten = torch.ops.aten
CPU, _META = torch.device("cpu"), torch.device("meta")
SMALL = 2**20  # entries up to which a new tensor has values
DEVICE_OF = torch.ops.prim.device.default  # PyTorch asks this of fake tensors more often than it does anything else


class _Mode(FakeTensorMode):
    """The mode that all fake tensors here belong to, copies of modules included."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Mode:
        return self


_MODE = _Mode(allow_non_fake_inputs=True)
_ATTRIBUTES = dict(vars(FakeTensor(_MODE, torch.empty(0, device=_META), CPU)))  # the same for all fake tensors here
_RESULTS: dict[Any, Any] = {}  # the outline of what an operation gives, by its own and that of its arguments


def without_weights(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return the model that `build` makes, with fake tensors for its parameters; buffers have values."""
    with init_empty_weights(include_buffers=False):
        model = build()
    fake: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is None:
                continue
            if id(p) not in fake:  # tied weights stay tied
                fake[id(p)] = nn.Parameter(_fake(torch.empty_like(p, device=_META)), p.requires_grad)
            module._parameters[name] = fake[id(p)]
    return model


def with_trained_values(model: nn.Module) -> None:
    """Give values, zeros, to the fake parameters that are trained, so that they can be saved."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if isinstance(p, FakeTensor) and p.requires_grad:
                module._parameters[name] = nn.Parameter(torch.zeros(p.shape, dtype=p.dtype))


def is_weightless(model: nn.Module) -> bool:
    """Return whether a model has fake parameters."""
    return any(isinstance(p, FakeTensor) for p in model.parameters())


class Watching(TorchDispatchMode):
    """A mode of dispatch that is not compiled, and need not be kept from it at every operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Shapes(Watching):
    """Runs operations on fake tensors, and makes large tensors fake.

    A number that is read from a fake tensor is 0, so code must ask for what is not usual. Two fake tensors are equal:
    they are compared to check that a split model computes what the model computes, which its shapes cannot tell.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation; one on fake tensors gives fake tensors."""
        if func is DEVICE_OF:
            return CPU
        kwargs = kwargs or {}
        tensors = [value for value in _members((*args, *kwargs.values())) if isinstance(value, Tensor)]
        if not any(isinstance(t, FakeTensor) for t in tensors):
            if tensors or not _is_large(args):
                return func(*args, **kwargs)
            kwargs = {name: None if name == "generator" else value for name, value in kwargs.items()}
        elif func is _aten._local_scalar_dense.default:
            return 0.0 if args[0].is_floating_point() else 0
        elif func is _aten.equal.default:
            return all(isinstance(t, FakeTensor) for t in tensors) and args[0].shape == args[1].shape
        if torch.is_inference_mode_enabled():  # composite operations arrive undivided there
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        wanted = kwargs.get("device")
        if wanted is not None or not tensors:
            kwargs = kwargs | {"device": _META}
        if wanted is not None and torch.device(wanted) == _META:
            return _on_meta(func, args, kwargs, stays=True)
        return _remembered(func, args, kwargs)


def _remembered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on shapes, once for all arguments of the same shapes if it makes tensors or changes its first.

    What shares memory with an argument is made anew each time: a view, and operations that do not say so.
    """
    changes = _changes_first(func)
    if not changes and any(r.alias_info is not None for r in func._schema.returns):
        return _on_meta(func, args, kwargs)
    key = func, _outline(args), _outline(tuple(kwargs.items()))
    known = _RESULTS.get(key)
    if known is None:
        result = _on_meta(func, args, kwargs)
        if changes or not _shares_memory(result, (*args, *kwargs.values())):
            _RESULTS[key] = () if changes else _outline(result)
        return result
    return args[0] if changes else _made(known)


@cache
def _changes_first(func: Any) -> bool:
    """Return whether an operation changes values of its first argument, not its shape, and returns it."""
    returns = func._schema.returns
    writes = len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write
    return writes and func._schema.name.endswith("_") and torch.Tag.inplace_view not in func.tags


def _outline(value: Any) -> Any:
    """Return what decides the shapes of a result: of tensors shape, layout and dtype, else the value with its type."""
    if isinstance(value, Tensor):
        return Tensor, value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return type(value), *[_outline(item) for item in value]
    return type(value), value


def _made(outline: Any) -> Any:
    """Return new fake tensors of this outline."""
    kind, *parts = outline
    if kind is Tensor:
        shape, stride, dtype = parts
        return _fake(torch.empty_strided(shape, stride, dtype=dtype, device=_META))
    return kind([_made(part) for part in parts]) if kind in (list, tuple) else parts[0]


def _shares_memory(result: Any, given: Iterable[Any]) -> bool:
    """Return whether results are in memory of each other or of an argument."""
    made, used = (
        [t.untyped_storage()._cdata for t in _members(values) if isinstance(t, Tensor)] for values in ([result], given)
    )
    return len({*made}) < len(made) or not {*used}.isdisjoint(made)


def _on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stays: bool = False) -> Any:
    """Run an operation on shapes; `stays`: its result is asked for on the meta device."""
    real: dict[int, Tensor] = {}  # by their stand-ins: what an operation changes in place is returned
    args = tuple([_enter(value, real) for value in args])
    kwargs = {name: _enter(value, real) for name, value in kwargs.items()}
    with in_kernel_invocation_manager(_MODE):
        result = func(*args, **kwargs)
    return _leave(result, real, stays)


def _enter(value: Any, real: dict[int, Tensor]) -> Any:
    if isinstance(value, FakeTensor) or not isinstance(value, (Tensor, list, tuple)):
        return value
    if not isinstance(value, Tensor):
        return [_enter(item, real) for item in value]
    if value.is_meta:
        return value
    stand_in = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
    real[id(stand_in)] = value
    return stand_in


def _leave(value: Any, real: dict[int, Tensor], stays: bool) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_leave(item, real, stays) for item in value])
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
        return value
    if id(value) in real:
        return real[id(value)]
    return value if stays else _fake(value)


def _members(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values and what is in their lists."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _fake(t: Tensor) -> Tensor:
    """Return `FakeTensor(_MODE, t, CPU)` for a tensor of the meta device, in a quarter of the time."""
    fake = Tensor._make_subclass(FakeTensor, t, t.requires_grad, dispatch_device=True, device_for_backend_keys=CPU)
    torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)
    vars(fake).update(_ATTRIBUTES)
    return fake


def _is_large(args: tuple[Any, ...]) -> bool:
    """Return whether an operation without tensors makes a large one: its size is its only list of numbers."""
    sizes = [a for a in args if isinstance(a, (list, tuple)) and all(isinstance(n, int) for n in a)]
    return any(prod(size) > SMALL for size in sizes)
