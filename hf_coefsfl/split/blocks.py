"""Finding the list of blocks of a model: the places where it can be cut."""

from __future__ import annotations

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential)


def find_blocks(model: nn.Module, blocks: str | None = None) -> tuple[str, nn.Module]:
    """Return the dotted path and the container of the blocks of `model`.

    Without `blocks`, the candidates are the outermost lists of modules of one class that hold
    further modules; the first in definition order that has at least a quarter of the parameters of
    the largest wins, so an encoder comes before its decoder. With `blocks`, that path is taken,
    with or without the prefix that a PEFT wrapper puts before it.

    >>> find_blocks(bert)  # doctest: +SKIP
    ('bert.encoder.layer', ModuleList(...))
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"Expected a PreTrainedModel, a PeftModel or a timm wrapper, got {type(model).__name__}.")
    candidates = _candidates(model)
    if blocks is not None:
        return _named_list(model, blocks, candidates)
    if not candidates:
        raise ValueError(
            f"Found no list of blocks in {type(model).__name__}: no nn.ModuleList or nn.Sequential holds several "
            f"modules of one class. Name one with `blocks=`; its lists are: {_listed(_lists(model))}."
        )
    largest = max(_size(container) for container in candidates.values())
    path = next(path for path, container in candidates.items() if 4 * _size(container) >= largest)
    return path, candidates[path]


def members(container: nn.Module) -> dict[str, nn.Module]:
    """The blocks in a list by their path in it; a list of stages that are lists themselves (PVT) is one of blocks."""
    blocks: dict[str, nn.Module] = {}
    for name, child in container.named_children():
        nested = members(child) if isinstance(child, nn.ModuleList) else {}
        blocks |= {f"{name}.{inner}": block for inner, block in nested.items()} or {name: child}
    return blocks


def check_cut(model: nn.Module, path: str, container: nn.Module, cut: int) -> None:
    """Refuse, with a ValueError, a cut that does not leave both sides at least one block of their own."""
    count = len(members(container))
    expected = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    if len(list(container.named_children())) < len(getattr(container, "_modules", {})):
        raise ValueError(
            f"{path!r} of {type(model).__name__} lists one block module several times: the blocks share their "
            "parameters, so no cut can give client and server separate ones. Use a model with separate blocks."
        )
    if count == 1 and isinstance(expected, int) and expected > 1:
        raise ValueError(
            f"{type(model).__name__} applies one shared block {expected} times ({path!r} holds 1 block, "
            f"config.num_hidden_layers is {expected}), so client and server cannot have separate ones. "
            "Use a model with separate blocks (BERT instead of ALBERT)."
        )
    if count < 2:
        raise ValueError(f"{path!r} of {type(model).__name__} holds {count} block: a cut needs at least 2.")
    if isinstance(cut, bool) or not isinstance(cut, int):
        raise ValueError(f"cut must be an int from 1 to {count - 1}, got {cut!r} of type {type(cut).__name__}.")
    if not 1 <= cut < count:
        raise ValueError(
            f"cut must be from 1 to {count - 1} for the {count} blocks in {path!r}, got {cut}: "
            "it counts the blocks on the client, and either side needs at least one."
        )


def _candidates(model: nn.Module) -> dict[str, nn.Module]:
    """The lists that may be the blocks, by path in definition order."""
    # Hugging Face models name the classes of their blocks (those not to be split over devices).
    declared = {name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()}
    uniform: dict[str, nn.Module] = {}
    blocks: dict[str, nn.Module] = {}
    for path, container in _lists(model).items():
        blocks_in_it = members(container).values()
        if any(path.startswith(outer + ".") for outer in uniform) or not all(list(m.children()) for m in blocks_in_it):
            continue
        classes = {type(m).__name__ for m in blocks_in_it}
        if len(classes) == 1 or classes & declared:
            uniform[path] = container
            if classes & declared:
                blocks[path] = container
    return blocks or {p: c for p, c in uniform.items() if len(members(c)) > 1} or uniform


def _lists(model: nn.Module) -> dict[str, nn.Module]:
    return {path: m for path, m in model.named_modules() if path and isinstance(m, _CONTAINERS) and len(m) > 0}


def _named_list(model: nn.Module, blocks: str, candidates: dict[str, nn.Module]) -> tuple[str, nn.Module]:
    lists = _lists(model)
    for path in (blocks, f"base_model.model.{blocks}"):
        if path in lists:
            return path, lists[path]
    known = candidates or lists
    raise ValueError(
        f"blocks={blocks!r} is not a list of modules (nn.ModuleList or nn.Sequential) in {type(model).__name__}. "
        f"Candidates: {_listed(known)}."
    )


def _listed(lists: dict[str, nn.Module]) -> str:
    return ", ".join(f"{path!r} ({len(members(c))} modules)" for path, c in lists.items()) or "none"


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
