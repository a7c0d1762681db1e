"""CoeF-P: the gradient of the training server, held by the isotropic curvature whose least value is 0."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_coefsfl.methods import make_method
from hf_coefsfl.protocol.loss import LossSpec
from hf_coefsfl.protocol.messages import Feedback
from tests.support.toy import CAUSAL, CLASSIFICATION, REGRESSION, SPANS, TOKENS, toy_sides
from tests.support.walk import assert_close, trained, trained_by_hand

TASKS = [CLASSIFICATION, REGRESSION, TOKENS, CAUSAL, SPANS]


def compensated(gradient: Tensor, loss: float, displacement: Tensor) -> Tensor:
    return make_method("coef_p").compensate(Feedback(gradient, scalars=torch.tensor([loss])), displacement, ())  # type: ignore[attr-defined]


def test_a_case_by_hand() -> None:
    g, delta = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.1, -0.2]])
    # ‖g‖² = 25, L = 5: κ = 2.5
    torch.testing.assert_close(compensated(g, 5.0, delta), torch.tensor([[3.25, 3.5]]))


def test_the_model_of_the_loss_has_the_least_value_zero() -> None:
    """By autograd: g̃ is the gradient of L + ⟨g, δ⟩ + κ/2 ‖δ‖², and its zero is where the model is 0."""
    generator = torch.Generator().manual_seed(0)
    g, loss = torch.randn(4, 3, 5, generator=generator), 0.7
    curvature = g.square().sum() / (2 * loss)

    def model(delta: Tensor) -> Tensor:
        return loss + (g * delta).sum() + curvature / 2 * delta.square().sum()

    delta = torch.randn(4, 3, 5, generator=generator, requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(model(delta), delta)[0], compensated(g, loss, delta.detach()))
    least = -g / curvature
    assert compensated(g, loss, least).abs().max() < 1e-6 and abs(model(least).item()) < 1e-5


def test_units_and_batch_sizes_do_not_matter() -> None:
    """Activations in other units, or more samples in a batch, give the same step: there is nothing to tune."""
    generator = torch.Generator().manual_seed(0)
    g, delta = (torch.randn(2, 6, generator=generator) for _ in range(2))
    torch.testing.assert_close(compensated(g / 100, 1.3, delta * 100) * 100, compensated(g, 1.3, delta))
    repeated = compensated(g.repeat(3, 1) / 3, 1.3, delta.repeat(3, 1)) * 3  # the same samples three times in a batch
    torch.testing.assert_close(repeated, compensated(g, 1.3, delta).repeat(3, 1))


@pytest.mark.parametrize("loss", [0.0, -1.0, float("nan"), float("inf"), 1e-45])
def test_a_loss_that_bounds_nothing_leaves_the_gradient(loss: float) -> None:
    g = torch.ones(2, 3)
    assert torch.equal(compensated(g, loss, torch.ones(2, 3)), g)


@pytest.mark.parametrize("scalars", [None, torch.ones(0), torch.ones(5, 1, 1)])
def test_anything_but_one_number_is_refused(scalars: Tensor | None) -> None:
    """A server could make a client compute with tensors of any size."""
    rule: Any = make_method("coef_p")
    with pytest.raises(ValueError, match="expected the loss of the batch beside its gradient, one number"):
        rule.compensate(Feedback(torch.ones(2, 3), scalars=scalars), torch.ones(2, 3), ())


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.loss_type)
def test_a_round_equals_a_loop_by_hand(task: LossSpec, epochs: int) -> None:
    def compensate(g: Tensor, loss: Tensor, delta: Tensor) -> Tensor:
        return g + g.square().sum() / (2 * loss) * delta

    ours = trained("coef_p", toy_sides(task, 3, local_epochs=epochs))
    assert_close(ours, trained_by_hand(task, epochs, 2, compensate))


@pytest.mark.parametrize(("passes", "seen"), [(1, 3), (2, 6), (3, 9)])
def test_the_server_passes_as_often_as_asked(passes: int, seen: int) -> None:
    client, server = toy_sides(CLASSIFICATION, 3)
    forward: list[int] = []
    server.half.register_forward_hook(lambda *_: forward.append(1))
    trained("coef_p", (client, server), server_passes=passes)
    assert len(forward) == seen


def test_the_server_trains_as_if_it_had_more_epochs() -> None:
    _, ours = trained("coef_p", toy_sides(CLASSIFICATION, 3))
    _, theirs = trained("reuse", toy_sides(CLASSIFICATION, 3, local_epochs=2))
    assert all(torch.equal(x, y) for x, y in zip(ours, theirs, strict=True))


def test_titles_and_refusals() -> None:
    assert make_method("coef_p").full_title == "CoeF-P"
    assert make_method("coef_p", {"feedback_at": "initial"}).full_title == "CoeF-P, initial"
    assert make_method("coef_p", {"server_passes": 1}).full_title == "CoeF-P, 1 pass"
    assert make_method("coef_p", {"feedback_at": "final", "server_passes": 3}).full_title == "CoeF-P, final, 3 passes"
    with pytest.raises(ValueError, match=r"server_passes=0 must be a whole number of at least 1"):
        make_method("coef_p", {"server_passes": 0})
