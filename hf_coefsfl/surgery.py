"""Turning clones of a model into its halves: stopping, passing through and injecting at the blocks.

A clone shares every tensor with its model. What changes is the class of some of its modules, so
that the attributes a model's own loop reads from its blocks survive; nothing is stored on them
between calls. What a server's forward pass injects travels in a context variable.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .block_arguments import graft, named_arguments, replace_arguments

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_UNCALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_HIDDEN = "hidden"  # marks the hidden state in the template of a block's output


@dataclass(frozen=True)
class Cut:
    """Where a model is cut and what crosses there besides the hidden state.

    `shipped` maps the path of an argument of the block at the cut (`position_bias`,
    `input_dimensions.0`) that the server cannot rebuild to its kind, "tensor" or "int".
    `crossing` names further model inputs that must cross as they are. `templates` holds, for each
    block of the client, the structure of its output.
    """

    blocks: str
    index: int
    num_blocks: int
    templates: tuple[Any, ...]
    shipped: dict[str, str] = field(default_factory=dict)
    crossing: tuple[str, ...] = ()


class CutReached(Exception):
    """Stops a forward pass at the cut and carries what the block there was called with."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__("the forward pass reached the cut")
        self.arguments = arguments


class RandomState:
    """The state of the random number generators that a forward pass on `device` draws from."""

    def __init__(self, device: torch.device) -> None:
        self._cpu = torch.get_rng_state()
        self._numpy = np.random.get_state()  # SpecAugment of the audio models
        self._device = device if device.type not in ("cpu", "meta") else None
        if self._device is not None:
            self._accelerator = torch.get_device_module(self._device).get_rng_state(self._device)

    def restore(self) -> None:
        """Put the generators back to where they were."""
        torch.set_rng_state(self._cpu)
        np.random.set_state(self._numpy)
        if self._device is not None:
            torch.get_device_module(self._device).set_rng_state(self._accelerator, self._device)


@dataclass
class Injection:
    """What enters a server's forward pass at the cut, and whether it got there."""

    activations: Tensor
    arguments: dict[str, Any] = field(default_factory=dict)
    random_state: RandomState | None = None
    reached: bool = False


_injection: ContextVar[Injection | None] = ContextVar("injection", default=None)


@contextmanager
def injecting(injection: Injection) -> Iterator[Injection]:
    """Make `injection` what the block at the cut receives in the forward passes run inside."""
    token = _injection.set(injection)
    try:
        yield injection
    finally:
        _injection.reset(token)


class _Stop(nn.Module):
    """The block at the cut of a client."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise CutReached(named_arguments(self, args, kwargs))


class _Inject(nn.Module):
    """The block at the cut of a server.

    Its hidden state is swapped before the block's own call: a hook would run inside the
    recomputation of gradient checkpointing, after the arguments were recorded.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        injection = _injection.get()
        if injection is not None:
            named = named_arguments(self, args, kwargs)
            hidden = next(iter(named))
            tops = {path.split(".", 1)[0] for path in injection.arguments}
            new = {top: graft(named.get(top), top, injection.arguments) for top in tops}
            args, kwargs = replace_arguments(self, args, kwargs, new | {hidden: injection.activations})
            injection.reached = True
            if injection.random_state is not None:
                injection.random_state.restore()
        return super().__call__(*args, **kwargs)


class _Absent(nn.Module):
    """A module of the server in a client."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"The client's forward pass never reached the cut but {type(self).__name__}, which is the server's. "
            "Something skips blocks (layer drop, early exit): switch it off."
        )


class _PassThrough(nn.Module):
    """A block of the client in a server: returns its input in the structure of its output.

    The last one before the cut already hands over the smashed data. The block at the cut would
    swap it in anyway, but timm checkpoints around its blocks' calls: recomputing such a call finds
    no injection, only the input that was recorded.
    """

    template: Any
    before_cut: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hidden = next(iter(named_arguments(self, args, kwargs).values()))
        injection = _injection.get()
        if self.before_cut and injection is not None:
            hidden = injection.activations
            if injection.random_state is not None:
                injection.random_state.restore()
        return _fill(self.template, hidden)


def output_template(output: Any) -> Any:
    """The structure of a block's output as JSON: its first tensor is the hidden state, others are left out."""
    if isinstance(output, Tensor):
        return _HIDDEN
    if isinstance(output, (tuple, list)):
        return [output_template(output[0])] + [_without_tensors(item) for item in output[1:]]
    raise ValueError(f"A block returned {type(output).__name__}; a tensor or a tuple that starts with one is needed.")


