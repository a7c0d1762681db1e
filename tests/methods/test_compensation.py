"""CoeF-D, CoeF-J and the M_i rule against brute force: dense matrices and plain loops."""

import math

import pytest
import torch
from torch import Tensor

from hf_coefsfl.methods import make_method
from hf_coefsfl.protocol.loss import LossSpec
from hf_coefsfl.protocol.messages import Feedback, SmashedData
from hf_coefsfl.protocol.server_side import ServerSide
from tests.support.toy import CAUSAL, CLASSIFICATION, MULTI_LABEL, REGRESSION, SPANS, TOKENS, ToyServer, toy_sides

TASKS = [CLASSIFICATION, REGRESSION, MULTI_LABEL, TOKENS, CAUSAL, SPANS]
task_ids = ["classification", "regression", "multi-label", "tokens", "causal", "spans"]


def exchange(task: LossSpec) -> tuple[SmashedData, ServerSide, Tensor]:
    """The smashed data of a batch, the server, and a displacement."""
    client, server = toy_sides(task, 1)
    smashed = client.exchange()[0]
    torch.manual_seed(1)
    return smashed, server, 0.3 * torch.randn_like(smashed.activations)


def blocks_of(task: LossSpec, smashed: SmashedData) -> list[str]:
    return [block.name for block in task.output_blocks(smashed.labels, smashed.activations.shape[1])]


def jacobian(server: ServerSide, name: str, s: Tensor, sample: int) -> Tensor:
    """J of one sample: (outputs, activations), row by row with autograd."""
    half = server.half
    assert isinstance(half, ToyServer)
    s = s[sample : sample + 1].detach().requires_grad_()
    outputs = half.outputs(s)[name].reshape(-1)
    return torch.stack([torch.autograd.grad(o, s, retain_graph=True)[0].reshape(-1) for o in outputs])


def terms_of(task: LossSpec, labels: dict[str, Tensor], name: str, length: int) -> list[list[bool]]:
    """Which terms of a sample's output enter the loss, by the definition of the task's loss."""
    if name != "logits":
        positions = labels[name.replace("logits", "positions")]
        return [[bool(p < length)] for p in positions]
    target = labels["labels"]
    if task is CAUSAL:
        return [[*(bool(t != -100) for t in row[1:]), False] for row in target]
    if task is TOKENS:
        return [[bool(t != -100) for t in row] for row in target]
    return [[True] for _ in target]


def test_coef_d_by_hand() -> None:
    method = make_method("coef_d", {"compensation_factor": 2.0})
    g, delta = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.1, 0.5]])
    torch.testing.assert_close(method.compensate(Feedback(g), delta, []), torch.tensor([[1.2, 2.0]]))


@pytest.mark.parametrize("task", TASKS, ids=task_ids)
def test_coef_d_equals_the_dense_product(task: LossSpec) -> None:
    smashed, server, delta = exchange(task)
    feedback = make_method("coef_d").feedback(server, smashed, 0)
    s = smashed.activations.clone().requires_grad_()
    (g0,) = torch.autograd.grad(server.half(SmashedData(s), **smashed.labels).loss, s)
    torch.testing.assert_close(feedback.gradient, g0)
    factor = 3000 * len(g0) / 32
    curvature = factor * torch.diag(torch.diag(torch.outer(g0.reshape(-1), g0.reshape(-1))))
    expected = g0.reshape(-1) + curvature @ delta.reshape(-1)
    ours = make_method("coef_d").compensate(feedback, delta, [])
    torch.testing.assert_close(ours.reshape(-1), expected)
    given = make_method("coef_d", {"compensation_factor": factor})
    assert torch.equal(given.compensate(feedback, delta, []), ours)  # as it is, whatever the batch


def test_coef_d_gives_a_part_of_a_batch_the_same_share() -> None:
    """The gradient of a mean over fewer samples is larger; the default λ makes up for it."""
    g, delta = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.1, 0.5]])
    whole, part = (make_method("coef_d").compensate(Feedback(g.repeat(b, 1) / b), delta, []) * b for b in (8, 2))
    torch.testing.assert_close(whole[:2], part)


