"""The staleness probe: right numbers, and no trace in training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_coefsfl.analysis.cost import CostModel, Round
from hf_coefsfl.analysis.staleness import plot_probe, probe_staleness, summarize_probe
from hf_coefsfl.methods import METHODS, make_method
from tests.support.federated import rounds, same, tiny_vit, trainer, weights
from tests.support.selection import slow_except
from tests.support.toy import CLASSIFICATION, REGRESSION, toy_sides


@pytest.mark.parametrize("method", slow_except("coef_j", of=["reuse", "coef_d", "coef_j", "ggn", "hutchinson"]))
def test_training_is_bit_identical_with_and_without(tmp_path: Path, method: str) -> None:
    plain = trainer(tmp_path / "a", method=method)
    probed = trainer(tmp_path / "b", method=method, staleness_probe=True)
    plain.train()
    probed.train()
    assert same(weights(plain), weights(probed)) and plain.ledger == probed.ledger
    kept = [{k: v for k, v in entry.items() if not k.startswith("probe_")} for entry in rounds(probed)]
    assert kept == rounds(plain)
    logged = ["probe_stale_error" in entry for entry in rounds(probed)]
    assert logged == [False, True, True, True]  # not in the warm-up


def test_every_second_round_and_its_files(tmp_path: Path) -> None:
    run = trainer(tmp_path, method="coef_d", staleness_probe=2, num_rounds=5, local_epochs=2)
    run.train()
    assert sorted({point.round for point in run.probe.points}) == [2, 4]
    assert [point.update for point in run.probe.points] == list(range(6)) * 2
    points = json.loads((tmp_path / "staleness.json").read_text())
    assert len(points) == 12 and points[0]["displacement"] == 0 and points[1]["displacement"] > 0
    assert (tmp_path / "staleness.png").read_bytes()[:4] == b"\x89PNG"


def test_resume_keeps_what_was_probed(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"staleness_probe": 1, "save_strategy": "steps", "save_steps": 2, "num_rounds": 4}
    whole = trainer(tmp_path / "a", **changes)
    whole.train()
    resumed = trainer(tmp_path / "b", **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert whole.probe.points == resumed.probe.points and same(weights(whole), weights(resumed))


def test_first_update_is_fresh() -> None:
    first = probe_staleness(make_method("coef_j"), *toy_sides(CLASSIFICATION, 3))[0]  # type: ignore[arg-type]
    assert first.displacement == first.stale_error == first.compensated_error == 0
    assert first.stale_cosine == pytest.approx(1) and first.best_lambda is None and first.surrogate_above


def test_reuse_compensates_nothing() -> None:
    for point in probe_staleness(make_method("reuse"), *toy_sides(CLASSIFICATION, 3)):  # type: ignore[arg-type]
        assert point.stale_error == point.compensated_error and point.stale_cosine == point.compensated_cosine


def test_exact_compensation_has_no_error_and_a_surrogate_that_touches() -> None:
    """Squared loss and an affine server: CoeF-J with exact P is the fresh gradient, F̂ is the loss."""
    method = make_method("coef_j", {"exact": True})
    points = probe_staleness(method, *toy_sides(REGRESSION, 3, affine=True))  # type: ignore[arg-type]
    for point in points[1:]:
        assert point.stale_error > 1e-3 and point.compensated_error < 1e-4
        assert point.compensated_cosine == pytest.approx(1, abs=1e-5) and point.surrogate_above


def test_surrogate_of_reuse_falls_below_a_convex_loss() -> None:
    """A linear model of a convex loss lies below it, so the flag can be false."""
    points = probe_staleness(make_method("reuse"), *toy_sides(REGRESSION, 3, affine=True))  # type: ignore[arg-type]
    assert points[0].surrogate_above and not any(point.surrogate_above for point in points[1:])


def test_numbers_against_plain_autograd() -> None:
    """One sample's λ*, the errors and cosines of the second update, recomputed from scratch."""
    factor = 40.0
    method = make_method("coef_d", {"compensation_factor": factor})
    points = probe_staleness(method, *toy_sides(CLASSIFICATION, 2))  # type: ignore[arg-type]
    client, server = toy_sides(CLASSIFICATION, 2)

    def gradient(s: torch.Tensor, batch: int) -> torch.Tensor:
        s = s.detach().requires_grad_()
        outputs = server.half.outputs(s)  # type: ignore[operator]
        loss = torch.nn.functional.cross_entropy(outputs["logits"], client.batches[batch]["labels"])
        return torch.autograd.grad(loss, s)[0]

    start = [client.half(batch["x"]).activations.detach() for batch in client.batches]
    stale = [gradient(s, i) for i, s in enumerate(start)]
    client.half(client.batches[0]["x"]).activations.backward(stale[0])
    client.optimizer.step()
    now = client.half(client.batches[1]["x"]).activations.detach()
    delta, g0, fresh = now - start[1], stale[1], gradient(now, 1)
    compensated = g0 + factor * g0 * g0 * delta
    point = points[1]
    assert point.stale_error == pytest.approx(((g0 - fresh).norm() / fresh.norm()).item(), rel=1e-4)
    assert point.compensated_error == pytest.approx(((compensated - fresh).norm() / fresh.norm()).item(), rel=1e-4)
    ratios = []
    for i in range(4):
        scaled = g0[i] ** 2 * delta[i]
        ratios.append(((scaled * (fresh[i] - g0[i])).sum() / (scaled**2).sum()).item())
    assert point.best_lambda == pytest.approx(sorted(ratios)[1], rel=1e-3)
    assert point.helped_share == sum(factor < 2 * r for r in ratios) / 4


