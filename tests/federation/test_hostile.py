"""A few hostile clients spoil nothing: bounded contributions, robust rules, and their refusals."""

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_coefsfl import SplitFedTrainer
from hf_coefsfl.federation.averaging import flatten
from hf_coefsfl.federation.bounds import excesses, scale_update_, update_norms
from hf_coefsfl.federation.ledger import ClientReport
from hf_coefsfl.federation.server import SMASHED
from hf_coefsfl.federation.simulation import Simulation
from hf_coefsfl.protocol.meter import Meter
from tests.support.federated import images, rounds, same, trainer, weights
from tests.support.hostile import huge, poison

RULES: dict[str, dict[str, Any]] = {
    "bounded mean": {"client_bound": 5.0},
    "trimmed_mean": {"aggregation": "trimmed_mean"},
    "median": {"aggregation": "median"},
    "krum": {"aggregation": "krum"},
}


def run(folder: Path, **options: Any) -> SplitFedTrainer:
    """Train five clients, all of which take part."""
    settings = {"num_clients": 5, "participation": 1.0, "num_rounds": 2, "warmup_rounds": 0, "max_lost_rounds": 1}
    made = trainer(folder, data=images(60), **settings | {"on_client_failure": "skip"} | options)
    made.train()
    return made


def test_norms_of_parts() -> None:
    parts, initial = {"a": slice(0, 2), "b": slice(2, 4), "c": slice(4, 5)}, torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])
    vector = torch.tensor([4.0, 5.0, 1e30, 1e30, 0.0])
    norms = update_norms(vector, initial, parts)
    assert norms["a"] == 5.0 and norms["b"] == pytest.approx(2**0.5 * 1e30) and norms["c"] == 0.0
    assert update_norms(torch.full((5,), 3e38), initial, parts)["a"] == math.inf
    assert update_norms(torch.full((5,), 3e38), torch.full((5,), -3e38), parts)["c"] == math.inf
    scale_update_(vector, initial, parts, {"a": 0.5})
    assert vector.tolist() == [2.5, 3.0, torch.tensor(1e30).item(), torch.tensor(1e30).item(), 0.0]


def test_the_median_of_few() -> None:
    """Of one it is its own value, of two the smaller, of four the second; who changes nothing freezes nobody."""
    assert excesses({1: {"x": 1e9}}, 2) == {}
    assert excesses({1: {"x": 1.0}, 2: {"x": 10.0}}, 2) == {2: {"x": 0.2}}
    assert excesses({k: {"x": float(k)} for k in (1, 2, 3, 8)}, 2) == {8: {"x": 0.5}}
    assert excesses({1: {"x": 0.0}, 2: {"x": 1.0}}, 2) == excesses({1: {"x": 0.0}}, 2) == excesses({}, 2) == {}


def test_honest_clients_within_the_bound_keep_their_bits(tmp_path: Path) -> None:
    bounded, free = run(tmp_path / "bounded", client_bound=5.0), run(tmp_path / "free")
    assert same(weights(bounded), weights(free)) and rounds(bounded) == rounds(free)
    assert bounded.ledger.entries == free.ledger.entries