def scalar_bound(task: LossSpec, m: float, change: float, terms: int) -> float:
    """The coefficient c of one sample, as METHODS states it for each loss."""
    if task is REGRESSION:
        return 2.0
    bound, cap = (0.25, math.sqrt(terms)) if task is MULTI_LABEL else (0.5, math.sqrt(2) * math.sqrt(terms))
    return min(bound, m + 1.5 * change, cap / change) if change else min(bound, m)


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("projections", [1, 3, "exact"])
@pytest.mark.parametrize("task", TASKS, ids=task_ids)
def test_coef_j_equals_dense_jacobians(task: LossSpec, projections: int | str, scale: float) -> None:
    smashed, server, delta = exchange(task)
    delta = delta * scale
    kwargs = {"exact": True} if projections == "exact" else {"num_projections": projections}
    method = make_method("coef_j", kwargs)
    feedback = method.feedback(server, smashed, 0)
    outputs = task.output_blocks(smashed.labels, smashed.activations.shape[1])
    ours = method.compensate(feedback, delta, outputs)

    half = server.half
    assert isinstance(half, ToyServer)
    s0, length = smashed.activations, smashed.activations.shape[1]
    expected = feedback.gradient.clone()
    for index, name in enumerate(blocks_of(task, smashed)):
        entering = terms_of(task, smashed.labels, name, length)
        total_terms = sum(map(sum, entering))
        for i in range(len(s0)):
            dense = jacobian(server, name, s0, i)
            logits = half.outputs(s0[i : i + 1])[name][0].detach()
            if task in (TOKENS, CAUSAL):  # rows of J that belong to tokens without a label do not count
                keep = torch.tensor(entering[i]).repeat_interleave(task.num_labels)
                per_term = [logits[t] for t in range(length) if entering[i][t]]
            else:
                keep = torch.tensor(entering[i]).expand(len(dense))
                per_term = [logits] if entering[i][0] else []
            dense = dense * keep[:, None]
            if projections == "exact":
                sensitivity = dense.T @ dense
            else:
                assert feedback.curvature is not None
                u = feedback.curvature[i, index].flatten(1)
                # each u is Jᵀv of a sign vector: solve for it, and check the signs
                for row in u:
                    v = torch.linalg.lstsq(dense[keep].T, row[:, None]).solution[:, 0]
                    torch.testing.assert_close(dense[keep].T @ v, row, atol=1e-5, rtol=1e-4)
                sensitivity = u.T @ u / len(u)
            flat = delta[i].reshape(-1)
            change = math.sqrt(max((flat @ sensitivity @ flat).item(), 0.0))
            if task is MULTI_LABEL:
                p = logits.sigmoid()
                m = (p * (1 - p)).max().item()
                terms, w = task.num_labels, 1 / (len(s0) * task.num_labels)
            elif task is REGRESSION:
                m, terms, w = 2.0, 1, 1 / (len(s0) * task.num_labels)
            else:
                m = max([1 - (t.softmax(0) ** 2).sum().item() for t in per_term], default=0.0)
                terms = sum(entering[i])
                w = 1 / total_terms / (2 if task is SPANS else 1)
            c = scalar_bound(task, min(m, 0.5) if task is not REGRESSION else m, change, terms)
            expected[i] += (w * c * (sensitivity @ flat)).view_as(expected[i])
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("task", TASKS, ids=task_ids)
def test_projections_are_of_signs(task: LossSpec) -> None:
    """u = Jᵀv with every entry of v ±1 where the output enters the loss and 0 elsewhere."""
    smashed, server, _ = exchange(task)
    method = make_method("coef_j", {"num_projections": 4})
    generator = torch.Generator().manual_seed(0)
    outputs = server.half(smashed)
    for block in task.output_blocks(smashed.labels, smashed.activations.shape[1]):
        directions = method._directions(outputs[block.name], block.mask, [generator])  # type: ignore[attr-defined]
        assert len(directions) == 4
        for v in directions:
            mask = block.mask.reshape(block.mask.shape + (1,) * (v.ndim - block.mask.ndim)).expand_as(v)
            assert (v[mask].abs() == 1).all() and (v[~mask] == 0).all()
        assert not torch.equal(directions[0], directions[1])


def test_m_rule_by_hand() -> None:
    """One sample of a batch of two classes: each arm of the minimum once."""
    from hf_coefsfl.methods.coef_j import sample_bound

    block = CLASSIFICATION.output_blocks({"labels": torch.tensor([0, 1, 2])})[0]
    change, m = torch.tensor([0.0, 0.1, 100.0]), torch.tensor([0.2, 0.2, 0.2])
    expected = torch.tensor([0.2, 0.35, math.sqrt(2) / 100])
    torch.testing.assert_close(sample_bound(change, m, block), expected)
    at_bound = sample_bound(torch.tensor([1.0, 1.0, 1.0]), m, block)
    torch.testing.assert_close(at_bound, torch.tensor([0.5, 0.5, 0.5]))


def test_question_answering_sends_two_blocks() -> None:
    smashed, server, _ = exchange(SPANS)
    feedback = make_method("coef_j", {"num_projections": 3}).feedback(server, smashed, 0)
    assert feedback.curvature is not None and feedback.scalars is not None
    assert feedback.curvature.shape == (4, 2, 3, *smashed.activations.shape[1:])
    assert feedback.scalars.shape == (4, 2)


def test_constant_bound_covers_proposition_2() -> None:
    smashed, server, delta = exchange(CLASSIFICATION)
    method = make_method("coef_j", {"exact": True, "curvature_bound": 0.5})
    feedback = method.feedback(server, smashed, 0)
    ours = method.compensate(feedback, delta, CLASSIFICATION.output_blocks(smashed.labels))
    for i in range(4):
        dense = jacobian(server, "logits", smashed.activations, i)
        expected = feedback.gradient[i].reshape(-1) + 0.5 / 4 * dense.T @ dense @ delta[i].reshape(-1)
        torch.testing.assert_close(ours[i].reshape(-1), expected)
