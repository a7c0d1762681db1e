"""What a client keeps across runs: noise that no repetition removes, and how often it has sent its data."""

import itertools
import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from hf_coefsfl.flower.client_node import ClientNode
from hf_coefsfl.flower.client_round import ClientRound
from hf_coefsfl.flower.errors import ClientFailure, Code
from hf_coefsfl.flower.lasting import LastingState
from hf_coefsfl.flower.wire import TransferError
from hf_coefsfl.protocol.messages import Parameters
from hf_coefsfl.protocol.wire import write_message
from tests.support.deployed import Site

NUMBERS = itertools.count()
NOISE = 0.5
FIRST, SECOND = {"partition-id": 0}, {"partition-id": 1}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_COEFSFL_WORK", str(tmp_path / "work"))
    return tmp_path / "work"


def client(site: Site, **options: Any) -> ClientNode:
    site.make_half()
    return ClientNode(site.run_config(**options), site.node_config(0))


WHOLE = [{"do": "upload", "batches": None}]


def asked(node: ClientNode, folder: Path, round_index: int = 0, calls: list[Any] = WHOLE) -> torch.Tensor:
    """Return the activations of the first batch that a client uploads, in a round that has just begun in a folder."""
    folder = folder / "round"
    folder.mkdir(parents=True, exist_ok=True)
    method = node.methods.of_round(round_index)
    write_message(Parameters(dict(node.parameters), method.federated()), folder / "weights")
    header = {
        "client": 0, "round": round_index, "sequence": 0, "token": str(next(NUMBERS)), "learning_rate": 0.1,
        "memory_limit": 2**20,
    }  # fmt: skip
    begun = ClientRound(node, folder, header)
    begun.run(calls, folder / "weights", folder / "outbox")
    return load((folder / "outbox").read_bytes())["0.activations"]


def test_repeated_uploads_do_not_average_the_noise_away(tmp_path: Path, work: Path) -> None:
    """The server asks for a round again and again: restarted, in other runs, and with another seed."""
    site = Site(tmp_path / "site")
    clean = asked(client(site, data_seed=42), tmp_path / "clean")
    nodes = [client(site, smashed_noise=NOISE, seed=seed, data_seed=42) for seed in range(2)]
    uploads = [asked(node, tmp_path / f"run{run}") for run in range(3) for node in nodes for _ in range(4)]
    mean = torch.stack(uploads).mean(0) - clean
    assert 0.25 < mean.std() < 0.9  # about 0.5; 0.5 / √24 = 0.1 if each were drawn anew
    work.rename(tmp_path / "other")  # another site's, as far as this one knows
    other = asked(nodes[0], tmp_path / "elsewhere") - clean
    assert 0.35 < (other - mean).std() < 1.2  # of two secrets: about 0.5 √2; of one: 0


def test_noise_of_two_sizes_is_refused(tmp_path: Path, work: Path) -> None:
    """It would cancel: 2 y₁ − y₂ = s for σ = 0.5 and 1. Another length is another input, with another draw."""
    site = Site(tmp_path / "site")
    asked(client(site, smashed_noise=NOISE), tmp_path / "run")
    (file,) = work.rglob("noise.json")
    for changes in ({"smashed_noise": 2 * NOISE}, {"smashed_noise": NOISE, "max_length": 7}):
        with pytest.raises(ClientFailure, match=f"Delete {file} to allow another value") as refused:
            client(site, **changes)
        assert refused.value.code is Code.POLICY
    client(site, smashed_noise=NOISE, seed=3)
    file.unlink()
    client(site, smashed_noise=2 * NOISE)


def test_a_sample_keeps_its_noise_in_every_round(tmp_path: Path, work: Path) -> None:
    """Also in rounds that the run does not have: samples come in another order, with the noise that they had."""
    site = Site(tmp_path / "site", sizes=(3, 2))
    plain, noisy = (client(site, per_device_train_batch_size=1, smashed_noise=noise) for noise in (0.0, NOISE))
    rounds = (0, 1, 2, 3, 10**6, 10**6 + 1)
    clean = [asked(plain, tmp_path / "run", t) for t in rounds]
    noise = [asked(noisy, tmp_path / "run", t) - s for t, s in zip(rounds, clean, strict=True)]
    same = [(i, j) for i, j in itertools.combinations(range(6), 2) if torch.equal(clean[i], clean[j])]
    assert len(same) >= 3 and all(torch.allclose(noise[i], noise[j], atol=1e-5) for i, j in same)


