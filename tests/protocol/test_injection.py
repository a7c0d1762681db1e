"""The backward hook at the cut against calling backward with the gradient."""

import pytest
import torch
from torch import nn

from hf_coefsfl import inject


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 6))


def gradients(net: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in net.parameters()]


@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 4)])
def test_equals_backward_with_the_gradient(shape: tuple[int, ...]) -> None:
    ours, reference, x = network(), network(), torch.randn(shape)
    gradient = torch.randn(*shape[:-1], 6)
    inject(ours(x), gradient).backward()
    reference(x).backward(gradient)
    for a, b in zip(gradients(ours), gradients(reference), strict=True):
        assert torch.equal(a, b)


def test_keeps_the_scale_of_the_carrier() -> None:
    ours, reference, x, gradient = network(), network(), torch.randn(5, 4), torch.randn(5, 6)
    (inject(ours(x), gradient) * 1024).backward()
    reference(x).backward(gradient * 1024)
    for a, b in zip(gradients(ours), gradients(reference), strict=True):
        assert torch.equal(a, b)


def test_accumulates_like_any_loss() -> None:
    ours, reference, x, gradient = network(), network(), torch.randn(5, 4), torch.randn(5, 6)
    for _ in range(2):
        inject(ours(x), gradient).backward()
        reference(x).backward(gradient)
    for a, b in zip(gradients(ours), gradients(reference), strict=True):
        assert torch.equal(a, b)


def test_casts_the_gradient_to_the_activations() -> None:
    weight = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    inject(weight * 2, torch.tensor([1.0, 2.0, 3.0])).backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    assert weight.grad.tolist() == [2.0, 4.0, 6.0]


def test_under_checkpointing_of_the_client() -> None:
    ours, reference, x, gradient = network(), network(), torch.randn(5, 4), torch.randn(5, 6)
    inject(torch.utils.checkpoint.checkpoint(ours, x, use_reentrant=False), gradient).backward()
    reference(x).backward(gradient)
    for a, b in zip(gradients(ours), gradients(reference), strict=True):
        assert torch.equal(a, b)


def test_refuses_what_cannot_work() -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 6\).*\(5, 6\)"):
        inject(network()(torch.randn(5, 4)), torch.randn(2, 6))
    with pytest.raises(ValueError, match="not on a graph"):
        inject(torch.randn(5, 6), torch.randn(5, 6))
