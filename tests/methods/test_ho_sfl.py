"""HO-SFL: slopes against autograd, a round against its twin, and a client without a graph."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_coefsfl.methods import make_method
from hf_coefsfl.methods.ho_sfl import HOSFL
from hf_coefsfl.methods.parts.zeroth_order import Direction
from hf_coefsfl.methods.reuse import FEEDBACK_AT
from hf_coefsfl.protocol.client_side import ClientSide
from hf_coefsfl.protocol.context import Observations, RoundContext
from hf_coefsfl.protocol.link import LocalLink
from hf_coefsfl.protocol.loss import LossSpec
from hf_coefsfl.protocol.messages import Message
from hf_coefsfl.split import split_model
from tests.support.federated import images, tiny_vit
from tests.support.slopes import Sides, double_sides, generator, values
from tests.support.toy import CAUSAL, CLASSIFICATION, REGRESSION, SPANS, TOKENS, toy_sides

TASKS = [CLASSIFICATION, REGRESSION, TOKENS, CAUSAL, SPANS]


def run(name: str, sides: Sides, **options: Any) -> LocalLink:
    method = make_method(name, options)
    link = LocalLink(method, sides[0])
    method.round(link, sides[1])
    return link


def feedback_of(client: Any, server: Any, batch: int) -> Tensor:
    return server.gradient(client.smash(batch), batch)


# ---- The estimate ----


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.loss_type)
def test_slope_approaches_the_derivative_along_u(task: LossSpec) -> None:
    """d → ⟨∇_θᶜ L, u⟩ through the whole model, with an error of second order."""
    client, server = double_sides(task)
    g0 = feedback_of(client, server, 0)
    direction = Direction(list(client.half.parameters()), generator(5))
    gradients = torch.autograd.grad(client.half(client.batches[0]["x"]).activations, client.half.parameters(), g0)
    exact = sum((g * u).sum().item() for g, (_, u) in zip(gradients, direction, strict=True))

    def error(scale: float) -> float:
        client.observed = Observations()
        return abs(HOSFL(perturbation_scale=scale)._slope(client, 0, g0, direction).item() - exact)

    assert abs(exact) > 1e-3 and error(1e-1) == pytest.approx(100 * error(1e-2), rel=0.1)


def test_many_directions_give_the_step_of_a_backward_pass() -> None:
    """The mean of d u is an unbiased estimate of Jᵀ g₀."""
    client, server = double_sides(CLASSIFICATION, 1)
    g0, before = feedback_of(client, server, 0), values(client)
    gradients = torch.autograd.grad(client.half(client.batches[0]["x"]).activations, client.half.parameters(), g0)
    HOSFL(num_perturbations=4000, learning_rate=1.0)._step(client, 0, g0, 0)
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, values(client), strict=True)])
    exact = torch.cat([g.flatten() for g in gradients])
    assert (moved - exact).norm() < 0.15 * exact.norm()  # √(16 / 4000) = 0.06 is expected of 16 weights


# ---- A round ----


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("task", [CLASSIFICATION, TOKENS], ids=lambda t: t.loss_type)
def test_round_against_its_twin(task: LossSpec, epochs: int) -> None:
    """The same round written out over whole lists of weights."""
    mu, P, rate, count = 1e-2, 3, 0.1, 2
    client, server = double_sides(task, count, local_epochs=epochs)
    feedback = [feedback_of(client, server, batch) for batch in range(count)]
    names = [name for name, _ in client.half.named_parameters()]
    theta = values(client)

    def activations(weights: list[Tensor], batch: int) -> Tensor:
        given = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(client.half, given, (client.batches[batch]["x"],)).activations.detach()

    for epoch in range(epochs):
        for batch, g0 in enumerate(feedback):
            step = [torch.zeros_like(t) for t in theta]
            for p in range(P):
                source = client.context.generator("method", (epoch * count + batch) * P + p)
                u = [torch.randn(t.shape, generator=source).double() for t in theta]
                ends = [
                    activations([t + sign * mu * v for t, v in zip(theta, u, strict=True)], batch) for sign in (1, -1)
                ]
                d = (g0 * (ends[0] - ends[1])).sum() / (2 * mu)
                step = [s + d * v / P for s, v in zip(step, u, strict=True)]
            theta = [t - rate * s for t, s in zip(theta, step, strict=True)]
    before = values(client)
    run("ho_sfl", (client, server), num_perturbations=P, perturbation_scale=mu, learning_rate=rate)
    for ours, twin, start in zip(values(client), theta, before, strict=True):
        torch.testing.assert_close(ours, twin, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(ours, start, rtol=1e-3)


@pytest.mark.parametrize("at", FEEDBACK_AT)
def test_server_transfers_and_bytes_are_those_of_reuse(at: str) -> None:
    sides = {name: toy_sides(TOKENS, 3, local_epochs=2) for name in ("ho_sfl", "reuse")}
    links = {name: run(name, both, feedback_at=at) for name, both in sides.items()}
    assert links["ho_sfl"].meter == links["reuse"].meter and links["ho_sfl"].meter.transfers == 2
    servers = [values(both[1]) for both in sides.values()]
    assert all(torch.equal(a, b) for a, b in zip(*servers, strict=True))


def test_the_client_holds_no_graph_and_keeps_nothing() -> None:
    client, server = toy_sides(CLASSIFICATION, 3, local_epochs=2)
    tracked: list[bool] = []
    client.half.register_forward_hook(lambda *_: tracked.append(torch.is_grad_enabled()))
    run("ho_sfl", (client, server), num_perturbations=2)
    assert tracked == [False] * (3 + 2 * 3 * 2 * 2)  # the exchange; epochs, batches, directions and their ends
    assert all(p.grad is None for p in client.half.parameters())
    assert not client.optimizer.state and not len(client.initial)


def test_reports_do_not_grow_with_the_directions() -> None:
    """A deployment bounds how many numbers a client reports."""
    client, server = toy_sides(CLASSIFICATION, 3, local_epochs=2)
    run("ho_sfl", (client, server), num_perturbations=50)
    assert len(client.observed.values["activations"]) == 3 + 2 * 3


def test_a_sum_keeps_what_is_not_finite() -> None:
    seen = Observations()
    seen.add("a", torch.tensor(1.0))
    for worst in (2.0, float("nan")):
        with seen.summed("a"):
            seen.add("a", torch.tensor(3.0))
            seen.add("a", torch.tensor(worst))
    with seen.summed("b"):
        pass
    assert [v.item() for v in seen.values["a"][:2]] == [1.0, 5.0] and seen.first_nonfinite("a") == 2


def test_both_ends_of_a_difference_see_the_same_dropout_masks() -> None:
    """With half of everything dropped, other masks would change activations by their own size, 1/2μ times."""
    split = split_model(tiny_vit(dropout=0.5), 2).train()
    batch = images(4)[:]
    data = [{"pixel_values": batch["pixel_values"], "labels": batch["labels"]}]
    task = LossSpec("ForImageClassification", 3, ("labels",))
    optimizer = torch.optim.SGD(split.client.parameters(), lr=0.1)
    client = ClientSide(split.client, data, optimizer, RoundContext(seed=0, round_index=0, client=0), task)
    direction = Direction(list(split.client.parameters()), generator(0))
    g0 = torch.randn(client.smash(0).activations.shape, generator=generator(1))
    slopes = [HOSFL(perturbation_scale=scale)._slope(client, 0, g0, direction).item() for scale in (3e-3, 1e-3)]
    assert slopes[0] == pytest.approx(slopes[1], rel=0.2)


def test_steps_are_clipped() -> None:
    moved = []
    for limit in (0.0, 1e-3):
        client, server = toy_sides(CLASSIFICATION, 1, max_grad_norm=limit)
        before = values(client)
        run("ho_sfl", (client, server), learning_rate=1.0)
        moved.append(sum((a - b).norm().item() ** 2 for a, b in zip(before, values(client), strict=True)) ** 0.5)
    assert moved[1] <= 1e-3 * 1.001 < moved[0]


def test_learning_rate_is_the_runs_unless_given() -> None:
    moved = []
    for rate, given in ((0.1, None), (0.2, 0.1), (0.2, None)):
        sides = toy_sides(CLASSIFICATION, 1, lr=rate)
        run("ho_sfl", sides, learning_rate=given)
        moved.append(values(sides[0]))
    assert torch.equal(moved[0][0], moved[1][0]) and not torch.equal(moved[0][0], moved[2][0])


def test_messages_of_other_methods_are_refused() -> None:
    client, _ = toy_sides(CLASSIFICATION, 1)
    with pytest.raises(ValueError, match="expected Feedback messages, got Message"):
        HOSFL().update(client, [Message()], None)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_perturbations": 0}, r"num_perturbations=0 must be a whole number of at least 1"),
        ({"perturbation_scale": 0}, r"perturbation_scale=0 must be a finite number above 0"),
        ({"perturbation_scale": float("inf")}, r"perturbation_scale=inf must be"),
        ({"learning_rate": -1.0}, r"learning_rate=-1.0 must be a finite number above 0"),
        ({"num_perturbations": 1.5}, r"'num_perturbations' of method 'ho_sfl' must be int"),
    ],
)
def test_options(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_method("ho_sfl", kwargs)
