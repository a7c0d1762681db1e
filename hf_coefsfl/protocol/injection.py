"""The one backward hook at the cut, through which the compensated gradient enters the client half."""

from __future__ import annotations

from torch import Tensor


def inject(activations: Tensor, gradient: Tensor) -> Tensor:
    """Make `activations` receive `gradient` when the returned scalar is backpropagated.

    The client has no loss of its own: it holds the activations s at the cut and a gradient g̃ that
    came from the server (stale, compensated or fresh). This puts a hook on s that turns any
    incoming gradient into g̃, and returns a scalar carrier whose backward pass triggers it:
    θᶜ receives Jᵀ g̃, exactly as from `activations.backward(gradient)`.

    The carrier's own scale is kept: `(inject(s, g) * 2).backward()` enters with 2 g̃, so loss
    scaling and gradient accumulation work as on an ordinary loss. Use the carrier once.

    Args:
        activations: s at the cut, on the client's graph; any shape.
        gradient: g̃, of the same shape. Cast to the dtype and device of `activations`.

    Example:
        >>> import torch
        >>> weight = torch.ones(3, requires_grad=True)
        >>> inject(2 * weight, torch.tensor([1.0, 0.0, -1.0])).backward()
        >>> weight.grad
        tensor([ 2.,  0., -2.])
    """
    if not activations.requires_grad:
        raise ValueError(
            "The activations at the cut are not on a graph, so no gradient can enter the client half. Run the client's "
            "forward with gradients enabled, and train at least one parameter below the cut."
        )
    if gradient.shape != activations.shape:
        raise ValueError(
            f"The gradient to inject has shape {tuple(gradient.shape)}, the activations at the cut have "
            f"{tuple(activations.shape)}. Send back one gradient entry for each activation."
        )
    entering = gradient.detach().to(device=activations.device, dtype=activations.dtype)
    # The carrier's gradient w.r.t. s is its scale times ones, so the product is scale * g̃.
    activations.register_hook(lambda incoming: incoming * entering)
    return activations.sum()
