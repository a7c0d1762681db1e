"""The algebra between the methods, on hand-sized halves."""

import pytest
import torch

from hf_coefsfl.methods import make_method
from hf_coefsfl.protocol.link import LocalLink
from hf_coefsfl.protocol.loss import LossSpec
from tests.support.toy import CAUSAL, CLASSIFICATION, REGRESSION, SPANS, TOKENS, toy_sides

Weights = dict[str, torch.Tensor]


def train(
    method: str, task: LossSpec, num_batches: int, link: type[LocalLink] = LocalLink, **options: object
) -> Weights:
    kwargs = {k: options.pop(k) for k in list(options) if k in ("local_epochs", "affine", "max_grad_norm")}
    client, server = toy_sides(task, num_batches, **kwargs)
    rule = make_method(method, options)
    rule.round(link(rule, client), server)
    weights = {f"client.{n}": p.detach() for n, p in client.half.named_parameters()}
    return weights | {f"server.{n}": p.detach() for n, p in server.half.named_parameters()}


def same(a: Weights, b: Weights, **tolerance: float) -> bool:
    if tolerance:
        return all(torch.allclose(a[n], b[n], **tolerance) for n in a)
    return all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("task", [CLASSIFICATION, REGRESSION, TOKENS, CAUSAL, SPANS], ids=lambda t: t.loss_type)
@pytest.mark.parametrize("method", ["reuse", "oracle", "coef_d", "coef_j", "ggn", "hutchinson"])
def test_one_batch_per_round_equals_vanilla(method: str, task: LossSpec) -> None:
    assert same(train(method, task, 1), train("vanilla", task, 1))


@pytest.mark.parametrize("method", ["reuse", "oracle", "coef_d", "coef_j"])
def test_several_batches_differ_from_vanilla(method: str) -> None:
    """So that the equality above is no accident of the toy."""
    assert not same(train(method, CLASSIFICATION, 3), train("vanilla", CLASSIFICATION, 3))


def test_no_compensation_equals_reuse() -> None:
    reuse = train("reuse", CLASSIFICATION, 3, local_epochs=2)
    assert same(train("coef_d", CLASSIFICATION, 3, local_epochs=2, compensation_factor=0), reuse)
    assert same(train("coef_j", CLASSIFICATION, 3, local_epochs=2, curvature_bound=0.0), reuse)
    assert not same(train("coef_d", CLASSIFICATION, 3, local_epochs=2), reuse)
    assert not same(train("coef_j", CLASSIFICATION, 3, local_epochs=2), reuse)


def test_exact_sensitivity_of_a_linear_server_and_squared_loss_is_the_oracle() -> None:
    ours = train("coef_j", REGRESSION, 3, affine=True, exact=True, local_epochs=2)
    assert same(ours, train("oracle", REGRESSION, 3, affine=True, local_epochs=2), atol=2e-5, rtol=1e-4)
    assert not same(ours, train("reuse", REGRESSION, 3, affine=True, local_epochs=2), atol=2e-5, rtol=1e-4)


def test_server_side_is_the_same_for_all_once_per_round_methods() -> None:
    runs = [train(m, CLASSIFICATION, 3) for m in ("reuse", "oracle", "coef_d", "coef_j")]
    server = [{n: t for n, t in run.items() if n.startswith("server")} for run in runs]
    assert all(same(server[0], other) for other in server[1:])


@pytest.mark.parametrize(
    ("method", "transfers"),
    [("vanilla", 2 * 3 * 2), ("reuse", 2), ("oracle", 2 * 3 * 2 + 1), ("coef_d", 2), ("coef_j", 2)],
)
def test_transfers(method: str, transfers: int) -> None:
    client, server = toy_sides(CLASSIFICATION, 3, local_epochs=2)
    rule = make_method(method)
    link = LocalLink(rule, client)
    rule.round(link, server)
    assert link.meter.transfers == transfers


def test_bytes_by_heading() -> None:
    """3 batches of 4 samples with 3 x 4 activations of 4 bytes, int64 labels, one float m a sample."""
    client, server = toy_sides(CLASSIFICATION, 3)
    rule = make_method("coef_j", {"num_projections": 2})
    link = LocalLink(rule, client)
    rule.round(link, server)
    activations = 3 * 4 * 3 * 4 * 4
    assert link.meter.up == {"smashed_data": activations, "extras": 3 * 4 * 8}
    assert link.meter.down == {"gradients": activations, "curvature": 2 * activations, "extras": 3 * 4 * 4}


def test_first_displacement_is_zero_and_later_ones_are_not() -> None:
    client, server = toy_sides(CLASSIFICATION, 3)
    rule = make_method("reuse")
    rule.round(LocalLink(rule, client), server)
    norms = torch.stack(client.observed.values["displacement_norm"])
    assert norms[0] == 0 and (norms[1:] > 0).all()


def test_vanilla_uses_the_server_weights_before_their_step() -> None:
    client, server = toy_sides(CLASSIFICATION, 1)
    smashed = client.exchange()[0]
    before = server.gradient(smashed, 0)
    returned = server.train_step(smashed, 0)
    assert torch.equal(before, returned)
    assert not torch.equal(server.gradient(smashed, 0), before)


def test_clipping_bounds_both_sides() -> None:
    assert not same(train("vanilla", CLASSIFICATION, 2, max_grad_norm=1e-3), train("vanilla", CLASSIFICATION, 2))


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("coefj", {}, r"Unknown method 'coefj'. Did you mean coef_j.*: vanilla, .*coef_d, coef_j"),
        ("coef_d", {"lam": 3}, r"no option 'lam'.*compensation_factor \(default None\)"),
        ("coef_d", {"compensation_factor": "big"}, r"must be float or None, got 'big' \(str\)"),
        ("coef_d", {"compensation_factor": -1}, r"finite number >= 0 or None, got -1"),
        ("coef_d", {"compensation_factor": float("nan")}, r"finite number >= 0 or None, got nan"),
        ("coef_j", {"num_projections": 0}, r"at least 1, got 0"),
        ("coef_j", {"num_projections": 1.5}, r"must be int, got 1.5"),
        ("coef_j", {"exact": 1}, r"must be bool, got 1"),
        ("coef_j", {"curvature_bound": -0.5}, r"finite number >= 0 or None, got -0.5"),
        ("vanilla", {"x": 1}, r"Its options: none"),
    ],
)
def test_bad_options_are_refused(name: str, kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_method(name, kwargs)
