"""Two-point slopes: by hand, and against the derivatives of autograd."""

from typing import Any

import pytest
import torch

from hf_coefsfl.methods.mu_splitfed import MUSplitFed
from hf_coefsfl.methods.parts.zeroth_order import Direction, two_point
from hf_coefsfl.protocol.link import LocalLink
from hf_coefsfl.protocol.loss import LossSpec
from hf_coefsfl.protocol.messages import SmashedData
from tests.support.slopes import double_sides, generator, run, values
from tests.support.toy import CAUSAL, CLASSIFICATION, REGRESSION, SPANS, TOKENS


def test_slope_of_a_parabola_by_hand() -> None:
    """L = Σ θ²: (L(θ + μu) − L(θ − μu)) / 2μ = 2⟨θ, u⟩ for every μ, and the mean is L(θ) + μ² ||u||²."""
    theta = torch.tensor([1.0, -2.0, 3.0], dtype=torch.double)
    direction = Direction([theta], generator(3))
    ((_, u),) = list(direction)

    def loss() -> torch.Tensor:
        return theta.square().sum()

    slope, mean = two_point(direction, 0.1, loss, loss)
    assert slope.item() == pytest.approx(2 * (theta @ u).item())
    assert mean.item() == pytest.approx(14 + 0.01 * (u @ u).item())
    before = theta.clone()
    direction.descend(slope, learning_rate=0.01)
    torch.testing.assert_close(theta, before - 0.01 * slope * u)


def test_directions_are_drawn_again_to_the_same_numbers() -> None:
    shapes = [torch.zeros(2, 3), torch.zeros(5)]
    direction = Direction(shapes, generator(0))
    first, second = [u for _, u in direction], [u for _, u in direction]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert direction.norm().item() == pytest.approx(torch.cat([u.flatten() for u in first]).norm().item())
    other = [u for _, u in Direction(shapes, generator(1))]
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0].flatten()[:5], first[1])  # the parts do not repeat each other


def test_a_direction_is_standard_normal() -> None:
    ((_, u),) = list(Direction([torch.zeros(200_000)], generator(0)))
    assert u.mean().abs() < 0.01 and abs(u.var().item() - 1) < 0.02 and abs(u.pow(4).mean().item() - 3) < 0.1


def test_weights_come_back_to_the_bit() -> None:
    weight = torch.randn(10_000, generator=generator(0))
    before = weight.clone()
    direction = Direction([weight], generator(1))
    with direction.moved(1e-3):
        ((_, u),) = list(direction)
        torch.testing.assert_close(weight, before + 1e-3 * u)
    assert torch.equal(weight, before)
    assert not torch.equal(before + 1e-3 * u - 1e-3 * u, before)  # why a copy is kept
    with pytest.raises(RuntimeError, match="out of memory"), direction.moved(1e-3):
        raise RuntimeError("out of memory")
    assert torch.equal(weight, before)


def test_clipping_bounds_the_step() -> None:
    weight = torch.zeros(4)
    direction = Direction([weight], generator(0))
    direction.descend(torch.tensor(-50.0), learning_rate=1.0, max_norm=0.25)
    assert weight.norm().item() == pytest.approx(0.25)
    ((_, u),) = list(direction)
    assert torch.dot(weight, u) > 0  # against the slope
    weight.zero_()
    direction.descend(torch.tensor(1e-3), learning_rate=1.0, max_norm=0.25)
    torch.testing.assert_close(weight, -1e-3 * u)  # short enough


@pytest.mark.parametrize("task", [CLASSIFICATION, REGRESSION, TOKENS, CAUSAL, SPANS], ids=lambda t: t.loss_type)
def test_server_slope_approaches_the_directional_derivative(task: LossSpec) -> None:
    client, server = double_sides(task)
    smashed = client.smash(0)
    parameters = list(server.half.parameters())
    gradients = torch.autograd.grad(server.forward(smashed, 0).loss, parameters)
    direction = Direction(parameters, generator(5))
    exact = sum((g * v).sum().item() for g, (_, v) in zip(gradients, direction, strict=True))

    def error(scale: float) -> float:
        def loss() -> torch.Tensor:
            return server.forward(smashed, 0).loss

        return abs(two_point(direction, scale, loss, loss)[0].item() - exact)

    assert abs(exact) > 1e-3 and error(1e-5) < 1e-8
    assert error(1e-2) == pytest.approx(100 * error(1e-3), rel=0.05)  # of second order


@pytest.mark.parametrize("task", [CLASSIFICATION, REGRESSION, TOKENS, CAUSAL, SPANS], ids=lambda t: t.loss_type)
def test_joint_slope_is_the_derivative_along_both_sides(task: LossSpec) -> None:
    """d → ⟨∇_θᶜ L, u⟩ + ⟨∇_θˢ L, v⟩ through the whole model, at the server weights before the joint step."""
    sent: list[torch.Tensor] = []

    class Spy(LocalLink):
        def update(self, messages: Any = None, batches: Any = None) -> None:
            sent.extend(m.slopes for m in messages)

    # The server's own passes are made harmless by a tiny learning rate.
    method = MUSplitFed(perturbation_scale=1e-4, server_passes=1, learning_rate=1e-14)
    client, server = double_sides(task)
    run(method, (client, server), Spy)
    for batch, slope in enumerate(sent):
        twin = double_sides(task)
        inputs, labels = task.separate(twin[0].batches[batch])
        both = [*twin[0].half.parameters(), *twin[1].half.parameters()]
        loss = twin[1].half(SmashedData(twin[0].half(**inputs).activations, labels=labels)).loss
        gradients = torch.autograd.grad(loss, both)
        u = [part for _, part in Direction(values(client), client.context.generator("method", batch))]
        # one epoch of two batches: u has numbers 0 and 1, the pass 2 and 3, the joint pass 4 and 5
        v = [part for _, part in Direction(values(server), server.context.generator("method", 4 + batch))]
        exact = sum((g * part).sum().item() for g, part in zip(gradients, u + v, strict=True))
        assert slope.shape == (1,) and slope.item() == pytest.approx(exact, rel=1e-5, abs=1e-6)
    assert len(sent) == 2
