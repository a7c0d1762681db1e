"""CoeF-J: the Jacobian-based Hessian of an upper bound on the loss (Section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..protocol.loss import LossSpec, OutputBlock
from ..protocol.messages import Feedback, SmashedData
from ..protocol.server_side import ServerSide, on_graph
from ..protocol.tensors import over
from .base import option
from .reuse import GradientReuse

GROWTH = 1.5  # how fast the softmax curvature can grow with the predicted output change D

MAX_EXACT = 1024  # outputs per sample up to which `exact` makes sense


@dataclass
class CoeFJ(GradientReuse):
    """g̃ = g₀ + M P̂ δ with P̂ = R⁻¹ Σᵣ uᵣ uᵣᵀ and uᵣ = Jᵀ vᵣ for random signs vᵣ over the outputs.

    The sensitivity P = JᵀJ is per sample. By default M is the per-sample Mᵢ = w min(1/2, m + 1.5 D, √2/D) of
    `sample_bound`, with D² = mean of ⟨uᵣ, δ⟩² and the softmax curvature m at s₀, which the server sends along.
    `curvature_bound` sets a constant instead (1/2 for the softmax is the bound of Proposition 2).
    `exact=True` sends one projection for each output, so that P̂ = P: for few classes, and for tests.
    """

    name: ClassVar[str] = "coef_j"
    title: ClassVar[str] = "CoeF-J"
    table_position: ClassVar[int] = 9
    stackable: ClassVar[bool] = True

    num_projections: int = option(1, "R, random projections per sample")
    curvature_bound: float | None = option(None, "M, a constant bound on the curvature; None: one per sample")
    exact: bool = option(False, "send one projection for each output")

    def __post_init__(self) -> None:
        """Check the ranges of the options."""
        super().__post_init__()
        if self.num_projections < 1:
            raise ValueError(f"num_projections (R) must be at least 1, got {self.num_projections}. The paper uses 1.")
        if self.curvature_bound is not None and not 0 <= self.curvature_bound < float("inf"):
            raise ValueError(
                f"curvature_bound (M) must be a finite number >= 0 or None, got {self.curvature_bound}. 0.5 bounds the "
                "softmax cross-entropy, None chooses per sample, 0 turns CoeF-J into gradient reuse."
            )

    def check_loss(self, loss_spec: LossSpec) -> None:
        """Refuse a loss whose curvature cannot be bounded."""
        loss_spec.check_curvature(self.title)

    def feedback(self, server: ServerSide, smashed: SmashedData, batch: int) -> Feedback:
        """Return g₀, the projections u (b, blocks, R, *s) and the start curvature m (b, blocks)."""
        leaf = on_graph(smashed)
        output = server.forward(leaf, batch)
        generators = server.context.generators("method", batch)
        projections, curvatures = [], []
        for block in server.loss_spec.output_blocks(smashed.labels, smashed.activations.shape[1]):
            logits = output[block.name]
            rows = [
                torch.autograd.grad(logits, leaf.activations, v, retain_graph=True)[0]
                for v in self._directions(logits, block.mask, generators)
            ]
            projections.append(torch.stack(rows, dim=1))
            curvatures.append(block.curvature(logits))
        gradient = server.feedback_gradient(output.loss, leaf)
        return Feedback(gradient, torch.stack(projections, dim=1), torch.stack(curvatures, dim=1))

    def _directions(self, logits: Tensor, mask: Tensor, generators: Sequence[torch.Generator]) -> list[Tensor]:
        """Return the vᵣ, zero at outputs that do not enter the loss; elsewhere the mean of vᵣ vᵣᵀ is I."""
        mask = over(mask, logits)
        if not self.exact:
            bits = (_bits(logits, generators) for _ in range(self.num_projections))
            return [v.to(logits.dtype).mul_(2).sub_(1) * mask for v in bits]
        outputs = logits[0].numel()
        if outputs > MAX_EXACT:
            raise ValueError(
                f"exact=True would send a projection for each of {outputs} outputs of a sample (at most {MAX_EXACT}). "
                "Use num_projections instead."
            )
        units = torch.eye(outputs, dtype=logits.dtype, device=logits.device) * outputs**0.5
        return [unit.view_as(logits[0]).expand_as(logits) * mask for unit in units]

    def compensate(self, feedback: Feedback, displacement: Tensor, outputs: Sequence[OutputBlock]) -> Tensor:
        """Return g₀ + Σ_blocks w c R⁻¹ Σᵣ aᵣ uᵣ with aᵣ = ⟨uᵣ, δ⟩ per sample."""
        assert feedback.curvature is not None and feedback.scalars is not None
        compensated = feedback.gradient
        for index, block in enumerate(outputs):
            u = feedback.curvature[:, index].flatten(2).float()  # (b, R, d)
            a = torch.einsum("brd,bd->br", u, displacement.flatten(1).float())
            if self.curvature_bound is None:
                change = a.square().mean(1).sqrt()  # D
                c = sample_bound(change, feedback.scalars[:, index], block)
            else:
                c = torch.full_like(a[:, 0], self.curvature_bound)
            correction = torch.einsum("b,br,brd->bd", block.weight * c, a / a.shape[1], u)
            compensated = compensated + correction.view_as(displacement).to(compensated.dtype)
        return compensated


def _bits(logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    """Return random zeros and ones in the shape of the logits; each client draws those of its own samples."""
    shape, device = (len(logits) // len(generators), *logits.shape[1:]), logits.device
    drawn = [torch.randint(2, shape, generator=generator, device=device) for generator in generators]
    return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def sample_bound(change: Tensor, curvature: Tensor, block: OutputBlock) -> Tensor:
    """Return c, the coefficient of each sample (b,): Mᵢ = w c.

    c = min(M, m + 1.5 D, ρ / D). m bounds the curvature at the start and 1.5 D its growth with the
    predicted output change D; the residual cannot change by more than its diameter ρ (√2 for one
    softmax), so neither may the correction c D.
    """
    limit = block.residual_diameter() / change.clamp(min=torch.finfo(change.dtype).tiny)
    return torch.minimum((curvature + GROWTH * change).clamp(max=block.bound), limit)