@pytest.mark.parametrize("rule", RULES)
def test_huge_weights_are_survived(tmp_path: Path, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters of 3e38 are finite; their mean would leave no survivor in any later round."""
    poison(monkeypatch, [1], huge)
    found = run(tmp_path, **RULES[rule])
    assert all(t.abs().max() < 10 for t in weights(found).values())
    failed = [(e["round"], e["client"], e["failure"]) for e in found.ledger.entries if "failure" in e]
    refused = [(1, "1", "the size of its client update is not finite")]
    assert failed == (refused if rule == "bounded mean" else [])


def test_a_large_update_is_scaled_down_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = weights(trainer(tmp_path / "none", data=images(60)))
    honest = run(tmp_path / "honest", num_rounds=1)
    poison(monkeypatch, [1], lambda start, end: start + 1000 * (end - start))
    with caplog.at_level(logging.WARNING):
        bounded = run(tmp_path / "bounded", num_rounds=1, client_bound=5.0)
    (entry,) = [
        e for e in json.loads((tmp_path / "bounded/communication.json").read_text())["entries"] if "bounded" in e
    ]
    assert (entry["round"], entry["client"], list(entry["bounded"])) == (1, "1", ["client update"])
    assert 0.002 < entry["bounded"]["client update"] < 0.012  # of updates of about the same norm
    assert rounds(bounded)[0]["bounded_clients"] == 1 and "bounded_clients" not in rounds(honest)[0]
    assert (
        "Round 1, client 1: client update" in caplog.text and "Its update counts for 5 times the median." in caplog.text
    )
    moved = {
        name: sum(
            float((t - before[n]).square().sum()) for n, t in weights(made).items() if n in made.client_parameters
        )
        for name, made in (("honest", honest), ("bounded", bounded))
    }
    assert moved["bounded"] < 25 * moved["honest"]  # unbounded: 40,000 times, the square of 1000 / 5
    assert all(torch.equal(weights(bounded)[n], weights(honest)[n]) for n in bounded.server_parameters)


@pytest.mark.parametrize("rule", ["bounded mean", "median"])
def test_weights_beside_the_model_are_no_way_around(tmp_path: Path, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """AccSFL's head is averaged by the same rule, and has a bound of its own."""
    train = Simulation._train_client

    def hostile(self: Simulation, round_index: int, client: int, *args: Any) -> tuple[ClientReport, Any]:
        report, state = train(self, round_index, client, *args)
        kept = {name: torch.full_like(t, 3e38) for name, t in report.kept.items()}
        return replace(report, kept=kept) if client == 1 else report, state

    monkeypatch.setattr(Simulation, "_train_client", hostile)
    found = run(tmp_path, method="acc_sfl", **RULES[rule])
    assert found.rounds is not None
    assert all(t.abs().max() < 10 for t in found.rounds.method.state_dict().values())
    failures = [e["failure"] for e in found.ledger.entries if "failure" in e]
    assert failures == (["the size of its auxiliary update is not finite"] * 2 if rule == "bounded mean" else [])


def test_clients_of_different_sizes_keep_their_weights(tmp_path: Path) -> None:
    """The bound looks at updates. Samples are `max_samples`'s, as honest clients may have a hundred times as many."""
    server = trainer(tmp_path, data=images(60), num_clients=5, participation=1.0, client_bound=5.0).rounds
    assert server is not None
    samples = [12, 1200, 12, 12, 12]
    reports = {k: ClientReport(n, 0.0, 0.0, 0.0, 0.0, Meter(), 0.0, 0.0, {}) for k, n in enumerate(samples)}
    initial = torch.zeros(sum(p.numel() for p in server.parameters))
    trained = {client: initial + (1.0 if client == 1 else -1.0) for client in range(5)}
    server.average(3, reports, trained, dict.fromkeys(range(5), 0), initial)
    assert not any(report.bounded for report in reports.values())
    torch.testing.assert_close(flatten(server.parameters), initial + (1200 - 48) / 1248)


def test_what_happens_to_a_client_beyond_the_bound_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = trainer(tmp_path, data=images(60), num_clients=3, participation=1.0, client_bound=5.0).rounds
    assert server is not None
    reports = {k: ClientReport(4, 0.0, 0.0, 0.0, 0.0, Meter(), 0.0, 0.0, {}) for k in range(3)}
    found = {k: {SMASHED: 100.0 if k == 1 else 1.0} for k in range(3)}
    server._bound(0, [0, 1, 2], reports, found, {}, torch.zeros(1))
    assert "client 1: smashed data 100 times the median of the round. Its statistics of smashed data are left out." in (
        caplog.text
    )
    assert "counts for" not in caplog.text


def test_too_few_clients_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"'krum' with hostile_clients=2 needs at least 7 clients in a round.* has 5 of 5"
    ):
        run(tmp_path, aggregation="krum", hostile_clients=2)
    with pytest.raises(ValueError, match=r"'trimmed_mean' with hostile_clients=1 needs at least 3 clients"):
        run(tmp_path, aggregation="trimmed_mean", participation=0.4)


@pytest.mark.parametrize(
    ("name", "value"), [("aggregation", "mode"), ("hostile_clients", 0), ("client_bound", 0.5), ("max_lost_rounds", -1)]
)
def test_bad_options(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        run(tmp_path, **{name: value})
