"""Residuals of `adapter_codec` at a Flower client, and hostile forms of encoded weights on both sides."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load, save
from torch import Tensor

from hf_coefsfl.flower import link
from hf_coefsfl.flower.client_node import ClientNode
from hf_coefsfl.flower.client_round import ClientRound
from hf_coefsfl.flower.lasting import LastingState
from hf_coefsfl.flower.residuals import NONE, Residuals
from hf_coefsfl.flower.wire import TransferError
from hf_coefsfl.protocol.adapters import AdapterCodec
from hf_coefsfl.protocol.messages import Parameters
from hf_coefsfl.protocol.wire import write_message
from tests.support.deployed import Site
from tests.support.federated import config
from tests.support.fuzzing import CLIENTS, Target, Task
from tests.support.mutations import parse, sealed

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_COEFSFL_WORK", str(tmp_path / "work"))
    return tmp_path / "work"


def residuals(last: int, saved: int = NONE, run: str = "a") -> Residuals:
    header = {"residuals": run, "residual_round": last, "residual_saved": saved}
    return Residuals(LastingState({"partition-id": 0}), header)


def kept(last: int, saved: int = NONE, run: str = "a") -> float | None:
    found = residuals(last, saved, run).load({"adapters": 2}, CPU)
    return float(found["adapters"][0]) if found else None


def keep(round_index: int, last: int, saved: int = NONE, run: str = "a") -> None:
    residuals(last, saved, run).keep(round_index, {"adapters": torch.full((2,), float(round_index))})


def test_the_server_says_which_round_counted(caplog: pytest.LogCaptureFixture) -> None:
    keep(0, NONE)
    keep(3, 0)  # which did not count,
    keep(5, 0)  # nor is it known yet whether this one does
    assert (kept(NONE), kept(0), kept(5)) == (None, 0.0, 5.0)
    assert not caplog.text
    assert kept(3) is None and "The residual of round 4 is lost, it begins at 0" in caplog.text
    keep(6, 5, saved=0)
    assert (kept(0), kept(5), kept(6)) == (0.0, 5.0, 6.0)
    keep(7, 6, saved=6)  # a checkpoint has been written: nobody goes back before it
    assert (kept(0), kept(5), kept(6), kept(7)) == (None, None, 6.0, 7.0)
    for index in range(8, 40):
        keep(index, index - 1, saved=6)  # however long that is ago
    assert (kept(6), kept(7), kept(37), kept(38), kept(39)) == (6.0, None, None, 38.0, 39.0)
    keep(4, NONE)  # the server begins anew
    assert (kept(4), kept(6), kept(39)) == (4.0, None, None)


def test_runs_are_apart_and_bounded(work: Path) -> None:
    """Whatever a server calls its run, and however long it asks a client to remember."""
    for run in ("../../x", "b", "c", "d", "e"):
        keep(1, NONE, run=run)
    assert [kept(1, run=run) for run in ("../../x", "b", "c", "d", "e")] == [None, 1.0, 1.0, 1.0, 1.0]
    for index in range(40):
        keep(index, index - 1, saved=-(2**40))
    (folder,) = work.glob("*/*/residuals")
    assert sorted(len(list(run.iterdir())) for run in folder.iterdir()) == [1, 1, 1, 2]
    assert {path.name for path in work.rglob("x")} == set()
    with pytest.raises(TransferError, match="the header has residual_round='1'"):
        residuals("1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:20],
        lambda data: save({"adapters": torch.zeros(3)}),
        lambda data: save({"adapters": torch.zeros(2, dtype=torch.float64)}),
        lambda data: save({"adapters": torch.tensor([1.0, torch.nan])}),
    ],
    ids=["short", "longer", "wider", "nan"],
)
def test_a_damaged_residual_begins_at_zero(
    damage: Callable[[bytes], bytes], work: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(1, NONE)
    (path,) = work.rglob("1")
    path.write_bytes(damage(path.read_bytes()))
    assert kept(1) is None and "The residual of round 2 is lost" in caplog.text


# ---- Hostile forms ----

FORMS: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "no scales": lambda sent: {"values": sent["values"]},
    "no values": lambda sent: {"scales": sent["scales"]},
    "another name": lambda sent: sent | {"x": torch.zeros(2**20)},
    "longer": lambda sent: sent | {"values": torch.zeros(len(sent["values"]) + 1, dtype=torch.int8)},
    "more scales": lambda sent: sent | {"scales": torch.ones(len(sent["scales"]) + 1)},
    "other values": lambda sent: sent | {"values": sent["values"].float()},
    "other scales": lambda sent: sent | {"scales": sent["scales"].double()},
    "a matrix": lambda sent: sent | {"scales": sent["scales"].unsqueeze(1)},
    "infinite": lambda sent: sent | {"scales": torch.full_like(sent["scales"], torch.inf)},
    "nan": lambda sent: sent | {"scales": torch.full_like(sent["scales"], torch.nan)},
    "overflowing": lambda sent: {"values": torch.full_like(sent["values"], 127), "scales": sent["scales"] * 0 + 3e38},
}


def test_a_client_refuses_what_is_not_the_codecs(site: Site, tmp_path: Path) -> None:
    site.make_half()
    node = ClientNode(site.run_config(adapter_codec="int8"), site.node_config(0))
    codec = AdapterCodec("int8", node.parameters)
    honest = codec.encode(codec.flat(node.parameters))
    header: dict[str, Any] = {
        "client": 0, "round": 0, "sequence": 0, "token": "a", "learning_rate": 0.1, "memory_limit": 2**20,
        "residuals": "a", "residual_round": NONE, "residual_saved": NONE,
    }  # fmt: skip
    before = {name: p.detach().clone() for name, p in node.parameters.items()}
    for number, change in enumerate((*FORMS.values(), lambda sent: dict(node.parameters))):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_message(Parameters(change(honest)), folder / "weights")
        with pytest.raises(TransferError):
            ClientRound(node, folder, header).run([], folder / "weights", folder / "outbox")
    assert all(torch.equal(before[name], p) for name, p in node.parameters.items())


def test_an_answer_may_be_as_large_as_both_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoded, the adapters and the auxiliary weights have the same names."""
    monkeypatch.setattr(link, "_REPORT", 0)
    limits: list[int] = []
    to_client: Any = link.FlowerLink.__new__(link.FlowerLink)
    to_client.weights = Parameters({"values": torch.zeros(1000)}, {"values": torch.zeros(10)})
    to_client._most_reports = lambda: 0
    to_client._step = lambda calls, limit: limits.append(limit)
    with pytest.raises(TransferError, match="none came"):
        to_client._finish()
    assert limits == [2 * 4 * 1010]


