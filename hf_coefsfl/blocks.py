"""Finding the list of blocks of a model: the places where it can be cut."""

from __future__ import annotations

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential)


def find_blocks(model: nn.Module, blocks: str | None = None) -> tuple[str, nn.Module]:
    """Return the dotted path and the container of the blocks of `model`.

    Without `blocks`, the candidates are the outermost lists of several modules of one class that
    hold further modules; the first in definition order that has at least a quarter of the
    parameters of the largest wins, so an encoder comes before its decoder.
    """
    raise NotImplementedError  # written together with split.py
