"""`adapter_codec` in a simulation: what clients begin with, what is averaged, and which residuals are kept."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_coefsfl.federation.simulation import Simulation
from tests.support.federated import images, same, trainer, weights

Weights = dict[str, Tensor]


def make(folder: Path, **changes: Any) -> Any:
    """Three clients of 8 samples, all of which take part."""
    settings = {"num_clients": 3, "participation": 1.0, "num_rounds": 2, "warmup_rounds": 0, "method": "acc_sfl"}
    return trainer(folder, data=images(24), eval_dataset=None, compute_metrics=None, **settings | changes)


def rounded(t: Tensor) -> Tensor:
    """Return what int8 leaves of a tensor: blocks of 128 values, whose largest is 127 steps."""
    blocks = [block / (block.abs().max() / 127 or 1) for block in t.flatten().split(128)]
    scales = [block.abs().max() / 127 for block in t.flatten().split(128)]
    return torch.cat([b.round() * s if s else 0 * b for b, s in zip(blocks, scales, strict=True)]).view(t.shape)


def snapshot(run: Any) -> Weights:
    return {n: p.detach().clone() for n, p in (run.client_parameters | run.rounds.method.federated()).items()}


def test_rounds_by_brute_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients begin at rounded weights; θ + the mean of rounded updates is next, and residuals go round by round."""
    run = make(tmp_path, adapter_codec="int8")
    theta, begun, ended = snapshot(run), dict[int, Weights](), dict[int, Weights]()
    residuals: dict[int, Weights] = {}
    train, round_ = Simulation._train_client, Simulation.run_round

    def noting(self: Simulation, round_index: int, client: int, *args: Any) -> Any:
        begun[client] = snapshot(run)
        report, kept = train(self, round_index, client, *args)
        ended[client] = {n: p.detach().clone() for n, p in run.client_parameters.items()} | report.kept
        return report, kept

    def compared(self: Simulation, *args: Any) -> Any:
        nonlocal theta
        reports = round_(self, *args)
        expected = {name: torch.zeros_like(t) for name, t in theta.items()}
        for client in range(3):
            for name, t in theta.items():
                torch.testing.assert_close(begun[client][name], rounded(t), rtol=0, atol=1e-7)
                update = ended[client][name] - begun[client][name]
                update = update + residuals.get(client, {}).get(name, 0.0)
                residuals.setdefault(client, {})[name] = update - rounded(update)
                expected[name] += (t + rounded(update)) / 3
        now = snapshot(run)
        for name, t in expected.items():
            torch.testing.assert_close(now[name], t, rtol=0, atol=1e-6)
        theta = now
        return reports

    monkeypatch.setattr(Simulation, "_train_client", noting)
    monkeypatch.setattr(Simulation, "run_round", compared)
    run.train()
    for client, kept in run.rounds.residuals.items():
        mine = residuals[client]
        for part, names in (("adapters", run.client_parameters), ("auxiliary", run.rounds.method.federated())):
            torch.testing.assert_close(
                kept[part], torch.cat([mine[n].flatten() for n in sorted(names)]), rtol=0, atol=1e-6
            )
    assert max(float(t.abs().max()) for mine in residuals.values() for t in mine.values()) > 1e-5


def failing(how: str, rounds: set[int], clients: set[int], run: Any) -> Callable[..., Any]:
    """Return a way to train in which some clients' rounds fail."""
    train = Simulation._train_client

    def trained(self: Simulation, round_index: int, client: int, *args: Any) -> Any:
        report, kept = train(self, round_index, client, *args)
        if round_index in rounds and client in clients:
            if how == "overflows":  # finite weights that bfloat16 has no number for
                next(iter(run.client_parameters.values())).data.fill_(3.4e38)
            else:
                report = replace(report, failure=how)
        return report, kept

    return trained


@pytest.mark.parametrize(("how", "clients"), [("fails", {0}), ("overflows", {0}), ("fails", {0, 1, 2})])
def test_who_fails_keeps_its_residual(
    how: str, clients: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"adapter_codec": "bfloat16", "on_client_failure": "skip"}
    once = make(tmp_path / "once", num_rounds=1, **settings)
    once.train()
    run = make(tmp_path / "run", **settings)
    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "_train_client", failing(how, {1}, clients, run))
        run.train()
    assert {int(e["client"]) for e in run.ledger.entries if "failure" in e} == clients
    assert same(weights(run), weights(once)) is (len(clients) == 3)
    for client in range(3):
        assert same(run.rounds.residuals[client], once.rounds.residuals[client]) is (client in clients)
        assert all(t.isfinite().all() for t in run.rounds.residuals[client].values())


def test_who_has_not_taken_part_has_none_and_float32_has_none(tmp_path: Path) -> None:
    few = make(tmp_path / "few", participation=0.4, num_rounds=1, adapter_codec="int8", method="reuse")
    few.train()
    taken = {int(entry["client"]) for entry in few.ledger.entries}
    assert set(few.rounds.residuals) == taken and len(taken) == 1
    plain, default = make(tmp_path / "plain", adapter_codec="float32"), make(tmp_path / "default")
    plain.train()
    default.train()
    assert same(weights(plain), weights(default)) and not plain.rounds.residuals
    assert not any(name.startswith("residual") for name in plain.rounds.state_dict())


def test_every_trained_weight_of_a_client_is_sent_in_the_codec(tmp_path: Path) -> None:
    run = make(tmp_path, num_rounds=1, full_finetuning=True, adapter_codec="int8", method="reuse")
    run.train()
    sizes = [p.numel() for p in run.client_parameters.values()]
    assert any(name.endswith("embeddings.cls_token") for name in run.client_parameters)
    for entry in run.ledger.entries:
        for direction in ("up", "down"):
            assert entry[direction]["adapters"] == sum(size + 4 * -(-size // 128) for size in sizes)
