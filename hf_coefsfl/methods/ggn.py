"""GGN: leading eigenpairs of each sample's Gauss-Newton matrix Jᵀ Λ J as curvature, by Lanczos (Appendix D.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ..protocol.loss import LossSpec, OutputBlock
from ..protocol.messages import Feedback, SmashedData
from ..protocol.server_side import ServerSide, on_graph
from .base import at_least, option
from .parts.lanczos import leading_eigenpairs
from .parts.math_attention import check_attention, differentiable_attention
from .reuse import GradientReuse

if TYPE_CHECKING:
    from ..split import SplitModel


@dataclass
class GGN(GradientReuse):
    """g̃ = g₀ + U Θ Uᵀ δ with the `rank` leading eigenpairs of Jᵀ Λ J, Λ the Hessian of the loss w.r.t. the output."""

    name: ClassVar[str] = "ggn"
    title: ClassVar[str] = "GGN"
    differentiates_twice: ClassVar[bool] = True

    rank: int = option(4, "eigenpairs of each sample")
    num_iterations: int = option(8, "Lanczos iterations, at least `rank`")

    def __post_init__(self) -> None:
        """Check the ranges of the options."""
        super().__post_init__()
        at_least("rank", self.rank, 1)
        at_least("num_iterations", self.num_iterations, self.rank)

    def check_loss(self, loss_spec: LossSpec) -> None:
        """Refuse a loss whose Hessian w.r.t. the output is not known."""
        loss_spec.check_curvature(self.title)

    def setup(self, split: SplitModel, loss_spec: LossSpec, seed: int, first_round: int = 0) -> None:
        """Refuse attention that can be differentiated once only."""
        check_attention(split.model, self.title)

    def feedback(self, server: ServerSide, smashed: SmashedData, batch: int) -> Feedback:
        """Return g₀ and √Θ U (b, rank, *s)."""
        with differentiable_attention():  # around the backward passes too: checkpointing repeats forward passes in them
            return self._feedback(server, smashed, batch)

    def _feedback(self, server: ServerSide, smashed: SmashedData, batch: int) -> Feedback:
        leaf = on_graph(smashed)
        s = leaf.activations
        output = server.forward(leaf, batch)
        gradient = server.feedback_gradient(output.loss, leaf, retain_graph=True)
        blocks = server.loss_spec.output_blocks(smashed.labels, s.shape[1])
        logits = [output[block.name] for block in blocks]
        # Jᵀx is linear in x: differentiating it once more gives Jv without forward-mode derivatives.
        seeds = [torch.zeros_like(o, requires_grad=True) for o in logits]
        (pulled,) = torch.autograd.grad(logits, s, seeds, create_graph=True)

        def matvec(v: Tensor) -> Tensor:
            pushed = torch.autograd.grad(pulled, seeds, v.view_as(s).to(s.dtype), retain_graph=True)
            curved = [block.hessian_product(o, jv) for block, o, jv in zip(blocks, logits, pushed, strict=True)]
            return torch.autograd.grad(logits, s, curved, retain_graph=True)[0].flatten(1).to(v.dtype)

        start = gradient.flatten(1)
        start = start if start.dtype == torch.float64 else start.float()
        values, vectors = leading_eigenpairs(server.repeated(matvec), start, self.num_iterations, self.rank)
        scaled = vectors * values.clamp(min=0).sqrt()[:, :, None]  # the matrix is positive semi-definite
        return Feedback(gradient, scaled.view(len(s), -1, *s.shape[1:]).to(s.dtype))

    def compensate(self, feedback: Feedback, displacement: Tensor, outputs: Sequence[OutputBlock]) -> Tensor:
        """Return g₀ + Σₖ uₖ ⟨uₖ, δ⟩ with the scaled eigenvectors uₖ."""
        assert feedback.curvature is not None
        u = feedback.curvature.flatten(2)
        # In two steps: one einsum over all three would form the (d, d) matrices U Uᵀ.
        products = torch.einsum("bkd,bd->bk", u, displacement.flatten(1))
        correction = torch.einsum("bk,bkd->bd", products, u)
        return feedback.gradient + correction.view_as(displacement)