def test_uploads_are_counted_across_restarts_and_bounded(tmp_path: Path, work: Path) -> None:
    node = client(Site(tmp_path / "site"))
    for _ in range(2):
        asked(node, tmp_path / "5-6")
    (file,) = work.rglob("counts.json")
    assert json.loads(file.read_text()) == {"rounds": 1, "sent": {"5-6.0": [2, 2, 2, 2]}}
    file.write_text(json.dumps({"rounds": 1, "sent": {"5-6.0": [0, 0, 100, 0]}}))
    with pytest.raises(ClientFailure, match="100 times"):
        asked(node, tmp_path / "5-6")
    asked(node, tmp_path / "5-6", 1)
    assert json.loads(file.read_text())["rounds"] == 2


def test_rounds_are_bounded(work: Path) -> None:
    """Those of all runs together; a round that was forgotten counts anew, so asking in turn does not help."""
    state = LastingState(FIRST, most_rounds=80, most_uploads=2)
    for number in range(80):
        state.count("run", number, [0])
    state.count("run", 79, [0])
    with pytest.raises(ClientFailure, match="2 times"):
        state.count("run", 79, [0])
    for run, index in (("run", 0), ("run", 80), ("other", 79)):
        with pytest.raises(ClientFailure, match="80 rounds"):
            LastingState(FIRST, most_rounds=80, most_uploads=2).count(run, index, [0])
    LastingState(SECOND, most_rounds=80).count("run", 80, [0])


def test_the_secret_lasts_and_is_its_users_alone(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = LastingState(FIRST).secret
    assert len(first) == 32 and LastingState(FIRST).secret == first != LastingState(SECOND).secret
    data = FIRST | {"dataset": str(work)}
    assert LastingState(data).secret not in (first, LastingState(data | {"dataset": "other/data"}).secret)
    (file,) = work.rglob("client-0/secret")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in file.parents if work in folder.parents} == {0o700}
    file.write_bytes(b"short")
    with pytest.raises(ValueError, match="is damaged"):
        _ = LastingState(FIRST).secret
    monkeypatch.delenv("HF_COEFSFL_WORK")
    monkeypatch.setenv("XDG_STATE_HOME", str(work / "state"))  # outlives a restart of the machine, unlike /tmp
    assert LastingState(FIRST).secret != first and list((work / "state").rglob("secret"))
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", raising)
    with pytest.raises(PermissionError, match=r"no home\. Set HF_COEFSFL_WORK to a folder that lasts"):
        _ = LastingState(FIRST).secret


def raising() -> Path:
    raise RuntimeError("There is no home.")


def test_weights_that_are_too_large_are_not_read(tmp_path: Path, work: Path) -> None:
    node = client(Site(tmp_path / "site"))
    (tmp_path / "weights").write_bytes(bytes(2**24))
    header = {"client": 0, "round": 0, "sequence": 0, "token": "t", "learning_rate": 0.1, "memory_limit": 0}
    with pytest.raises(TransferError, match="weights of 16777216 bytes came, this client's have 3072"):
        ClientRound(node, tmp_path, header).run(WHOLE, tmp_path / "weights", tmp_path / "outbox")


def test_nodes_of_the_simulation_engine_do_not_count(tmp_path: Path, work: Path) -> None:
    """Nor do they keep the size of the noise: their data is the run's."""
    site = Site(tmp_path / "site")
    site.make_half()
    data = {"dataset_name": str(site.folder / "all"), "client_half": str(site.folder / "half/client")}
    for noise in (NOISE, 2 * NOISE):
        asked(ClientNode(site.run_config(**data, smashed_noise=noise), FIRST | {"num-partitions": 2}), tmp_path / "run")
    assert not [*work.rglob("*.json")]


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ("upload [0], update [0], update [0]", "not uploaded since"),
        ("upload [0], update [0], finish, update [0], finish", "goes on after its end"),
        ("upload [0], update [1]", "not uploaded since"),
        ("upload [0], update null", "not uploaded since"),
        ("update null", "not uploaded since"),
    ],
)
def test_an_update_needs_an_upload(tmp_path: Path, work: Path, calls: str, reason: str) -> None:
    """Trained weights have no noise, and only uploads are counted."""
    node = client(Site(tmp_path / "site"), method="acc_sfl")
    script = [call.split() for call in calls.split(", ")]
    given = [{"do": do, "batches": json.loads(batches[0]) if batches else None} for do, *batches in script]
    with pytest.raises(TransferError, match=reason):
        asked(node, tmp_path / "run", calls=given)


def test_one_batch_cannot_be_asked_for_in_place_of_others(tmp_path: Path, work: Path) -> None:
    node = client(Site(tmp_path / "site"))
    node.lasting.most_uploads = 2
    asked(node, tmp_path / "run", calls=[{"do": "upload", "batches": [0, 1, 2, 3, 0]}])
    with pytest.raises(ClientFailure, match="2 times"):
        asked(node, tmp_path / "run", calls=[{"do": "upload", "batches": [4]}])  # 0 of the next epoch