def test_summary_and_plot(tmp_path: Path) -> None:
    points = probe_staleness(make_method("coef_d"), *toy_sides(CLASSIFICATION, 3))  # type: ignore[arg-type]
    summary = summarize_probe(points)
    assert summary["probe_stale_error"] == pytest.approx(sum(p.stale_error for p in points[1:]) / 2)
    assert 0 <= summary["probe_surrogate_above"] <= 1
    plot_probe(points, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.parametrize("method", slow_except("coef_j", "gas", of=sorted(METHODS)))
def test_counting_operations_leaves_no_trace(tmp_path: Path, method: str) -> None:
    plain = trainer(tmp_path / "a", method=method, num_rounds=2)
    counted = trainer(tmp_path / "b", method=method, num_rounds=2, count_flops=True)
    plain.train()
    counted.train()
    assert same(weights(plain), weights(counted)) and plain.ledger == counted.ledger
    state = [run.rounds.method.state_dict() for run in (plain, counted)]
    assert same(*state)
    for entry in rounds(counted):
        assert entry["client_gflops"] > 0 and entry["server_gflops"] > 0
        assert entry["server_gflops_per_round"] == pytest.approx(entry["server_gflops"] * 36)


def test_counted_operations_are_those_of_the_cost_command(tmp_path: Path) -> None:
    """The same model, one batch a client: what training counts is what `coefsfl cost` foretells."""
    run = trainer(tmp_path, tiny_vit(dropout=0.0), method="coef_j", warmup_rounds=0, num_rounds=1, count_flops=True)
    run.train()
    cost = CostModel(tiny_vit(dropout=0.0)).costs(make_method("coef_j"), 2, Round(12, 4))[0]
    entry = rounds(run)[0]
    assert entry["client_gflops"] == pytest.approx(cost.client_flops / 12 / 1e9)
    assert entry["server_gflops"] == pytest.approx(cost.server_flops / 12 / 1e9)


@pytest.mark.parametrize("method", ["vanilla", "oracle"])
def test_methods_without_reuse_are_refused(tmp_path: Path, method: str) -> None:
    with pytest.raises(ValueError, match=f"staleness_probe measures reused gradients .*which '{method}' does not"):
        trainer(tmp_path, method=method, staleness_probe=1)
