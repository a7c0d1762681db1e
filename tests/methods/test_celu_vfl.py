"""CELU-VFL: weights by hand, a round against its twin in plain autograd, and what it has in common with reuse."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_coefsfl.methods import make_method
from hf_coefsfl.methods.celu_vfl import instance_weights
from hf_coefsfl.methods.reuse import FEEDBACK_AT
from hf_coefsfl.protocol.client_side import ClientSide
from hf_coefsfl.protocol.link import LocalLink
from hf_coefsfl.protocol.loss import LossSpec
from hf_coefsfl.protocol.messages import Feedback, SmashedData
from hf_coefsfl.protocol.server_side import ServerSide
from tests.support.toy import CAUSAL, CLASSIFICATION, MULTI_LABEL, REGRESSION, SPANS, TOKENS, toy_sides

Sides = tuple[ClientSide, ServerSide]
TASKS = [CLASSIFICATION, REGRESSION, MULTI_LABEL, TOKENS, CAUSAL, SPANS]
task_ids = ["classification", "regression", "multi-label", "tokens", "causal", "spans"]


def run(name: str, sides: Sides, link: type[LocalLink] = LocalLink, **options: Any) -> tuple[list[Tensor], LocalLink]:
    method = make_method(name, options)
    connection = link(method, sides[0])
    method.round(connection, sides[1])
    return [p.detach().clone() for side in sides for p in side.half.parameters()], connection


def test_weights_by_hand() -> None:
    now = torch.tensor([[2.0, 0.0], [1.0, 1.0], [1.0, 2.0], [0.0, 1.0], [-1.0, 0.0], [0.0, 0.0]])
    then = torch.tensor([[1.0, 0.0]] * 6)  # angles of 0, 45, 63.4, 90 and 180 degrees, and none
    for angle, expected in ((60.0, [1, 0.5**0.5, 0, 0, 0, 0]), (70.0, [1, 0.5**0.5, 0.2**0.5, 0, 0, 0])):
        torch.testing.assert_close(instance_weights(now, then, angle), torch.tensor(expected))
    tokens = now.reshape(6, 1, 2), then.reshape(6, 1, 2)
    assert torch.equal(instance_weights(*tokens, 60.0), instance_weights(now, then, 60.0))


# ---- A round against its twin ----


def loss_of_each(half: Any, s: Tensor, labels: dict[str, Tensor], task: LossSpec) -> list[Tensor]:
    """The part of the batch's loss that belongs to each sample, one forward pass each."""
    losses = []
    for i in range(len(s)):
        others = torch.arange(len(s)) != i
        if task in (CLASSIFICATION, TOKENS, CAUSAL):  # the loss of this sample alone is a mean over its own terms
            shifted = {k: t[:, 1:] if task is CAUSAL else t for k, t in labels.items()}["labels"]
            share = (shifted[i] != -100).sum() / (shifted != -100).sum()
            mine = {k: t.masked_fill(others.reshape(-1, *[1] * (t.ndim - 1)), -100) for k, t in labels.items()}
            losses.append(half(SmashedData(s), **mine).loss * share)
        elif task is SPANS:  # each side is a mean over the samples whose place lies in the window
            outputs, total = half.outputs(s), torch.zeros(())
            for side in ("start", "end"):
                place, valid = labels[f"{side}_positions"], labels[f"{side}_positions"] < s.shape[1]
                if valid[i]:
                    total = total - outputs[f"{side}_logits"][i].log_softmax(0)[place[i]] / valid.sum() / 2
            losses.append(total)
        else:
            losses.append(half(SmashedData(s[i : i + 1]), **{k: t[i : i + 1] for k, t in labels.items()}).loss / len(s))
    return losses


def leaping(task: LossSpec) -> Sides:
    """Plain SGD: AdamW would make full steps of gradients that are zero but for rounding."""
    sides = toy_sides(task, 3, local_epochs=2)
    for side in sides:
        side.optimizer = torch.optim.SGD(side.half.parameters(), lr=6.0)
    return sides


def by_hand(now: Tensor, then: Tensor) -> Tensor:
    cosines = [(a.flatten() @ b.flatten() / (a.norm() * b.norm()).clamp(min=1e-8)) for a, b in zip(now, then)]  # noqa: B905
    return torch.stack([c if c >= 0.5 else torch.zeros(()) for c in cosines])  # cos 60°


