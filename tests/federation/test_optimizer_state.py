"""The server's optimizer between rounds: against one that is never replaced, as a mean, in checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_coefsfl import SplitFedTrainer
from hf_coefsfl.federation.simulation import Simulation
from hf_coefsfl.protocol.server_side import ServerSide
from tests.support.federated import same, trainer, weights

ALONE: dict[str, Any] = {"num_clients": 1, "participation": 1.0, "num_rounds": 3, "warmup_rounds": 1}
KEPT: dict[str, Any] = {"keep_server_optimizer": True}


def state(run: SplitFedTrainer) -> dict[str, Tensor]:
    assert run.rounds is not None
    return run.rounds.state_dict()


@pytest.mark.parametrize("method", ["vanilla", "coef_p"])
def test_one_client_has_one_optimizer_for_all_rounds(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = trainer(tmp_path / "kept", method=method, **ALONE, **KEPT)
    kept.train()
    first: list[torch.optim.Optimizer] = []

    def with_the_first(self: Simulation, context: Any, learning_rate: float) -> ServerSide:
        first.append(first[0] if first else self.local_optimizer(self.server_parameters, learning_rate))
        return ServerSide(self.split.server, first[0], context, self.loss_spec)

    monkeypatch.setattr(Simulation, "server_side", with_the_first)
    twin = trainer(tmp_path / "twin", method=method, **ALONE)
    twin.train()
    assert same(weights(kept), weights(twin))
    theirs = [t for p in first[0].param_groups[0]["params"] for t in first[0].state[p].values()]
    assert all(torch.equal(a, b) for a, b in zip(state(kept).values(), theirs, strict=True))
    monkeypatch.undo()
    fresh = trainer(tmp_path / "fresh", method=method, **ALONE)
    fresh.train()
    assert not same(weights(kept), weights(fresh))


def test_the_first_round_begins_with_a_fresh_one(tmp_path: Path) -> None:
    runs = [
        trainer(tmp_path / str(i), method="coef_p", num_rounds=1, warmup_rounds=0, **c)
        for i, c in enumerate(({}, KEPT))
    ]
    for run in runs:
        run.train()
    assert same(*map(weights, runs)) and not state(runs[0]) and state(runs[1])


def test_it_is_the_mean_over_the_clients_of_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weighted by their samples, as the weights are."""
    seen: list[list[Tensor]] = []
    original = Simulation.optimizer_tensors

    def spy(self: Simulation, side: ServerSide) -> Any:
        found = original(self, side)
        seen.append([t.clone() for t in found])
        return found

    monkeypatch.setattr(Simulation, "optimizer_tensors", spy)
    uneven = {"partition": "dirichlet", "dirichlet_alpha": 1.0, "num_clients": 3, "participation": 1.0}
    run = trainer(tmp_path, num_rounds=1, warmup_rounds=0, **uneven, **KEPT)
    run.train()
    assert isinstance(run.rounds, Simulation)
    sizes = torch.tensor(run.rounds.federation.sizes, dtype=torch.float64)
    assert len(seen) == 3 and len(set(sizes.tolist())) > 1
    for found, each in zip(state(run).values(), zip(*seen, strict=True), strict=True):
        mean = sum(size * t.double() for size, t in zip(sizes, each, strict=True)) / sizes.sum()
        torch.testing.assert_close(found.double(), mean, rtol=1e-5, atol=1e-12)


def test_resume_is_bit_identical(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"method": "gas", "num_rounds": 4, "save_strategy": "steps", "save_steps": 2} | KEPT
    whole = trainer(tmp_path / "whole", **changes)
    whole.train()
    resumed = trainer(tmp_path / "resumed", **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert same(weights(whole), weights(resumed)) and same(state(whole), state(resumed))


def test_a_lost_client_and_a_lost_round_leave_it_whole(tmp_path: Path) -> None:
    lost = {"client_dropout_rate": 0.6, "on_client_failure": "skip", "max_lost_rounds": 0, "num_rounds": 5, "seed": 2}
    run = trainer(tmp_path, method="coef_p", client_bound=2.0, **lost, **KEPT)
    run.train()
    assert all(t.isfinite().all() for t in state(run).values())
    run.save_model()
    assert "its state was averaged and kept" in (tmp_path / "README.md").read_text()


def test_a_state_that_has_no_mean_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"keep_server_optimizer cannot average the state of Adafactor"):
        trainer(tmp_path, optim="adafactor", **KEPT).train()
