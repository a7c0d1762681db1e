"""A run whose weights are spoilt ends with an error, and keeps a checkpoint from before."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from hf_coefsfl import SplitFedTrainer
from hf_coefsfl.federation.ledger import DROPPED, Ledger
from hf_coefsfl.trainer.checkpoints import checkpoints_in, rotate
from tests.support.federated import images, rounds, same, trainer, weights
from tests.support.hostile import huge, poison


def make(folder: Path, **options: Any) -> SplitFedTrainer:
    """Return a run of two clients that keeps one checkpoint."""
    settings = {"num_clients": 2, "participation": 1.0, "num_rounds": 5, "warmup_rounds": 0}
    saved = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "on_client_failure": "skip"}
    return trainer(folder, data=images(16), **settings | saved | options)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_spoilt_weights_end_the_run_and_do_not_replace_the_last_good_ones(tmp_path: Path) -> None:
    """Round 2 averages adapters of 3e38, with which nobody can compute."""
    with pytest.MonkeyPatch.context() as patch:
        poison(patch, [1], huge, rounds=[1])
        with pytest.raises(ValueError, match=r"Rounds 3 to 5: no client was left in 3 rounds in a row") as error:
            make(tmp_path).train()
        good = tmp_path / "checkpoint-1"
        assert (
            f"resume from {good}, from which clients could still train, with client_bound=5 or another aggregation. "
            in str(error.value)
        )
        assert checkpoints(tmp_path) == ["checkpoint-1", "checkpoint-4"]
        with pytest.raises(ValueError, match="Rounds 3 to 5"):  # and again, after one round
            make(tmp_path).train(resume_from_checkpoint="last")
        assert checkpoints(tmp_path) == ["checkpoint-1", "checkpoint-4"]
    again, honest = make(tmp_path), make(tmp_path / "honest", save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    honest.train()
    assert same(weights(again), weights(honest)) and rounds(again) == rounds(honest)
    assert checkpoints(tmp_path) == ["checkpoint-4", "checkpoint-5"]  # nobody has trained from the last yet


@pytest.mark.parametrize("advised", [{"client_bound": 5.0}, {"aggregation": "median"}])
def test_the_advice_can_be_followed(
    tmp_path: Path, advised: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The hostile client is still there, and the last good checkpoint was set aside under another name."""
    poison(monkeypatch, [1], huge, rounds=[1])
    with pytest.raises(ValueError, match=r"resume from .*checkpoint-1, .* with client_bound=5 or another aggregation"):
        make(tmp_path, num_clients=3).train()
    copied = shutil.copytree(tmp_path / "checkpoint-1", tmp_path / "checkpoint-1-good")
    found = make(tmp_path, num_clients=3, **advised)
    found.train(resume_from_checkpoint=str(copied))
    assert found.ledger.clients_left(dropped=False)[5] == 3 and copied.is_dir()
    assert all(t.abs().max() < 10 for t in weights(found).values())
    assert f"with differences: {next(iter(advised))}: " in caplog.text


def test_a_run_may_go_on_without_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, [1], huge)
    found = make(tmp_path, max_lost_rounds=0, num_rounds=3)
    found.train()
    assert found.ledger.clients_left(dropped=True) == {1: 2, 2: 0, 3: 0}
    assert checkpoints(tmp_path) == ["checkpoint-3"]  # no checkpoint was ever trained from


def test_simulated_dropout_is_not_a_loss(tmp_path: Path) -> None:
    found = make(tmp_path, client_dropout_rate=1.0, num_rounds=3, save_strategy="no")
    found.train()
    assert found.state.global_step == 3
    entries = [{"round": 1, "client": "a"}, {"round": 1, "client": "b", "failure": DROPPED}]
    ledger = Ledger([*entries, {"round": 2, "client": "a", "failure": "NaN"}])
    assert ledger.clients_left(dropped=True) == {1: 2, 2: 0}
    assert ledger.clients_left(dropped=False) == {1: 1, 2: 0}  # nobody has shown that one can train from there
    assert found._proven_checkpoint() is None


@pytest.mark.parametrize(
    ("limit", "needed", "left"),
    [
        (None, [], [1, 2, 3, 10]),
        (-1, [], [1, 2, 3, 10]),
        (2, [None], [3, 10]),
        (1, [2], [2, 10]),
        (2, [1, 2], [1, 2, 10]),
        (3, [1], [1, 3, 10]),
    ],
)
def test_what_is_needed_stays(tmp_path: Path, limit: int | None, needed: list[int | None], left: list[int]) -> None:
    for number in (1, 2, 3, 10):
        (tmp_path / f"checkpoint-{number}").mkdir()
    (tmp_path / "checkpoint-2-good").mkdir()  # a user's copy
    rotate(tmp_path, limit, [None if n is None else str(tmp_path / f"checkpoint-{n}") for n in needed])
    assert (tmp_path / "checkpoint-2-good").is_dir()
    assert [int(path.name.rpartition("-")[2]) for path in checkpoints_in(tmp_path)] == left