@pytest.mark.parametrize("at", FEEDBACK_AT)
@pytest.mark.parametrize("task", TASKS, ids=task_ids)
def test_a_round_against_plain_autograd(task: LossSpec, at: str) -> None:
    """Two epochs with steps so long that some samples lose their weight."""
    client, server = leaping(task)
    batches = [task.separate(batch) for batch in client.batches]
    initial = [client.half(**inputs).activations.detach() for inputs, _ in batches]
    first: dict[int, Tensor] = {}
    sent: dict[int, Tensor] = {}
    zeros = 0

    def gradient(batch: int) -> Tensor:
        leaf = initial[batch].clone().requires_grad_()
        return torch.autograd.grad(server.half(SmashedData(leaf), **batches[batch][1]).loss, leaf)[0]

    def train() -> None:
        nonlocal zeros
        for epoch in range(2):
            for batch, (_, labels) in enumerate(batches):
                g = gradient(batch)
                first.setdefault(batch, g)
                if at == "walk":
                    sent.setdefault(batch, g)
                w = by_hand(g, first[batch]) if epoch else torch.ones(len(g))
                zeros += int((w == 0).sum())
                losses = loss_of_each(server.half, initial[batch], labels, task)
                server.optimizer.zero_grad()
                sum(a * b for a, b in zip(w, losses, strict=True)).backward()
                server.optimizer.step()

    if at == "initial":
        sent = {batch: gradient(batch) for batch in range(3)}
    train()
    if at == "final":
        sent = {batch: gradient(batch) for batch in range(3)}
    for _ in range(2):
        for batch, (inputs, _) in enumerate(batches):
            s = client.half(**inputs).activations
            w = by_hand(s.detach(), initial[batch])
            zeros += int((w == 0).sum())
            client.optimizer.zero_grad()
            s.backward(sent[batch] * w[:, None, None])
            client.optimizer.step()
    expected = [p.detach().clone() for side in (client, server) for p in side.half.parameters()]
    ours, _ = run("celu_vfl", leaping(task), feedback_at=at)
    assert zeros > 0  # else the threshold was not tried
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


# ---- Algebra ----


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("at", FEEDBACK_AT)
def test_without_weights_it_is_reuse(at: str) -> None:
    def sides() -> Sides:
        return toy_sides(CLASSIFICATION, 3, local_epochs=2)

    reuse, _ = run("reuse", sides(), feedback_at=at)
    assert same(run("celu_vfl", sides(), feedback_at=at, max_angle=None)[0], reuse)
    assert not same(run("celu_vfl", sides(), feedback_at=at)[0], reuse)


@pytest.mark.parametrize("task", TASKS, ids=task_ids)
def test_one_batch_equals_vanilla(task: LossSpec) -> None:
    """The gradient is fresh: every weight is 1, up to rounding."""
    ours, theirs = (run(name, toy_sides(task, 1))[0] for name in ("celu_vfl", "vanilla"))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_server_weights_nothing_in_its_first_epoch() -> None:
    ours, theirs = (run(name, toy_sides(CLASSIFICATION, 3))[0] for name in ("celu_vfl", "reuse"))
    assert same(ours[2:], theirs[2:]) and not same(ours[:2], theirs[:2])


def test_a_batch_that_has_not_turned_is_trained_on_as_usual() -> None:
    plain, weighted = (toy_sides(TOKENS, 1) for _ in range(2))
    smashed = plain[0].exchange()[0]
    method: Any = make_method("celu_vfl")
    method._train_again(weighted[1], smashed, 0, 7 * weighted[1].gradient(smashed, 0))
    plain[1].train_step(smashed, 0)
    for a, b in zip(plain[1].half.parameters(), weighted[1].half.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_padding_has_no_part_in_the_cosine() -> None:
    client, _ = toy_sides(CLASSIFICATION, 1)
    mask = torch.tensor([[1, 1, 0]] * 4)
    half: Any = client.half
    forward = half.forward

    def padded(x: Tensor, crossing: dict[str, Tensor]) -> SmashedData:  # what padding holds changes from pass to pass
        s = forward(x).activations
        return SmashedData(s + 100 * torch.randn(s.shape) * (1 - mask)[..., None], crossing)

    half.forward, half.context = padded, lambda inputs: {"attention_mask": mask}
    client.exchange()
    client._first = None
    client.smash(0)
    feedback = Feedback(torch.ones(4, 3, 4))
    entering = make_method("celu_vfl").entering(client, 0, feedback, client.displacement(0))  # type: ignore[attr-defined]
    torch.testing.assert_close(entering, feedback.gradient)


# ---- Costs and options ----


@pytest.mark.parametrize("at", FEEDBACK_AT)
def test_transfers_and_bytes_are_those_of_reuse(at: str) -> None:
    meters = [
        run(name, toy_sides(CLASSIFICATION, 3, local_epochs=2), feedback_at=at)[1].meter
        for name in ("celu_vfl", "reuse")
    ]
    assert meters[0] == meters[1] and meters[0].transfers == 2


@pytest.mark.parametrize("angle", [0.0, -1.0, 91.0, float("nan")])
def test_options(angle: float) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 90 degrees or None, got"):
        make_method("celu_vfl", {"max_angle": angle})


def test_losses_that_have_no_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="how a ForObjectDetection loss is made of samples is not known"):
        make_method("celu_vfl").check_loss(LossSpec("ForObjectDetection", 3, ("labels",)))
