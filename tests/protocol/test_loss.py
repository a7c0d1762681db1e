"""Weights and curvature bounds of each loss against its dense Hessian."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.loss.loss_utils import ForSequenceClassificationLoss

from hf_coefsfl.protocol.loss import LossSpec, OutputBlock
from tests.support.toy import CAUSAL, CLASSIFICATION, MULTI_LABEL, REGRESSION, SPANS, TOKENS, ToyServer, toy_batch

TASKS = [CLASSIFICATION, REGRESSION, MULTI_LABEL, TOKENS, CAUSAL, SPANS]


@pytest.mark.parametrize(("problem", "labels"), [(None, 3), (None, 1), ("regression", 2), (None, 2)])
@pytest.mark.parametrize("floating", [False, True])
def test_the_loss_of_a_batch_is_the_mean_of_its_samples(problem: str | None, labels: int, floating: bool) -> None:
    """As transformers computes it: softmax, squared error or sigmoids, by the labels."""
    torch.manual_seed(0)
    logits, target = torch.randn(6, labels), torch.randint(labels, (6,))
    if floating or problem == "regression" or labels == 1:
        target = torch.rand(6) if labels == 1 else torch.rand(6, labels)
    spec = LossSpec("ForSequenceClassification", labels, ("labels",), problem_type=problem)
    theirs = ForSequenceClassificationLoss(target, logits, SimpleNamespace(num_labels=labels, problem_type=problem))
    losses = spec.sample_losses(logits, target)
    assert losses.shape == (6,)
    torch.testing.assert_close(losses.mean(), theirs)


@pytest.mark.parametrize("task", TASKS, ids=lambda t: f"{t.loss_type}-{t.problem_type}")
def test_curvature_bounds_the_hessian_of_the_loss(task: LossSpec) -> None:
    """The Hessian w.r.t. an output has no eigenvalue above w m <= w M, and w is not larger than needed."""
    server = ToyServer(task)
    batch = toy_batch(task)
    _, labels = task.separate(batch)
    torch.manual_seed(3)
    outputs = {n: 3 * torch.randn_like(o) for n, o in server.outputs(torch.randn(4, 3, 4)).items()}
    for block in task.output_blocks(labels, 3):
        base = outputs[block.name]

        def loss(o: torch.Tensor, name: str = block.name) -> torch.Tensor:
            return server.loss({**outputs, name: o}, labels)

        hessian = torch.autograd.functional.hessian(loss, base).reshape(base.numel(), base.numel())
        m = block.curvature(base)
        size = base[0].numel()
        for i in range(4):
            own = hessian[i * size : (i + 1) * size, i * size : (i + 1) * size]
            largest = torch.linalg.eigvalsh(own).max()
            assert largest <= block.weight * m[i] + 1e-6
        assert (m <= block.bound + 1e-6).all()
        # entries that do not enter the loss have no curvature
        mask = block.mask.reshape(block.mask.shape + (1,) * (base.ndim - block.mask.ndim)).expand_as(base)
        assert (hessian.diagonal()[~mask.reshape(-1)] == 0).all()
        if block.kind == "squared_error":
            torch.testing.assert_close(hessian, torch.eye(base.numel()) * 2 * block.weight)


def test_softmax_weight_is_exact() -> None:
    """At uniform probabilities of two classes the Hessian reaches w/2 exactly."""
    task = LossSpec("ForSequenceClassification", 2, ("labels",))
    block = task.output_blocks({"labels": torch.tensor([0, 1, 1])})[0]
    hessian = torch.autograd.functional.hessian(
        lambda o: torch.nn.functional.cross_entropy(o, torch.tensor([0, 1, 1])), torch.zeros(3, 2)
    ).reshape(6, 6)
    torch.testing.assert_close(torch.linalg.eigvalsh(hessian).max(), block.weight * block.bound)


@given(st.integers(2, 6), st.integers(0, 10_000), st.floats(0.01, 5.0))
def test_curvature_grows_no_faster_than_the_rule_says(classes: int, seed: int, step: float) -> None:
    """The largest softmax curvature after a move of length D is at most m + 1.5 D."""
    generator = torch.Generator().manual_seed(seed)
    start = 2 * torch.randn(classes, generator=generator, dtype=torch.float64)
    move = torch.randn(classes, generator=generator, dtype=torch.float64)
    move = move / move.norm() * step
    p, q = start.softmax(0), (start + move).softmax(0)
    largest = torch.linalg.eigvalsh(torch.diag(q) - torch.outer(q, q)).max()
    assert largest <= min(0.5, 1 - (p @ p).item()) + 1.5 * step + 1e-9


def test_labels_of_ignored_samples_do_not_count() -> None:
    blocks = CLASSIFICATION.output_blocks({"labels": torch.tensor([0, -100, 2])})
    assert blocks[0].mask.tolist() == [True, False, True] and blocks[0].weight.item() == 0.5


def test_causal_positions_predict_the_next_label() -> None:
    labels = torch.tensor([[-100, 4, 5], [-100, -100, 6]])
    block = CAUSAL.output_blocks({"labels": labels})[0]
    assert block.mask.tolist() == [[True, True, False], [False, True, False]]
    assert block.weight.item() == pytest.approx(1 / 3)
    torch.testing.assert_close(block.residual_diameter(), torch.tensor([2.0, 2**0.5]))


def test_unknown_losses_are_refused() -> None:
    with pytest.raises(ValueError, match="ForCTC loss is not known"):
        LossSpec("ForCTC", 3, ("labels",)).output_blocks({"labels": torch.zeros(2, 3)})


def test_no_output_is_bounded_by_infinity_only_for_squares() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    weight = torch.tensor(1.0)
    assert OutputBlock("logits", "squared_error", mask, weight).residual_diameter().isinf().all()
    assert OutputBlock("logits", "sigmoid", mask, weight).residual_diameter().isfinite().all()
