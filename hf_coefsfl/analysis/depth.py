"""Large models: costed without their weights, from copies with few blocks.

If all blocks are equal, each block on the client adds the same to what a round moves, computes and holds, and so does
each on the server. So three copies, with two blocks on each side and one more on either, give
every cut of a model of any depth. Two on the client: its first block needs no gradient at its input, and the others do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..methods import Method
from ..split import find_blocks
from ..split.blocks import members
from .cost import Cost, CostModel, Round
from .memory import Footprint, Run
from .weightless import without_weights

LARGE = 10**9  # parameters
FEW = (2, 2)  # blocks on the client and on the server


def cost_model(build: Callable[[], PreTrainedModel], **options: Any) -> CostModel | DeepCostModel:
    """Return what costs the model that `build` makes: a large one without weights, and from few blocks if it can be.

    `options` are those of `CostModel`.
    """
    with torch.device("meta"):
        model = build()
    if model.num_parameters() < LARGE:
        return CostModel(build(), **options)
    if blocks_are_equal(model) and len(blocks_of(model)) > sum(FEW):
        return DeepCostModel(build, **options)
    return CostModel(without_weights(build), **options)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model."""
    return list(members(find_blocks(model)[1]).values())


def blocks_are_equal(model: PreTrainedModel) -> bool:
    """Return whether all blocks are of one kind, in one plain list."""
    kinds = {(type(b), tuple((name, p.shape) for name, p in b.named_parameters())) for b in blocks_of(model)}
    layer_types = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    return len(kinds) == 1 and len(layer_types) <= 1 and isinstance(find_blocks(model)[1], nn.ModuleList)


def shallow(model: PreTrainedModel, blocks: int) -> PreTrainedModel:
    """Leave only the first blocks in a model."""
    container: Any = find_blocks(model)[1]
    del container[blocks:]
    return model


class DeepCostModel:
    """Costs the methods on a model without weights whose blocks are all equal, as `CostModel` does."""

    def __init__(self, build: Callable[[], PreTrainedModel], **options: Any):
        with torch.device("meta"):
            self._num_blocks = len(blocks_of(build()))
        client, server = FEW
        few = ((client, server), (client + 1, server), (client, server + 1))
        self._models = {(c, s): CostModel(shallow(without_weights(build), c + s), **options) for c, s in few}
        self._known: dict[Any, list[list[Cost]]] = {}

    @property
    def cuts(self) -> range:
        """Every cut that leaves both sides a block."""
        return range(1, self._num_blocks)

    def split(self, cut: int) -> None:
        """Raise ValueError if the model cannot be split."""
        for (client, _), model in self._models.items():
            model.split(client)

    def costs(self, method: Method, cut: int, plan: Round, run: Run | None = None) -> list[Cost]:
        """Return the costs of a method as `CostModel.costs` does."""
        if getattr(method, "num_blocks", 0) > FEW[1]:
            raise ValueError(
                f"{method.title} copies {getattr(method, 'num_blocks', 0)} blocks of the server, and this model is "
                f"costed from copies with {FEW[1]} there. It is left out for large models."
            )
        key = repr((method, plan, run))
        if key not in self._known:
            self._known[key] = [model.costs(method, c, plan, run) for (c, _), model in self._models.items()]
        client, server = cut - FEW[0], self._num_blocks - cut - FEW[1]
        costs = [extrapolated(kind, client, server) for kind in zip(*self._known[key], strict=True)]
        return [replace(c, footprint=c.footprint and c.footprint.with_round(c.footprint.peaks)) for c in costs]


def extrapolated(counted: Sequence[Any], more_client: int, more_server: int) -> Any:
    """Return all numbers with more blocks than the first that was counted; the other two have one more on a side."""
    base, client, server = counted
    if isinstance(base, int):
        return base + more_client * (client - base) + more_server * (server - base)
    if isinstance(base, dict):
        names = dict.fromkeys([*base, *client, *server])
        parts = {n: [d.get(n, 0) for d in (base, client, server)] for n in names}
        return {name: extrapolated(part, more_client, more_server) for name, part in parts.items()}
    if is_dataclass(base) and isinstance(base, (Cost, Footprint)):
        parts = {f.name: [getattr(c, f.name) for c in (base, client, server)] for f in fields(base)}
        return replace(base, **{name: extrapolated(part, more_client, more_server) for name, part in parts.items()})
    return base
