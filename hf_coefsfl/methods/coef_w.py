"""CoeF-W: CoeF-D along the walk of the server, which passes twice over the smashed data. Ours, beyond the paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import option
from .coef_d import CoeFD
from .reuse import FEEDBACK_AT


@dataclass
class CoeFW(CoeFD):
    """g̃ = g₀ + λ g₀ ⊙ g₀ ⊙ δ, elementwise, with g₀ of the server that trains on the batch. Nothing beyond g₀ is sent.

    The paper's server passes over each batch twice: for g₀ at the weights of the round's start, and to train. Here the
    pass that trains gives g₀ as well (`feedback_at="walk"`), so that g₀ follows the server through the round as in
    vanilla SFL. The pass that this saves trains once more (`server_passes=2`). λ, the bytes and, with one local epoch,
    the server's work are those of CoeF-D.
    """

    name: ClassVar[str] = "coef_w"
    title: ClassVar[str] = "CoeF-W"
    table_position: ClassVar[int] = 10
    stackable: ClassVar[bool] = True

    feedback_at: str = option("walk", "server weights that the gradients are taken at", choices=FEEDBACK_AT)
    server_passes: int = option(2, "passes of the server over the smashed data in a local epoch")
