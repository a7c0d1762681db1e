"""Turning clones of a model into its halves. A clone has its own modules and the model's tensors."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import members
from .quantized import states, without_quantised
from .stand_ins import Absent, Hollow, Inject, PassThrough, Stop

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_UNCALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True)
class Cut:
    """Where a model is cut and what crosses there besides the hidden state.

    `shipped` maps the path of an argument of the block at the cut (`position_bias`,
    `input_dimensions.0`) that the server cannot rebuild to its kind, "tensor" or "int".
    `crossing` names further model inputs that must cross as they are. `templates` holds, for each
    block of the client, the structure of its output. `handover` is the path of a module in another
    list that returns the hidden state at the cut (XLM has a list of attentions and one of norms).
    `in_shape` is False if the last block before the cut returns another shape than the block at the
    cut gets (PVT embeds patches anew between its stages).
    """

    blocks: str
    index: int
    num_blocks: int
    templates: tuple[Any, ...]
    shipped: dict[str, str] = field(default_factory=dict)
    crossing: tuple[str, ...] = ()
    handover: str | None = None
    in_shape: bool = True


def clone(model: nn.Module) -> nn.Module:
    """A copy of the modules of `model` that shares all its tensors."""
    tensors = {id(t): t for t in (*model.parameters(), *_loose_tensors(model))}
    return copy.deepcopy(model, tensors | _shared_states(model) | _empty_tables(model))


def make_client(model: nn.Module, cut: Cut, owned: set[int]) -> nn.Module:
    """Turn `model` in place into a client half that owns the parameters with the ids `owned`."""
    dropped = _emptied(_block_at_cut(model, cut), Stop)
    drop_blocks(model.get_submodule(cut.blocks), cut.index + 1)
    dropped += _drop_modules(model, owned)
    _forget_tensors(dropped, model)
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and id(p) not in owned:
                module._parameters[name] = None
    return model


def make_server(model: nn.Module, cut: Cut, owned: set[int]) -> nn.Module:
    """Turn `model` in place into a server half that owns the parameters with the ids `owned`."""
    pass_through(model, cut)
    _subclass(_block_at_cut(model, cut), Inject)
    modules, handover = list(model.modules()), model.get_submodule(cut.handover) if cut.handover else None
    foreign = [m for m in modules if _holds_none(m, owned) and not isinstance(m, _UNCALLED)]
    twins = [_meta_twin(m) for m in foreign]
    leaves = {id(m) for m in foreign if _is_leaf(m)}
    for parent in modules:
        for name, child in list(parent._modules.items()):
            if child is not None and id(child) in leaves:
                _replace(parent, name, child)  # PEFT must not find it; larger modules stay registered
    for module in modules:
        _zero_parameters(module, owned)
    for module, twin in zip(foreign, twins, strict=True):
        if id(module) in leaves:
            module._buffers = {name: t if name in twin._parameters else None for name, t in module._buffers.items()}
        vars(module).update(twin=twin, outputs={}, before_cut=module is handover, **dict.fromkeys(states(module)))
        _subclass(module, Hollow)
    return model


def make_probe(model: nn.Module, cut: Cut) -> nn.Module:
    """Turn `model` in place into one that passes through the client's blocks and stops at the cut."""
    pass_through(model, cut)
    _subclass(_block_at_cut(model, cut), Stop)
    return model


def pass_through(model: nn.Module, cut: Cut) -> None:
    """Turn the client's blocks in `model` into pass-throughs without tensors or modules."""
    dropped: list[nn.Module] = []
    for i, block in enumerate(list(members(model.get_submodule(cut.blocks)).values())[: cut.index]):
        dropped += _emptied(block, PassThrough)
        vars(block).update(template=cut.templates[i], before_cut=cut.in_shape and i == cut.index - 1)
    _forget_tensors(dropped, model)


def cut_path(half: nn.Module) -> str:
    """Path of the list of blocks in a half, wherever a wrapper has moved it."""
    path, block = next((path, m) for path, m in half.named_modules() if isinstance(m, (Stop, Inject)))
    return path.rsplit(".", vars(block)["depth"])[0]


def handover_path(half: nn.Module) -> str | None:
    """Path of the module outside the list of blocks that hands over the smashed data, if a server has one."""
    hollow = ((path, m) for path, m in half.named_modules() if isinstance(m, Hollow))
    return next((path for path, m in hollow if vars(m)["before_cut"]), None)


def drop_blocks(container: nn.Module, start: int) -> None:
    """Delete the blocks of a list from one on; lists inside it stay, if need be empty."""
    for path in list(members(container))[start:]:
        parent, _, name = path.rpartition(".")
        del container.get_submodule(parent)._modules[name]