def test_a_server_refuses_what_is_not_the_codecs(tmp_path: Path) -> None:
    """An honest answer is taken; none of the forged ones reaches an average."""
    (tmp_path / ".exchange").mkdir()
    args = config(tmp_path, per_device_train_batch_size=3, num_clients=CLIENTS, participation=1.0, warmup_rounds=0)
    target = Target(Task.of("vit"), "reuse", "int8", tmp_path / ".exchange", args, Accelerator(cpu=True), "int8")
    header, data = target.answers[0][-1]
    target.grid.answer = lambda kind, asked, chunk: target.answers[0][asked["sequence"]]
    report, flat = target.run(0)
    of_client = slice(sum(p.numel() for p in target.deployment.client_parameters.values()))
    assert report.failure is None and torch.equal(flat[of_client], target.flat[0][of_client])
    metadata = parse(data)[0]["__metadata__"]
    tensors = load(data)
    names = {name: f"0.adapters.{name}" for name in ("values", "scales")}
    for form, change in FORMS.items():
        made = change({name: tensors[place] for name, place in names.items()})
        others = {name: t for name, t in tensors.items() if name not in names.values()}
        forged = sealed(header, save(others | {f"0.adapters.{name}": t for name, t in made.items()}, metadata))
        target.grid.answer = lambda kind, asked, chunk, forged=forged: (  # type: ignore[misc]
            forged if asked["sequence"] else target.answers[0][0]
        )
        report, flat = target.run(0)
        assert report.failure is not None and flat is None, form
