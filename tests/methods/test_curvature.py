"""GGN, Hutchinson and Lanczos against dense matrices."""

from pathlib import Path

import pytest
import torch

from hf_coefsfl.methods import make_method
from hf_coefsfl.methods.parts.lanczos import leading_eigenpairs
from hf_coefsfl.protocol.link import LocalLink
from hf_coefsfl.protocol.loss import LossSpec
from hf_coefsfl.protocol.messages import SmashedData
from hf_coefsfl.split import split_model
from tests.support.federated import images, tiny_vit, trainer, weights
from tests.support.selection import slow_except
from tests.support.toy import (
    CAUSAL,
    CLASSIFICATION,
    MULTI_LABEL,
    REGRESSION,
    SPANS,
    TOKENS,
    ToyServer,
    toy_batch,
    toy_sides,
)

TASKS = [CLASSIFICATION, REGRESSION, MULTI_LABEL, TOKENS, CAUSAL, SPANS]
task_ids = ["classification", "regression", "multi-label", "tokens", "causal", "spans"]


def random_operators(batch: int, size: int, rank: int) -> torch.Tensor:
    factors = torch.randn(batch, size, rank, dtype=torch.float64)
    return factors @ factors.transpose(1, 2)


def test_lanczos_finds_the_leading_eigenpairs() -> None:
    torch.manual_seed(0)
    dense = random_operators(5, 12, 6)
    values, vectors = leading_eigenpairs(
        lambda v: torch.einsum("bij,bj->bi", dense, v), torch.randn(5, 12, dtype=torch.float64), 12, 4
    )
    expected, basis = torch.linalg.eigh(dense)
    torch.testing.assert_close(values, expected.flip(1)[:, :4])
    overlap = (vectors * basis.transpose(1, 2).flip(1)[:, :4]).sum(2).abs()
    torch.testing.assert_close(overlap, torch.ones_like(overlap))
    torch.testing.assert_close(torch.einsum("bij,bkj->bki", dense, vectors), values[:, :, None] * vectors)


def test_lanczos_takes_magnitude_not_sign() -> None:
    dense = torch.diag(torch.tensor([1.0, -5.0, 3.0, 0.5])).double()[None]
    values, _ = leading_eigenpairs(
        lambda v: torch.einsum("bij,bj->bi", dense, v), torch.ones(1, 4, dtype=torch.float64), 4, 2
    )
    torch.testing.assert_close(values, torch.tensor([[-5.0, 3.0]]).double())


def test_lanczos_stops_in_an_invariant_subspace() -> None:
    """Started in the eigenvector of a rank-one operator, it returns that pair and zeros, no noise."""
    u = torch.tensor([[3.0, 4.0, 0.0]], dtype=torch.float64)
    values, vectors = leading_eigenpairs(lambda v: u * (u * v).sum(1, keepdim=True), u.clone(), 3, 2)
    torch.testing.assert_close(values, torch.tensor([[25.0, 0.0]]).double())
    torch.testing.assert_close(vectors[:, 0].abs(), u / 5)
    operator = torch.einsum("bk,bki,bkj->bij", values, vectors, vectors)
    torch.testing.assert_close(operator, torch.einsum("bi,bj->bij", u, u))


@pytest.mark.parametrize("task", TASKS, ids=task_ids)
def test_hessian_product_is_the_hessian_of_the_loss(task: LossSpec) -> None:
    server, batch = ToyServer(task), toy_batch(task)
    _, labels = task.separate(batch)
    torch.manual_seed(2)
    outputs = {n: torch.randn_like(o) for n, o in server.outputs(torch.randn(4, 3, 4)).items()}
    for block in task.output_blocks(labels, 3):
        base, tangent = outputs[block.name], torch.randn_like(outputs[block.name])
        expected = torch.autograd.functional.hvp(
            lambda o, name=block.name: server.loss({**outputs, name: o}, labels), base, tangent
        )[1]
        torch.testing.assert_close(block.hessian_product(base, tangent), expected, atol=1e-6, rtol=1e-4)


