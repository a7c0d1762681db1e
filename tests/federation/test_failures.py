"""Clients that fail or drop out: left out of the average and told, or an error that names them."""

import errno
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_coefsfl import SplitFedConfig, SplitFedTrainer
from hf_coefsfl.federation.sampling import assign_clients, is_dropped
from hf_coefsfl.federation.schedule import set_mode
from hf_coefsfl.federation.simulation import Simulation
from hf_coefsfl.protocol.client_side import ClientSide
from tests.support.faulty import Faulty
from tests.support.federated import images, rounds, same, trainer, weights

CLIENTS = 4


def federation(tmp_path: Path, faults: dict[int, str], **options: Any) -> SplitFedTrainer:
    """Return a trainer over four clients, all of which take part, some with a fault."""
    rows = images(48)
    parts = [rows.select(range(12 * c, 12 * c + 12)) for c in range(CLIENTS)]
    data = {f"c{c}": Faulty(part, faults.get(c)) for c, part in enumerate(parts)}
    options = {"num_clients": None, "participation": 1.0, "num_rounds": 2, "warmup_rounds": 0, **options}
    return trainer(tmp_path, data=data, **options)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raises", "DataError: Row 3 of client c2 cannot be read (OSError: the disk of this client is gone)"),
        ("nan", "NaN or infinity on the client side"),
    ],
)
def test_a_failing_client_is_as_if_it_were_not_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str, reason: str
) -> None:
    with caplog.at_level(logging.WARNING):
        run = federation(tmp_path / "run", {2: fault}, on_client_failure="skip")
        run.train()
    assert all(torch.isfinite(tensor).all() for tensor in weights(run).values())
    assert [entry["failed_clients"] for entry in rounds(run)] == [1, 1]
    entries = json.loads((tmp_path / "run" / "communication.json").read_text())["entries"]
    failed = [entry for entry in entries if "failure" in entry]
    assert [(e["round"], e["client"]) for e in failed] == [(1, "c2"), (2, "c2")]
    assert all(reason in entry["failure"] for entry in failed)
    assert f"Round 1, client c2: {reason}" in caplog.text and "left out of the average" in caplog.text
    # However it failed, the others give the same weights.
    again = federation(tmp_path / "again", {2: "raises"}, on_client_failure="skip")
    again.train()
    assert same(weights(run), weights(again))


def test_survivors_alone_make_the_average(tmp_path: Path) -> None:
    """With one survivor the new weights are that client's own."""
    alone = federation(tmp_path / "alone", {0: "raises", 1: "nan", 3: "raises"}, on_client_failure="skip", num_rounds=1)
    alone.train()
    assert alone.rounds is not None
    simulation, start = alone.rounds, federation(tmp_path / "start", {}).rounds
    assert start is not None
    for half in (start.split.client, start.split.server):
        set_mode(half, start.args)
    batches = start.data.batches(0, 2)
    start._train_client(0, 2, batches, alone.args.learning_rate)
    for name, parameter in start.client_parameters.items():
        torch.testing.assert_close(parameter, simulation.client_parameters[name], rtol=0, atol=0)


@pytest.mark.parametrize("fault", ["raises", "nan"])
def test_by_default_a_failure_is_an_error(tmp_path: Path, fault: str) -> None:
    run = federation(tmp_path, {2: fault})
    before = weights(run)
    message = "Row 3 of client c2 cannot be read .*disk of this" if fault == "raises" else "client c2: NaN or infinity"
    with pytest.raises(ValueError, match=message):
        run.train()
    assert same(before, weights(run))


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_round_leaves_the_weights_that_it_began_with(
    tmp_path: Path, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second round, in the middle of a client's local updates."""
    run, descend, steps = federation(tmp_path, {}, method="coef_w"), ClientSide.descend, 0
    began: list[dict[str, torch.Tensor]] = []

    def interrupted(self: ClientSide, *args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 2 * CLIENTS * 3 - 4:  # of three batches each
            assert not same(began[1], weights(run))
            raise error("stopped")
        return descend(self, *args)

    def noted(self: Simulation, *args: Any, **options: Any) -> Any:
        began.append(weights(run))
        return run_round(self, *args, **options)

    run_round = Simulation.run_round
    monkeypatch.setattr(ClientSide, "descend", interrupted)
    monkeypatch.setattr(Simulation, "run_round", noted)
    with pytest.raises(error, match="stopped"):
        run.train()
    assert not same(began[0], began[1]) and same(began[1], weights(run))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered"),
    ],
    ids=repr,
)
def test_a_client_that_does_not_fit_is_not_skipped(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else all rounds would train without the largest clients."""
    run, train = federation(tmp_path, {}, on_client_failure="skip"), Simulation._train_client

    def too_large(self: Simulation, round_index: int, client: int, *rest: Any) -> Any:
        if client == 2:
            raise error
        return train(self, round_index, client, *rest)

    monkeypatch.setattr(Simulation, "_train_client", too_large)
    with pytest.raises(type(error)) as raised:
        run.train()
    assert raised.value is error


def test_a_round_without_survivors_keeps_the_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = federation(tmp_path, {}, client_dropout_rate=1.0, eval_strategy="steps", eval_steps=1)
    before = weights(run)
    with caplog.at_level(logging.WARNING):
        run.train()
    assert same(before, weights(run))
    assert "Round 2: no client is left. The weights stay as they are." in caplog.text
    assert [entry["failed_clients"] for entry in rounds(run)] == [4, 4] and run.ledger.total.transfers == 0
    json.loads((tmp_path / "communication.json").read_text(), parse_constant=pytest.fail)  # no NaN in there


def test_dropout_follows_the_rate_and_the_seed(tmp_path: Path) -> None:
    lost = [is_dropped(0, t, c, 0.3) for t in range(50) for c in range(20)]
    assert 0.25 < sum(lost) / len(lost) < 0.35 and lost == [
        is_dropped(0, t, c, 0.3) for t in range(50) for c in range(20)
    ]
    assert lost != [is_dropped(1, t, c, 0.3) for t in range(50) for c in range(20)]
    run = federation(tmp_path, {}, client_dropout_rate=0.5)
    run.train()
    expected = [(t + 1, f"c{c}") for t in range(2) for c in range(4) if is_dropped(run.args.seed, t, c, 0.5)]
    assert expected and expected == [(e["round"], e["client"]) for e in run.ledger.entries if "failure" in e]


@pytest.mark.parametrize(("name", "value"), [("on_client_failure", "ignore"), ("client_dropout_rate", 1.5)])
def test_bad_options(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        SplitFedConfig(output_dir="out", **{name: value})


def test_clients_are_spread_by_size() -> None:
    # 9 and 8 and 5 to a process each; 4 to the 5, the lightest; 1 to the 8, which is lighter than 9 and 5 + 4.
    assert assign_clients({0: 5, 1: 9, 2: 8, 3: 4, 4: 1}, 3) == {1: 0, 2: 1, 0: 2, 3: 2, 4: 1}
    assert assign_clients({7: 3}, 3) == {7: 0} and assign_clients({1: 2, 2: 2}, 1) == {1: 0, 2: 0}
