"""Base weights in fewer bytes: what quantised storage of the frozen linear layers of the blocks saves.

The model computes in bfloat16. A product with a quantised weight first makes a bfloat16 copy of it, which is gone after
the product. Embeddings, norms and the head stay bfloat16; adapters and the optimizer's state are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..split import SplitModel
from ..split.blocks import members

if TYPE_CHECKING:
    from .cost import Cost

# Bytes of a number of weights in a number of output rows, as bitsandbytes keeps them: int8 has a float32 scale for
# each row; nf4 has 4 bits a weight and a float32 scale for each 64 of them (no double quantisation).
QUANTISED: dict[str, Callable[[int, int], int]] = {
    "int8": lambda weights, rows: weights + 4 * rows,
    "nf4": lambda weights, rows: weights // 2 + 4 * weights // 64,
}
DTYPES = ("float32", "bfloat16", *QUANTISED)


def computed_in(dtype: str) -> str:
    """Return the dtype that a model with base weights of this one computes in."""
    return "bfloat16" if dtype in QUANTISED else dtype


@dataclass(frozen=True)
class BlockWeights:
    """The frozen linear weights of the blocks, and their sizes by side."""

    tensors: list[Tensor]
    sizes: dict[str, int]


def block_weights(split: SplitModel) -> BlockWeights:
    """Return the weights that quantisation would apply to."""
    tensors: list[Tensor] = []
    sizes = {f"{side}_{what}": 0 for side in ("client", "server") for what in ("bytes", "weights", "rows")}
    for index, block in enumerate(members(split.model.get_submodule(split.blocks)).values()):
        side = "client" if index < split.cut else "server"
        for module in block.modules():
            if isinstance(module, nn.Linear) and not module.weight.requires_grad:
                weight = module.weight
                tensors.append(weight)
                sizes[f"{side}_bytes"] += weight.numel() * weight.element_size()
                sizes[f"{side}_weights"] += weight.numel()
                sizes[f"{side}_rows"] += weight.shape[0]
    return BlockWeights(tensors, sizes)


def stored_as(cost: Cost, dtype: str) -> Cost:
    """Return a cost with the base weights of the blocks in this dtype, from that of the dtype it computes in."""
    if dtype not in QUANTISED:
        return replace(cost, dtype=dtype)
    sizes, stored = cost.block_weights, QUANTISED[dtype]
    saved = {
        side: sizes[f"{side}_bytes"] - stored(sizes[f"{side}_weights"], sizes[f"{side}_rows"])
        for side in ("client", "server")
    }
    memory = cost.client_memory | {"weights": cost.client_memory["weights"] - saved["client"]}
    footprint = cost.footprint
    if footprint is not None:
        footprint = replace(
            footprint,
            process=footprint.process | {"weights": footprint.process["weights"] - sum(saved.values())},
            client=footprint.client | {"weights": footprint.client["weights"] - saved["client"]},
            server=footprint.server | {"weights": footprint.server["weights"] - saved["server"]},
        ).with_round(footprint.copied_peaks)
    return replace(cost, dtype=dtype, client_memory=memory, footprint=footprint)