def dense_ggn(half: ToyServer, task: LossSpec, smashed: SmashedData, sample: int) -> torch.Tensor:
    """Jᵀ Λ J of one sample, from the dense Jacobian and the dense Hessian of the loss w.r.t. all outputs."""
    s = smashed.activations
    size = s[0].numel()
    total = torch.zeros(size, size)
    with torch.no_grad():
        outputs = half.outputs(s)
    for name, base in outputs.items():

        def of_sample(x: torch.Tensor, name: str = name) -> torch.Tensor:
            return half.outputs(x.view_as(s[:1]))[name].reshape(-1)

        dense = torch.autograd.functional.jacobian(of_sample, s[sample].reshape(-1))
        hessian = torch.autograd.functional.hessian(
            lambda o, name=name: half.loss({**outputs, name: o}, smashed.labels), base
        ).reshape(base.numel(), base.numel())
        k = base[0].numel()
        total += dense.T @ hessian[sample * k : (sample + 1) * k, sample * k : (sample + 1) * k] @ dense
    return total


@pytest.mark.parametrize("task", TASKS, ids=task_ids)
def test_ggn_of_full_rank_is_the_dense_product(task: LossSpec) -> None:
    client, server = toy_sides(task, 1)
    smashed = client.exchange()[0]
    method = make_method("ggn", {"rank": 12, "num_iterations": 12})
    feedback = method.feedback(server, smashed, 0)
    delta = torch.randn_like(smashed.activations)
    ours = method.compensate(feedback, delta, [])
    assert isinstance(server.half, ToyServer)
    for i in range(4):
        # Lanczos sees the Krylov space of g0 only: compare on that space, where g0 itself lies
        dense = dense_ggn(server.half, task, smashed, i)
        assert feedback.curvature is not None
        low_rank = feedback.curvature[i].flatten(1).T @ feedback.curvature[i].flatten(1)
        krylov = [feedback.gradient[i].reshape(-1)]
        for _ in range(2):
            krylov.append(dense @ krylov[-1])
        for v in krylov:
            torch.testing.assert_close(low_rank @ v, dense @ v, atol=1e-5, rtol=1e-2)
        torch.testing.assert_close(
            ours[i].reshape(-1),
            feedback.gradient[i].reshape(-1) + low_rank @ delta[i].reshape(-1),
            atol=1e-6,
            rtol=1e-4,
        )


def test_ggn_keeps_the_leading_pairs() -> None:
    client, server = toy_sides(CLASSIFICATION, 1)
    smashed = client.exchange()[0]
    feedback = make_method("ggn", {"rank": 1, "num_iterations": 12}).feedback(server, smashed, 0)
    assert feedback.curvature is not None and feedback.curvature.shape == (4, 1, *smashed.activations.shape[1:])
    assert isinstance(server.half, ToyServer)
    for i in range(4):
        largest = torch.linalg.eigvalsh(dense_ggn(server.half, CLASSIFICATION, smashed, i)).max()
        found = feedback.curvature[i].square().sum()
        assert 0.5 * largest <= found <= largest * 1.001  # the largest that g0 has a part in


@pytest.mark.parametrize("task", slow_except(CLASSIFICATION, of=TASKS), ids=task_ids)
def test_hutchinson_estimates_the_dense_diagonal(task: LossSpec) -> None:
    client, server = toy_sides(task, 1)
    smashed = client.exchange()[0]
    method = make_method("hutchinson", {"num_probes": 4000, "relative_step": 1e-3})
    half = server.half.double()
    smashed = smashed.map(lambda t: t.double() if t.is_floating_point() else t)
    feedback = method.feedback(server, smashed, 0)

    def loss(s: torch.Tensor) -> torch.Tensor:
        return half(SmashedData(s), **smashed.labels).loss

    size = smashed.activations.numel()
    hessian = torch.autograd.functional.hessian(loss, smashed.activations).reshape(size, size)
    assert feedback.curvature is not None
    error = (feedback.curvature.reshape(-1) - hessian.diagonal()).abs()
    # the estimate's standard error is the root of the squared off-diagonal row sum over the probes
    spread = (hessian.square().sum(1) - hessian.diagonal().square()).clamp(min=0).sqrt() / 4000**0.5
    assert (error <= 5 * spread + 1e-6).all()
    assert hessian.diagonal().abs().max() > 20 * spread.max()  # so that the bound says something