def _without_tensors(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_without_tensors(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) else None


def _fill(template: Any, hidden: Tensor) -> Any:
    if isinstance(template, (tuple, list)):
        return tuple(_fill(item, hidden) for item in template)
    return hidden if template == _HIDDEN else template


class _Hollow(nn.Module):
    """A module of the client in a server: returns zeros of the shape that it would return.

    The shape comes from a twin on the meta device, which takes neither memory nor time. A forward
    that needs values there, or returns other things than floats, falls back to its own computation,
    with the modules inside it hollow and weights of zero.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        injection, twin = _injection.get(), vars(self)["twin"]
        device = injection.activations.device if injection is not None else torch.device("cpu")
        dtype = next((p.dtype for p in twin.parameters() if p.is_floating_point()), torch.float32)

        def to_meta(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            # Autocast does not reach the meta device: the inputs take the dtype of the weights.
            return torch.empty_like(value, device="meta", dtype=dtype if value.is_floating_point() else value.dtype)

        def to_zeros(value: Any) -> Any:
            return torch.zeros(value.shape, dtype=value.dtype, device=device) if isinstance(value, Tensor) else value

        try:
            with torch.no_grad():
                output = twin(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))
        except Exception:  # whatever it is, the module's own computation meets it too if it is real
            return super().__call__(*args, **kwargs)
        if any(isinstance(t, Tensor) and not t.is_floating_point() for t in tree_leaves(output)):
            return super().__call__(*args, **kwargs)
        return tree_map(to_zeros, output)


# --- clones and halves ---------------------------------------------------------------------------


def clone(model: nn.Module) -> nn.Module:
    """A copy of the modules of `model` that shares all its tensors."""
    return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *_loose_tensors(model))})


def make_client(model: nn.Module, cut: Cut, kept: set[int]) -> nn.Module:
    """Turn `model` in place into a client half that keeps the parameters whose ids are in `kept`."""
    container = model.get_submodule(cut.blocks)
    for i, (name, block) in enumerate(list(container._modules.items())):
        if i == cut.index:
            _subclass(_emptied(block), _Stop)
        elif i > cut.index:
            del container._modules[name]
    _drop_modules(model, kept)
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and id(p) not in kept:
                module._parameters[name] = None
    return model


def make_server(model: nn.Module, cut: Cut, kept: set[int]) -> nn.Module:
    """Turn `model` in place into a server half that keeps the parameters whose ids are in `kept`."""
    pass_through(model, cut)
    _subclass(list(model.get_submodule(cut.blocks).children())[cut.index], _Inject)
    modules = list(model.modules())
    foreign = [m for m in modules if _holds_none(m, kept) and not isinstance(m, _UNCALLED)]
    twins = [_meta_twin(m) for m in foreign]
    for parent in modules:
        for name, child in list(parent._modules.items()):
            if child is not None and _is_leaf(child) and any(child is m for m in foreign):
                _replace(parent, name, child)  # PEFT must not find it; larger modules stay registered
    for module in modules:
        _zero_parameters(module, kept)
    for module, twin in zip(foreign, twins):
        if _is_leaf(module):
            module._buffers = {name: t for name, t in module._buffers.items() if name in twin._parameters}
        vars(module)["twin"] = twin
        _subclass(module, _Hollow)
    return model


def make_probe(model: nn.Module, cut: Cut) -> nn.Module:
    """Turn `model` in place into one that passes through the client's blocks and stops at the cut."""
    pass_through(model, cut)
    _subclass(list(model.get_submodule(cut.blocks).children())[cut.index], _Stop)
    return model


def pass_through(model: nn.Module, cut: Cut) -> None:
    """Turn the client's blocks in `model` into pass-throughs without tensors or modules."""
    for i, block in enumerate(list(model.get_submodule(cut.blocks).children())[: cut.index]):
        _subclass(_emptied(block), _PassThrough)
        vars(block).update(template=cut.templates[i], before_cut=i == cut.index - 1)


def cut_path(half: nn.Module) -> str:
    """Path of the list of blocks in a half, wherever a wrapper has moved it."""
    path = next(path for path, m in half.named_modules() if isinstance(m, (_Stop, _Inject)))
    return path.rpartition(".")[0]


def _subclass(module: nn.Module, behaviour: type[nn.Module]) -> None:
    """Give one module object the `__call__` of `behaviour` on top of its own class."""
    own = type(module)
    module.__class__ = type(f"{behaviour.__name__.strip('_')}{own.__name__}", (behaviour, own), {})


def _emptied(block: nn.Module) -> nn.Module:
    """`block` without tensors; its modules stay readable as attributes but are no longer registered.

    PEFT finds the modules to adapt by their registered names: a half must not get adapters for
    blocks that it does not have.
    """
    for module in block.modules():
        module._parameters = dict.fromkeys(module._parameters)
        module._buffers = dict.fromkeys(module._buffers)
    for name, child in list(block._modules.items()):
        _replace(block, name, child)
    return block


def _replace(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Put `module` in the place of a child, unregistered unless the parent is a list of modules."""
    if isinstance(parent, _CONTAINERS):
        parent._modules[name] = module
    else:
        del parent._modules[name]
        vars(parent)[name] = module


def _drop_modules(parent: nn.Module, kept: set[int]) -> None:
    for name, child in list(parent._modules.items()):
        if child is not None and _holds_none(child, kept):
            _subclass(_emptied(child), _Absent)
            _replace(parent, name, child)
        elif child is not None:
            _drop_modules(child, kept)


def _holds_none(module: nn.Module, kept: set[int]) -> bool:
    """Whether a module has parameters and none of them is kept."""
    ids = {id(p) for p in module.parameters()}
    return bool(ids) and not ids & kept


def _is_leaf(module: nn.Module) -> bool:
    return not module._modules or set(module._modules) == {"parametrizations"}


def _meta_twin(module: nn.Module) -> nn.Module:
    """A copy of a module on the meta device; its weights are never held twice."""
    meta: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), False) for p in module.parameters()}
    meta |= {id(t): t.detach().to("meta") for t in _loose_tensors(module)}
    twin = copy.deepcopy(module, meta).eval()
    for m in twin.modules():
        m._forward_hooks.clear()
        m._forward_pre_hooks.clear()
    return twin


def _loose_tensors(module: nn.Module) -> list[Tensor]:
    """The tensors of a module that are not parameters: buffers and plain attributes."""
    plain = [value for m in module.modules() for value in vars(m).values() if isinstance(value, Tensor)]
    return [*module.buffers(), *plain]


def _zero_parameters(module: nn.Module, kept: Iterable[int]) -> None:
    """Replace the parameters of a module itself that are not kept by zeros that take no memory."""
    for name, p in list(module._parameters.items()):
        if p is not None and id(p) not in kept:
            del module._parameters[name]
            device = "cpu" if p.device.type == "meta" else p.device
            module.register_buffer(name, torch.zeros((), dtype=p.dtype, device=device).expand(p.shape), persistent=False)
