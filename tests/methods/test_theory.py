"""Propositions 1 and 2 of the paper as property tests."""

import itertools

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_coefsfl.methods import make_method
from hf_coefsfl.protocol.loss import LossSpec
from hf_coefsfl.protocol.messages import Feedback

CLASSES, WIDTH = 3, 5
TASK = LossSpec("ForSequenceClassification", CLASSES, ("labels",))
seeds = st.integers(0, 2**31)


class Server:
    """A random server-side function of s (b, WIDTH), in float64."""

    def __init__(self, seed: int, affine: bool):
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.randn(WIDTH, 4, generator=generator, dtype=torch.float64)
        self.last = torch.randn(4, CLASSES, generator=generator, dtype=torch.float64)
        self.affine = affine

    def logits(self, s: Tensor) -> Tensor:
        hidden = s @ self.first
        return (hidden if self.affine else hidden.tanh()) @ self.last

    def loss(self, s: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(self.logits(s), labels)

    def gradient(self, s: Tensor, labels: Tensor) -> Tensor:
        s = s.detach().requires_grad_()
        return torch.autograd.grad(self.loss(s, labels), s)[0]

    def jacobian(self, s: Tensor) -> Tensor:
        """(b, CLASSES, WIDTH)."""
        return torch.stack([torch.autograd.functional.jacobian(self.logits, row[None])[0, :, 0] for row in s])


def points(seed: int, batch: int, step: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    s0 = torch.randn(batch, WIDTH, generator=generator, dtype=torch.float64)
    delta = step * torch.randn(batch, WIDTH, generator=generator, dtype=torch.float64)
    return s0, delta, torch.randint(CLASSES, (batch,), generator=generator)


@settings(deadline=None, max_examples=25)
@given(seeds, st.integers(1, 3))
def test_proposition_1_i(seed: int, batch: int) -> None:
    """E[B_D] over labels drawn from the predictions is λ w diag(G): summed over every labelling."""
    server = Server(seed, affine=False)
    s0, _, _ = points(seed, batch, 1.0)
    p = server.logits(s0).softmax(-1)
    expected = torch.zeros_like(s0)
    for labelling in itertools.product(range(CLASSES), repeat=batch):
        g = server.gradient(s0, torch.tensor(labelling))
        expected += torch.stack([p[i, y] for i, y in enumerate(labelling)]).prod() * g * g
    w, dense = 1 / batch, server.jacobian(s0)
    hessian = w * (torch.diag_embed(p) - p[:, :, None] * p[:, None, :])  # Λ
    ggn = torch.einsum("bkd,bkl,ble->bde", dense, hessian, dense)
    torch.testing.assert_close(expected, w * torch.diagonal(ggn, dim1=1, dim2=2))


@settings(deadline=None, max_examples=150)
@given(seeds, st.floats(0.05, 2.0), st.floats(0.01, 1000.0))
def test_proposition_1_ii(seed: int, step: float, factor: float) -> None:
    """CoeF-D is closer to the fresh gradient than reuse exactly when λ < 2 λ*."""
    server = Server(seed, affine=False)
    s0, delta, labels = points(seed, 4, step)
    stale, fresh = server.gradient(s0, labels), server.gradient(s0 + delta, labels)
    scaled = stale * stale * delta  # D δ
    assume(scaled.norm() > 1e-8)
    best = (scaled * (fresh - stale)).sum() / scaled.square().sum()  # λ*, as H̄δ = fresh − stale
    assume(abs(factor - 2 * best) > 1e-6 * max(1.0, abs(best)))
    compensated = make_method("coef_d", {"compensation_factor": factor}).compensate(Feedback(stale), delta, [])
    improves = (compensated - fresh).square().sum() < (stale - fresh).square().sum()
    assert bool(improves) == bool(factor < 2 * best)


def surrogate(server: Server, s0: Tensor, delta: Tensor, labels: Tensor, bound: float) -> Tensor:
    """F̂_J with the exact sensitivity and a constant M."""
    sensitivity = (server.jacobian(s0) @ delta[:, :, None]).square().sum()
    linear = (server.gradient(s0, labels) * delta).sum()
    return server.loss(s0, labels) + linear + bound / len(s0) / 2 * sensitivity


@settings(deadline=None, max_examples=150)
@given(seeds, st.floats(0.0, 20.0))
def test_proposition_2(seed: int, step: float) -> None:
    """With an affine server the surrogate is never below the loss, and touches it at δ = 0."""
    server = Server(seed, affine=True)
    s0, delta, labels = points(seed, 4, step)
    assert surrogate(server, s0, delta, labels, 0.5) >= server.loss(s0 + delta, labels) - 1e-9
    torch.testing.assert_close(surrogate(server, s0, 0 * delta, labels, 0.5), server.loss(s0, labels))


def test_proposition_2_needs_its_bound() -> None:
    """The same surrogate with a tenth of the bound does fall below the loss: the property can fail."""
    below = 0
    for seed in range(50):
        server = Server(seed, affine=True)
        s0, delta, labels = points(seed, 4, 1.0)
        below += int(surrogate(server, s0, delta, labels, 0.05) < server.loss(s0 + delta, labels))
    assert below > 10


@settings(deadline=None, max_examples=50)
@given(seeds, st.floats(0.01, 5.0))
def test_coef_j_is_the_gradient_of_the_surrogate(seed: int, step: float) -> None:
    """g̃ of CoeF-J with exact P and M = 1/2 is ∇F̂_J, by finite differences of the surrogate."""
    server = Server(seed, affine=True)
    s0, delta, labels = points(seed, 2, step)
    dense = server.jacobian(s0)  # (b, C, d): the exact projections are √C times its rows
    feedback = Feedback(server.gradient(s0, labels), CLASSES**0.5 * dense[:, None], torch.zeros(2, 1))
    method = make_method("coef_j", {"exact": True, "curvature_bound": 0.5})
    ours = method.compensate(feedback, delta, TASK.output_blocks({"labels": labels}))
    point = delta.clone().requires_grad_()
    (expected,) = torch.autograd.grad(surrogate(server, s0, point, labels, 0.5), point)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