@pytest.mark.parametrize("method", ["ggn", "hutchinson"])
def test_one_batch_equals_vanilla_and_transfers(method: str) -> None:
    results = []
    for name in (method, "vanilla"):
        client, server = toy_sides(CLASSIFICATION, 1)
        rule = make_method(name)
        link = LocalLink(rule, client)
        rule.round(link, server)
        results.append(torch.cat([p.detach().reshape(-1) for p in client.half.parameters()]))
        assert link.meter.transfers == 2
    assert torch.equal(*results)


@pytest.mark.parametrize(("method", "factor"), [("ggn", 4), ("hutchinson", 1)])
def test_down_link(method: str, factor: int) -> None:
    client, server = toy_sides(CLASSIFICATION, 3)
    rule = make_method(method)
    link = LocalLink(rule, client)
    rule.round(link, server)
    activations = 3 * 4 * 3 * 4 * 4
    assert link.meter.down == {"gradients": activations, "curvature": factor * activations}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_ggn_through_a_real_model(tmp_path: Path, attention: str) -> None:
    """sdpa's fused kernel has no second derivative: the method must not use it."""
    model = tiny_vit(attn_implementation=attention)
    run = trainer(tmp_path, model, method="ggn", num_rounds=2)
    run.train()
    assert all(t.isfinite().all() for t in weights(run).values())
    assert run.state.log_history[1]["correction_ratio"] > 0


@pytest.mark.parametrize("name", ["ggn", "fsl_sage"])
def test_attention_without_a_second_derivative_is_refused(name: str) -> None:
    split = split_model(tiny_vit(), 2)
    loss_spec = LossSpec.of(split.model, ["labels"])
    for kernel in ("flash_attention_2", "flash_attention_3", "kernels-community/flash-attn", "flex_attention"):
        split.model.config._attn_implementation = kernel
        with pytest.raises(ValueError, match=rf"twice.*attn_implementation='{kernel}'.*'sdpa' or 'eager'"):
            make_method(name).setup(split, loss_spec, seed=0)
        make_method("hutchinson").setup(split, loss_spec, seed=0)  # differences of gradients need one derivative
    for kernel in ("eager", "sdpa"):
        split.model.config._attn_implementation = kernel
        make_method(name).setup(split, loss_spec, seed=0)


def test_ggn_of_bfloat16_weights(tmp_path: Path) -> None:
    data = images().map(lambda row: row).with_format("torch")
    run = trainer(
        tmp_path,
        tiny_vit().to(torch.bfloat16),
        data,
        method="ggn",
        num_rounds=2,
        eval_dataset=None,
        data_collator=lambda rows: {
            "pixel_values": torch.stack([r["pixel_values"] for r in rows]).bfloat16(),
            "labels": torch.stack([r["labels"] for r in rows]),
        },
    )
    run.train()
    assert run.state.log_history[1]["correction_ratio"] > 0


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("ggn", {"rank": 0}, "rank=0 must be"),
        ("ggn", {"rank": 5, "num_iterations": 4}, "num_iterations=4 must be a whole number of at least 5"),
        ("hutchinson", {"num_probes": 0}, "num_probes=0 must be"),
        ("hutchinson", {"relative_step": 0.0}, "relative_step must lie between 0 and 1, got 0.0"),
    ],
)
def test_bad_options(name: str, kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_method(name, kwargs)
