"""Who owns which parameter, and what crosses at the cut: found by running the model once.

Nothing here knows an architecture. The client's parameters are those that the hidden state at the
cut depends on; the server's are those that the outputs depend on when that state is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .block_arguments import hidden_name, leaves, named_arguments, replace_arguments
from .stand_ins import output_template


@dataclass
class Record:
    """One run of the unsplit model: what the block at the cut got and what the blocks before returned."""

    arguments: dict[str, Any] = field(default_factory=dict)
    templates: dict[int, Any] = field(default_factory=dict)
    calls: int = 0
    output: Any = None


@dataclass(frozen=True)
class Ownership:
    """Names of the parameters that each half needs; `shipped` are those behind tensors sent at the cut."""

    client: frozenset[str]
    server: frozenset[str]
    shipped: frozenset[str]


def record_run(
    model: nn.Module, container: nn.Module, cut: int, inputs: dict[str, Any], detached: Iterable[str] | None = None
) -> Record:
    """Run `model` and record what happens around the cut.

    With `detached`, the hidden state at the cut and the arguments at these paths enter the rest of
    the model as new leaves of the graph, so that nothing after depends on what came before.
    """
    record = Record()
    blocks = list(container.children())

    def enter(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        record.calls += 1
        record.arguments = named_arguments(block, args, kwargs)
        if detached is None:
            return None
        hidden = hidden_name(block, record.arguments)
        paths = {hidden, *detached}
        new = {name: _detach(value, name, paths) for name, value in record.arguments.items()}
        return replace_arguments(block, args, kwargs, new)

    def leave(index: int) -> Any:
        def hook(_block: nn.Module, _args: Any, output: Any) -> None:
            record.templates[index] = output_template(output)

        return hook

    handles = [blocks[cut].register_forward_pre_hook(enter, with_kwargs=True)]
    handles += [block.register_forward_hook(leave(i)) for i, block in enumerate(blocks[:cut])]
    try:
        record.output = model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return record


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


def find_owners(model: nn.Module, path: str, cut: int, inputs: dict[str, Any], shipped: dict[str, str]) -> Ownership:
    """Give each parameter to the half, or the halves, that need it.

    A parameter that the example reaches from neither (a pooler without use, an expert without
    tokens) goes by its place: in the list of blocks by its block, else before or after the list.
    """
    container = model.get_submodule(path)
    tensors = [p for p, kind in shipped.items() if kind == "tensor"]
    with torch.enable_grad(), _all_differentiable(model):
        record = record_run(model, container, cut, inputs, detached=tensors)
        hidden, *_ = record.arguments.values()
        found = {p: leaf for name, value in record.arguments.items() for p, leaf in leaves(value, name)}
        behind = _leaves_of_graph(found[p] for p in tensors)
        client = _leaves_of_graph([hidden]) | behind
        server = _leaves_of_graph(leaf for _, leaf in leaves(_plain(record.output), "") if isinstance(leaf, Tensor))
    names: dict[str, set[str]] = {"client": set(), "server": set(), "shipped": set()}
    members = [f"{path}.{name}" for name in container._modules]
    past_blocks = False
    for name, p in model.named_parameters():
        inside = next((i for i, member in enumerate(members) if name.startswith(member + ".")), None)
        past_blocks = past_blocks or inside is not None
        sides = {side for side, ids in (("client", client), ("server", server)) if id(p) in ids}
        if not sides:
            after = inside >= cut if inside is not None else past_blocks
            sides = {"server" if after else "client"}
        for side in sides:
            names[side].add(name)
        if id(p) in behind:
            names["shipped"].add(name)
    return Ownership(*(frozenset(names[side]) for side in ("client", "server", "shipped")))


def difference(a: Any, b: Any) -> float:
    """Largest difference between the tensors of two outputs relative to their size; infinite if they do not match."""
    first, second = dict(leaves(_plain(a), "")), dict(leaves(_plain(b), ""))
    if first.keys() != second.keys():
        return float("inf")
    worst = 0.0
    for path, x in first.items():
        y = second[path]
        if not isinstance(x, Tensor) or x.shape != y.shape:
            if not isinstance(x, Tensor) and x == y:
                continue
            return float("inf")
        if x.numel() and not same(x, y):
            x, y = x.detach().double(), y.detach().double()
            gap = float((x - y).abs().nan_to_num(nan=float("inf")).max() / x.abs().nan_to_num().max().clamp(min=1e-12))
            worst = max(worst, gap)
    return worst


@contextmanager
def _all_differentiable(model: nn.Module) -> Iterator[None]:
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
    found: set[int] = set()
    seen: set[Any] = set()
    todo: list[Any] = []
    for t in tensors:
        if t.grad_fn is not None:
            todo.append(t.grad_fn)
        elif t.requires_grad:
            found.add(id(t))
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        todo.extend(parent for parent, _ in node.next_functions)
    return found


def _plain(output: Any) -> Any:
    """The output as a dict, without the caches that a pass-through leaves empty or makes of placeholders."""
    if not hasattr(output, "keys"):
        return output
    return {key: value for key, value in output.items() if key not in ("past_key_values", "mems")}
