"""The staleness probe: right numbers, and no trace in training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_coefsfl.analysis.cost import CostModel, Round
from hf_coefsfl.analysis.staleness import (
    ProbePoint,
    load_probe,
    plot_probe,
    probe_staleness,
    save_probe,
    summarize_probe,
)
from hf_coefsfl.methods import METHODS, make_method
from hf_coefsfl.protocol.loss import LossSpec
from hf_coefsfl.protocol.messages import SmashedData
from hf_coefsfl.protocol.server_side import ServerSide
from tests.support.federated import images, rounds, same, tiny_vit, trainer, weights
from tests.support.selection import slow_except
from tests.support.toy import CLASSIFICATION, REGRESSION, toy_sides


@pytest.mark.parametrize("method", slow_except("coef_j", of=["reuse", "coef_d", "coef_j", "ggn", "hutchinson"]))
def test_training_is_bit_identical_with_and_without(tmp_path: Path, method: str) -> None:
    few: dict[str, Any] = {"data": images(32), "num_clients": 4, "method": method}  # two of them in a round
    plain = trainer(tmp_path / "a", **few)
    probed = trainer(tmp_path / "b", **few, staleness_probe=True)
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


def test_points_of_an_older_version_are_left_out(tmp_path: Path) -> None:
    points = probe_staleness(make_method("reuse"), *toy_sides(CLASSIFICATION, 2))
    save_probe(points, tmp_path / "probe.json")
    assert load_probe(tmp_path / "probe.json") == points
    entries = json.loads((tmp_path / "probe.json").read_text())
    del entries[0]["norm"]
    (tmp_path / "probe.json").write_text(json.dumps(entries))
    assert load_probe(tmp_path / "probe.json") == points[1:]


def test_first_update_is_fresh() -> None:
    first = probe_staleness(make_method("coef_j"), *toy_sides(CLASSIFICATION, 3))[0]
    assert first.displacement == first.stale_error == first.compensated_error == 0
    assert first.stale_cosine == pytest.approx(1) and first.best_lambda is None and first.surrogate_above


def test_reuse_compensates_nothing() -> None:
    for point in probe_staleness(make_method("reuse"), *toy_sides(CLASSIFICATION, 3)):
        assert point.stale_error == point.compensated_error and point.stale_cosine == point.compensated_cosine


def test_exact_compensation_has_no_error_and_a_surrogate_that_touches() -> None:
    """Squared loss and an affine server: CoeF-J with exact P is the fresh gradient, F̂ is the loss."""
    method = make_method("coef_j", {"exact": True})
    points = probe_staleness(method, *toy_sides(REGRESSION, 3, affine=True))
    for point in points[1:]:
        assert point.stale_error > 1e-3 and point.compensated_error < 1e-4
        assert point.compensated_cosine == pytest.approx(1, abs=1e-5) and point.surrogate_above


def test_surrogate_of_reuse_falls_below_a_convex_loss() -> None:
    """A linear model of a convex loss lies below it, so the flag can be false."""
    points = probe_staleness(make_method("reuse"), *toy_sides(REGRESSION, 3, affine=True))
    assert points[0].surrogate_above and not any(point.surrogate_above for point in points[1:])


def test_numbers_against_plain_autograd() -> None:
    """One sample's λ*, the errors and cosines of the second update, recomputed from scratch."""
    factor = 40.0
    method = make_method("coef_d", {"compensation_factor": factor})
    points = probe_staleness(method, *toy_sides(CLASSIFICATION, 2))
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
    points = probe_staleness(make_method("coef_d"), *toy_sides(CLASSIFICATION, 3))
    summary = summarize_probe(points)
    assert summary["probe_stale_error"] == pytest.approx(sum(p.stale_error for p in points[1:]) / 2)
    assert 0 <= summary["probe_surrogate_above"] <= 1
    plot_probe(points, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.parametrize("method", slow_except("coef_j", "gas", of=sorted(METHODS)))
def test_counting_operations_leaves_no_trace(tmp_path: Path, method: str) -> None:
    few: dict[str, Any] = {"data": images(14), "num_clients": 2, "participation": 1.0, "num_rounds": 2}
    plain = trainer(tmp_path / "a", method=method, **few)
    counted = trainer(tmp_path / "b", method=method, **few, count_flops=True)
    plain.train()
    counted.train()
    assert same(weights(plain), weights(counted)) and plain.ledger == counted.ledger
    state = [run.rounds.method.state_dict() for run in (plain, counted)]
    assert same(*state)
    for entry in rounds(counted):
        assert entry["client_gflops"] > 0 and entry["server_gflops"] > 0
        assert entry["server_gflops_per_round"] == pytest.approx(entry["server_gflops"] * 14)


def test_clients_that_dropped_out_computed_nothing(tmp_path: Path) -> None:
    dropping = {"client_dropout_rate": 0.5, "on_client_failure": "skip", "max_lost_rounds": 9}
    run = trainer(tmp_path, method="reuse", num_rounds=6, count_flops=True, **dropping)
    run.train()
    left = run.ledger.clients_left(dropped=False)
    logs = [entry for entry in rounds(run) if "server_gflops" in entry]
    samples = [entry["server_gflops_per_round"] / entry["server_gflops"] for entry in logs]
    expected = [12 * left[entry["step"]] for entry in logs]
    assert samples == pytest.approx(expected) and {12, 24} & set(expected)  # in some rounds a part dropped out


def test_counted_operations_are_those_of_the_cost_command(tmp_path: Path) -> None:
    """The same model, one batch a client: what training counts is what `coefsfl cost` foretells."""
    run = trainer(tmp_path, tiny_vit(dropout=0.0), method="coef_j", warmup_rounds=0, num_rounds=1, count_flops=True)
    run.train()
    cost = CostModel(tiny_vit(dropout=0.0)).costs(make_method("coef_j"), 2, Round(12, 4))[0]
    entry = rounds(run)[0]
    assert entry["client_gflops"] == pytest.approx(cost.client_flops / 12 / 1e9)
    assert entry["server_gflops"] == pytest.approx(cost.server_flops / 12 / 1e9)


# ---- Which part is whose ----

TASKS = [CLASSIFICATION, REGRESSION]


def points(method: str, task: LossSpec = CLASSIFICATION, **options: Any) -> list[ProbePoint]:
    return probe_staleness(make_method(method, options), *toy_sides(task, 3, local_epochs=2))


@pytest.mark.parametrize("task", TASKS, ids=["classification", "regression"])
def test_vanilla_is_its_own_measure(task: LossSpec) -> None:
    for point in points("vanilla", task):
        assert point.used_error == point.activation_error == point.server_error == 0
        assert point.used_cosine == pytest.approx(1) and point.norm > 0


def test_the_oracle_suffers_from_the_servers_move_only() -> None:
    first, *later = points("oracle")
    assert first.used_error == 0
    assert all(p.activation_error < 1e-6 and p.server_error == pytest.approx(p.used_error) for p in later)
    assert all(p.server_error > 0.01 for p in later)


@pytest.mark.parametrize("method", ["reuse", "coef_d", "coef_j"])
def test_the_walk_suffers_from_the_activations_move_only(method: str) -> None:
    """In the first epoch: the server that answered is the one of the step."""
    walk, initial = points(method, feedback_at="walk"), points(method)
    assert all(p.server_error == 0 and p.used_error == pytest.approx(p.activation_error) for p in walk[:3])
    assert all(p.server_error > 0.01 for p in walk[3:])
    assert all(p.server_error > 0.01 and p.activation_error > 0 for p in initial[1:])


def test_the_trained_server_is_ahead_until_the_last_step() -> None:
    final = points("reuse", feedback_at="final")
    assert final[0].activation_error == 0 and final[0].server_error > 0.01
    assert final[0].server_error > final[-1].server_error > 0


def test_both_parts_against_plain_autograd() -> None:
    """The third update of gradient reuse at the round-initial server, replayed by hand."""
    point = probe_staleness(make_method("reuse"), *toy_sides(CLASSIFICATION, 3))[2]
    (client, server), (_, trained) = toy_sides(CLASSIFICATION, 3), toy_sides(CLASSIFICATION, 3)

    def gradient(of: ServerSide, s: torch.Tensor, batch: int) -> torch.Tensor:
        s = s.detach().requires_grad_()
        return torch.autograd.grad(of.half(SmashedData(s), labels=client.batches[batch]["labels"]).loss, s)[0]

    start = [client.half(batch["x"]).activations.detach() for batch in client.batches]
    for batch in range(2):
        client.optimizer.zero_grad()
        client.half(client.batches[batch]["x"]).activations.backward(gradient(server, start[batch], batch))
        client.optimizer.step()
        trained.optimizer.zero_grad()
        trained.half(SmashedData(start[batch]), labels=client.batches[batch]["labels"]).loss.backward()
        trained.optimizer.step()
    now = client.half(client.batches[2]["x"]).activations.detach()
    used, fresh, vanilla = gradient(server, start[2], 2), gradient(server, now, 2), gradient(trained, now, 2)
    norm = vanilla.norm()
    assert point.norm == pytest.approx(norm.item(), rel=1e-4)
    assert point.used_error == pytest.approx(((used - vanilla).norm() / norm).item(), rel=1e-4)
    assert point.activation_error == pytest.approx(((used - fresh).norm() / norm).item(), rel=1e-4)
    assert point.server_error == pytest.approx(((fresh - vanilla).norm() / norm).item(), rel=1e-4)
    cosine = torch.nn.functional.cosine_similarity(fresh.flatten(), vanilla.flatten(), dim=0)
    assert point.server_cosine == pytest.approx(cosine.item(), rel=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_the_first_order_of_both_moves(seed: int) -> None:
    """The proposition of docs/feedback.md: what is left of Hδ + CΔ falls with the square of the moves."""
    client, server = toy_sides(CLASSIFICATION, 1, seed=seed)
    server.half.double()
    labels = client.batches[0]["labels"]
    generator = torch.Generator().manual_seed(seed)
    s = client.half(client.batches[0]["x"]).activations.detach().double()
    delta = torch.randn(s.shape, generator=generator, dtype=s.dtype)
    start = {name: p.detach().clone() for name, p in server.half.named_parameters()}
    change = {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in start.items()}

    def gradient(s: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        s = s if s.requires_grad else s.detach().requires_grad_()
        out = torch.func.functional_call(server.half, weights, (SmashedData(s),), {"labels": labels})
        return torch.autograd.grad(out.loss, s, create_graph=True)[0]

    _, first = torch.func.jvp(  # Hδ and the mixed second derivative on Δ, without differences
        lambda s, weights: torch.func.grad(
            lambda s: torch.func.functional_call(server.half, weights, (SmashedData(s),), {"labels": labels}).loss
        )(s),
        (s, start),
        (delta, change),
    )

    def left(size: float) -> float:
        moved = {name: p + size * change[name] for name, p in start.items()}
        whole = gradient(s + size * delta, moved) - gradient(s, start)
        return (whole - size * first).norm().item()

    assert left(1e-2) > 0
    for size in (1e-2, 5e-3, 2.5e-3):
        assert left(size) / left(size / 2) == pytest.approx(4, rel=0.15)
