"""Which token positions at the cut hold anything: padding is neither sent nor stored if nothing depends on it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from .loss import SPANS, LossSpec
from .messages import SmashedData
from .modes import evaluating
from .tensors import over


def position_mask(smashed: SmashedData) -> Tensor | None:
    """Return which positions at the cut are not padding (b, T); None if the batch does not say.

    The mask of audio is over the raw signal and does not fit the cut: all its positions count.
    """
    mask = smashed.context.get("attention_mask")
    return mask.bool() if mask is not None and mask.shape == smashed.activations.shape[:2] else None


def kept_positions(smashed: SmashedData, loss_spec: LossSpec) -> Tensor | None:
    """Return which positions the loss depends on (b, T); None stands for all.

    These are the unpadded ones and, of a loss over tokens, those with a label: a model that is
    padded on the left predicts its first token from the padding before it. The softmax over the
    places of an answer has an entry for the padding too, and what an unknown loss reads is not known.
    """
    mask = position_mask(smashed)
    if mask is None or loss_spec.loss_type == SPANS or not loss_spec.has_known_curvature:
        return None
    padding = smashed.context.get("padding")
    if padding is not None and padding.shape == mask.shape:  # a classifier may pool by the ids, whatever the mask says
        mask = mask | ~padding
    for block in loss_spec.output_blocks(smashed.labels) if smashed.labels else ():
        if block.mask.shape == mask.shape:
            mask = mask | block.mask
    return None if bool(mask.all()) else mask


def ignores_padding(server: nn.Module, smashed: SmashedData) -> bool:
    """Return whether what a server half makes of padded smashed data does not depend on that of the padding.

    Attention is masked, but a convolution over the tokens reads its neighbours, and a state-space
    model what came before. A weight of exactly 0 lets no gradient through, however small.
    """
    mask = position_mask(smashed)
    if mask is None or bool(mask.all()):
        return False
    leaf = smashed.activations.detach().requires_grad_()
    with torch.enable_grad(), evaluating(server):
        total = torch.zeros((), device=leaf.device)
        for output in server(replace(smashed, activations=leaf)).values():
            if isinstance(output, Tensor) and output.requires_grad:
                # What comes out at the padding itself does not count. Squares: a norm makes plain sums constant.
                total = total + (output[mask] if output.shape[:2] == mask.shape else output).float().square().sum()
    (gradient,) = torch.autograd.grad(total, leaf)
    return not bool(gradient[~mask].count_nonzero())


def mirrored(smashed: SmashedData) -> SmashedData:
    """Return smashed data as if it were padded on the other side."""
    sided = ("attention_mask", "padding")
    return replace(smashed, context={n: t.flip(1) if n in sided else t for n, t in smashed.context.items()})


def without_padding(t: Tensor, kept: Tensor | None) -> Tensor:
    """Return a tensor (b, T, ...) with zeros at the positions that are not kept."""
    return t if kept is None else t.masked_fill(~over(kept, t), 0.0)