def _block_at_cut(model: nn.Module, cut: Cut) -> nn.Module:
    path, block = list(members(model.get_submodule(cut.blocks)).items())[cut.index]
    vars(block)["depth"] = len(path.split("."))
    return block


def _subclass(module: nn.Module, behaviour: type[nn.Module]) -> None:
    """Give one module object the `__call__` of `behaviour` on top of its own class."""
    module.__class__ = _combined(behaviour, type(module))  # type: ignore[arg-type]  # classes can be hashed


@cache
def _combined(behaviour: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    """Return one class for all modules of a kind: the compiler counts the classes that it meets."""
    return type(f"{behaviour.__name__}{own.__name__}", (behaviour, own), {"own_forward": own.forward})


def _emptied(module: nn.Module, behaviour: type[nn.Module]) -> list[nn.Module]:
    """Let `behaviour` stand in for a module; return the modules that it no longer needs.

    They stay readable as attributes but are no longer registered. PEFT finds the modules to adapt
    by their registered names: a half must not get adapters for blocks that it does not have.
    """
    inner = list(module.modules())[1:]
    module._parameters = dict.fromkeys(module._parameters)
    module._buffers = dict.fromkeys(module._buffers)
    vars(module).update(module._modules)
    module._modules = {}
    _subclass(module, behaviour)
    return inner


def _forget_tensors(dropped: list[nn.Module], model: nn.Module) -> None:
    """Take the tensors from modules that nothing else in `model` uses (VeRA's blocks share some)."""
    alive = {id(m) for m in model.modules()}
    for module in dropped:
        if id(module) not in alive:
            module._parameters = dict.fromkeys(module._parameters)
            module._buffers = dict.fromkeys(module._buffers)
            vars(module).update(dict.fromkeys(states(module)))


def _replace(parent: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place of a child, unregistered unless the parent is a list of modules."""
    if isinstance(parent, _CONTAINERS):
        parent._modules[name] = module
    else:
        del parent._modules[name]
        vars(parent)[name] = module


def _drop_modules(parent: nn.Module, owned: set[int]) -> list[nn.Module]:
    """Drop what is the server's alone from a client; return the modules that are no longer needed."""
    dropped: list[nn.Module] = []
    for name, child in list(parent.named_children()):
        if _holds_none(child, owned):
            dropped += _emptied(child, Absent)
            _replace(parent, name, child)
        else:
            dropped += _drop_modules(child, owned)
    return dropped


def _holds_none(module: nn.Module, owned: set[int]) -> bool:
    """Whether a module has parameters and none of them is in `owned`."""
    ids = {id(p) for p in module.parameters()}
    return bool(ids) and not ids & owned


def _is_leaf(module: nn.Module) -> bool:
    return not module._modules or set(module._modules) == {"parametrizations"}


def _meta_twin(module: nn.Module) -> nn.Module:
    """A copy of a module on the meta device; its weights are never held twice."""
    meta: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), False) for p in module.parameters()}
    meta |= {id(t): t.detach().to("meta") for t in _loose_tensors(module)}
    memo = meta | _shared_states(module) | _empty_tables(module)
    twin = without_quantised(copy.deepcopy(module, memo), module).eval()
    for m in twin.modules():
        m._forward_hooks.clear()
        m._forward_pre_hooks.clear()
    return twin


def _shared_states(module: nn.Module) -> dict[int, Any]:
    """The scales of quantised layers, for a copy of the modules to share."""
    return {id(state): state for m in module.modules() for state in states(m).values()}


def _empty_tables(module: nn.Module) -> dict[int, Any]:
    """New tables for the empty ones of modules (hooks, mostly): half of the time of a copy goes into them."""
    tables = (value for m in module.modules() for value in vars(m).values() if type(value) in (dict, OrderedDict, set))
    return {id(table): type(table)() for table in tables if not table}


def _loose_tensors(module: nn.Module) -> list[Tensor]:
    """The tensors of a module that are not parameters: buffers and plain attributes."""
    plain = [value for m in module.modules() for value in vars(m).values() if isinstance(value, Tensor)]
    return [*module.buffers(), *plain]


def _zero_parameters(module: nn.Module, owned: Container[int]) -> None:
    """Replace the parameters of a module itself that are not owned by zeros that take no memory."""
    for name, p in list(module._parameters.items()):
        if p is not None and id(p) not in owned:
            del module._parameters[name]
            device = "cpu" if p.device.type == "meta" else p.device
            module.register_buffer(
                name, torch.zeros((), dtype=p.dtype, device=device).expand(p.shape), persistent=False
            )
