"""Who owns which parameter, and what crosses at the cut, by running the model once.

Nothing here knows an architecture. The client's parameters are those that the hidden state at the
cut depends on; the server's are those that the outputs depend on when that state is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .block_arguments import hidden_name, leaves, named_arguments, replace_arguments
from .blocks import members
from .stand_ins import output_template


@dataclass
class Record:
    """One run of the unsplit model: what the block at the cut got and what the blocks before returned.

    `without_graph` are the modules before the cut whose output needs no gradient. `handover` is the
    path of a module in another list whose output is the hidden state at the cut, if there is one;
    `in_shape` says whether the output of the block before has the shape of that state.
    """

    arguments: dict[str, Any] = field(default_factory=dict)
    templates: dict[int, Any] = field(default_factory=dict)
    without_graph: set[str] = field(default_factory=set)
    handover: str | None = None
    in_shape: bool = True
    shape: Any = None  # of the hidden state that the latest block returned
    calls: int = 0
    output: Any = None


@dataclass(frozen=True)
class Ownership:
    """Names of the parameters that each half needs; `shipped` are those behind tensors sent at the cut."""

    client: frozenset[str]
    server: frozenset[str]
    shipped: frozenset[str]


def record_run(
    model: nn.Module,
    container: nn.Module,
    cut: int,
    inputs: dict[str, Any],
    detached: Iterable[str] | None = None,
    handover: str | None = None,
) -> Record:
    """Run `model` and record what happens around the cut.

    With `detached`, the hidden state at the cut (or the output of the module `handover`, from which
    it is made) and the arguments at these paths enter the rest of the model as new leaves of the
    graph, so that nothing after depends on what came before.
    """
    record = Record()
    blocks = list(members(container).values())
    inside = {id(m) for block in blocks[:cut] for m in block.modules()}
    latest: tuple[str, Any] = ("", None)  # the last module outside the client's blocks that returned a tensor

    before_handover: Tensor | None = None

    def enter(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        nonlocal latest
        record.calls += 1
        record.arguments = named_arguments(block, args, kwargs)
        hidden = hidden_name(block, record.arguments)
        parent = model.get_submodule(latest[0].rpartition(".")[0])
        if latest[1] is record.arguments[hidden] and isinstance(parent, nn.ModuleList):
            record.handover = latest[0]
        record.in_shape = record.arguments[hidden].shape == record.shape
        latest = ("", None)
        if detached is None:
            return args, kwargs
        paths = {hidden, *detached}
        new = {name: _detach(value, name, paths) for name, value in record.arguments.items()}
        if before_handover is not None:  # detached there
            record.arguments[hidden] = before_handover
            del new[hidden]
        return replace_arguments(block, args, kwargs, new)

    def leave(path: str, module: nn.Module, _args: Any, output: Any) -> Any:
        nonlocal latest, before_handover
        if not record.calls and isinstance(output, Tensor) and not output.requires_grad:
            record.without_graph.add(path)
        if not record.calls and id(module) not in inside and isinstance(output, Tensor):
            latest = (path, output)
        if path != handover:
            return None
        before_handover = output
        return output.detach().requires_grad_().clone()  # a leaf must not be changed in place

    def keep_template(index: int, output: Any) -> None:
        record.templates[index] = output_template(output)
        record.shape = next(leaf.shape for _, leaf in leaves(output, "") if isinstance(leaf, Tensor))

    with ExitStack() as stack:
        for path, module in model.named_modules():
            if module._parameters:
                stack.callback(module.register_forward_hook(partial(leave, path)).remove)
        for i, block in enumerate(blocks[:cut]):
            stack.enter_context(_watching(block, after=partial(keep_template, i)))
        stack.enter_context(_watching(blocks[cut], before=partial(enter, blocks[cut])))
        record.output = model(**inputs)
    return record


@contextmanager
def _watching(
    block: nn.Module,
    before: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Any]] = lambda args, kwargs: (args, kwargs),
    after: Callable[[Any], None] = lambda output: None,
) -> Iterator[None]:
    """See the arguments and the output of a block; unlike hooks, also if the model calls its `forward` directly."""
    own, forward = vars(block).get("forward"), block.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = before(args, kwargs)
        output = forward(*args, **kwargs)
        after(output)
        return output

    block.forward = watched
    try:
        yield
    finally:
        del block.forward
        if own is not None:
            block.forward = own


def arguments_to_ship(wanted: dict[str, Any], rebuilt: dict[str, Any]) -> dict[str, str]:
    """Paths and kinds of what the block at the cut needs and the server cannot rebuild.

    Ints always cross: they follow the shape of the input (Swin's `input_dimensions`) in ways that
    placeholders passed through the client's blocks do not.
    """
    hidden = next(iter(wanted))
    have = {path: leaf for name, value in rebuilt.items() for path, leaf in leaves(value, name)}
    shipped: dict[str, str] = {}
    for name, value in wanted.items():
        for path, leaf in leaves(value, name):
            if path == hidden:
                continue
            if not isinstance(leaf, Tensor):
                shipped[path] = "int"
            elif not isinstance(have.get(path), Tensor) or not same(leaf, have[path]):
                shipped[path] = "tensor"
    return shipped


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same, bit for bit."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def find_owners(
    model: nn.Module, path: str, cut: int, inputs: dict[str, Any], shipped: dict[str, str], handover: str | None
) -> Ownership:
    """Give each parameter to the half, or the halves, that need it.

    A parameter that is not in the graph belongs to its block if it is in one (an expert without
    tokens). Outside the blocks, one whose module ran under `no_grad` before the cut (RoFormer's
    sinusoids) belongs to both halves, and an unused one (a pooler) goes by its place, before or after
    the list of blocks.
    """
    container = model.get_submodule(path)
    tensors = [p for p, kind in shipped.items() if kind == "tensor"]
    with torch.enable_grad(), all_differentiable(model):
        record = record_run(model, container, cut, inputs, tensors, handover)
        hidden, *_ = record.arguments.values()
        by_path = {p: leaf for name, value in record.arguments.items() for p, leaf in leaves(value, name)}
        behind = _leaves_of_graph(by_path[p] for p in tensors)
        client = _leaves_of_graph([hidden]) | behind
        server = _leaves_of_graph(
            leaf for _, leaf in leaves(plain_output(record.output), "") if isinstance(leaf, Tensor)
        )
    names: dict[str, set[str]] = {"client": set(), "server": set(), "shipped": set()}
    prefixes = [f"{path}.{name}." for name in members(container)]
    past_blocks = False
    for name, p in model.named_parameters():
        module = name.rpartition(".")[0]
        inside = next((i for i, prefix in enumerate(prefixes) if name.startswith(prefix)), None)
        past_blocks = past_blocks or inside is not None
        sides = {side for side, ids in (("client", client), ("server", server)) if id(p) in ids}
        if not sides and inside is None and module in record.without_graph:
            sides = {"client", "server"}
        elif not sides:
            after = inside >= cut if inside is not None else past_blocks
            sides = {"server" if after else "client"}
        for side in sides:
            names[side].add(name)
        if id(p) in behind:
            names["shipped"].add(name)
    return Ownership(*(frozenset(names[side]) for side in ("client", "server", "shipped")))


@contextmanager
def all_differentiable(model: nn.Module) -> Iterator[None]:
    """Let every parameter of `model` require a gradient for a while."""
    flags = [(p, p.requires_grad) for p in model.parameters()]
    for p, _ in flags:
        if p.is_floating_point():
            p.requires_grad_(True)
    try:
        yield
    finally:
        for p, flag in flags:
            p.requires_grad_(flag)


def _detach(value: Any, path: str, paths: set[str]) -> Any:
    if path in paths:
        return value.detach().requires_grad_(value.is_floating_point())
    if isinstance(value, (tuple, list)):
        return type(value)(_detach(item, f"{path}.{i}", paths) for i, item in enumerate(value))
    if isinstance(value, dict):
        return {key: _detach(item, f"{path}.{key}", paths) for key, item in value.items()}
    return value


def _leaves_of_graph(tensors: Iterable[Tensor]) -> set[int]:
    """Ids of the parameters that tensors were computed from."""
    parameters: set[int] = set()
    seen: set[Any] = set()
    todo: list[Any] = []
    for t in tensors:
        if t.grad_fn is not None:
            todo.append(t.grad_fn)
        elif t.requires_grad:
            parameters.add(id(t))
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            parameters.add(id(node.variable))
        todo.extend(parent for parent, _ in node.next_functions)
    return parameters


def plain_output(output: Any) -> Any:
    """The output as a dict, without the caches that a pass-through leaves empty or makes of placeholders."""
    if not hasattr(output, "keys"):
        return output
    return {key: value for key, value in output.items() if key not in ("past_key_values", "mems")}
