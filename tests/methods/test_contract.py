"""What every method has to do, new ones included. test_distributed.py adds several processes, test_flower.py Flower."""

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from torch import Tensor

from hf_coefsfl import METHODS, SplitFedTrainer, SplitModel, split_model
from hf_coefsfl.analysis.backbones import Samples
from hf_coefsfl.analysis.cost import CostModel, Round
from hf_coefsfl.analysis.staleness import check_probe
from hf_coefsfl.cli import main
from hf_coefsfl.methods import WARM_UP_METHOD, Method, make_method
from hf_coefsfl.methods.base import ClientState, option
from hf_coefsfl.protocol.client_side import ClientSide
from hf_coefsfl.protocol.context import RoundContext
from hf_coefsfl.protocol.link import LocalLink
from hf_coefsfl.protocol.loss import LossSpec
from hf_coefsfl.protocol.meter import Meter
from hf_coefsfl.protocol.packing import Store
from hf_coefsfl.protocol.server_side import ServerSide
from hf_coefsfl.split.lora import default_lora, trainable_sides
from tests.support.documented import documented_method
from tests.support.faulty import Faulty
from tests.support.federated import QUICK, images, rounds, same, tiny_vit, trainer, weights
from tests.support.packed import MIXED
from tests.support.selection import slow_except
from tests.support.wire_link import WireLink


@dataclasses.dataclass
class Walking(METHODS["coef_j"]):  # type: ignore[misc]
    """The method whose server does most while it trains."""

    name = "walking"
    feedback_at: str = option("walk", "server weights")


ADDED = {Walking.name: METHODS.pop(Walking.name), documented_method().name: documented_method()}
NAMES = [*sorted(METHODS), *ADDED]
WHOLE: dict[str, Any] = {"num_rounds": 3, "warmup_rounds": 1, "save_strategy": "steps", "save_steps": 1}


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for added, cls in ADDED.items():
        monkeypatch.setitem(METHODS, added, cls)
    return str(request.param)


@pytest.fixture(autouse=True)
def garbage_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate collects garbage after each training, which takes longer than these."""
    monkeypatch.setattr("accelerate.utils.memory.gc.collect", lambda: 0)


@pytest.fixture(scope="module")
def cost_model() -> CostModel:
    return CostModel(tiny_vit(attn_implementation="eager"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("contract")
    return lambda name: root / name


# ---- Runs of the trainer ----


def make(folder: Path, name: str, **changes: Any) -> SplitFedTrainer:
    """Two clients of two batches, the last one partial."""
    settings = {"num_clients": 2, "participation": 1.0, "method_kwargs": QUICK.get(name)} | WHOLE | changes
    data = settings.pop("data", images(14))
    return trainer(folder, data=data, method=name, eval_dataset=None, compute_metrics=None, **settings)


@pytest.fixture(scope="module")
def whole(folders: Callable[[str], Path]) -> Callable[[str], SimpleNamespace]:
    """Return one run for each method that is asked for: a round of warm-up and two of the method, all saved."""

    @cache
    def run(name: str) -> SimpleNamespace:
        done = make(folders(name), name)
        before = weights(done)
        done.train()
        assert done.rounds is not None
        return SimpleNamespace(trainer=done, before=before, state=state_of(done.rounds.method), folder=folders(name))

    return run


def state_of(method: Method) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in method.state_dict().items()}


def test_both_sides_train(name: str, whole: Any) -> None:
    run = whole(name)
    after = weights(run.trainer)
    assert all(t.isfinite().all() for t in after.values())
    assert not [weight for weight, t in after.items() if torch.equal(t, run.before[weight])]


def test_a_resumed_run_has_the_same_bits(name: str, whole: Any, tmp_path: Path) -> None:
    run = whole(name)
    resumed = make(tmp_path, name)
    resumed.train(resume_from_checkpoint=str(run.folder / "checkpoint-2"))
    assert same(weights(run.trainer), weights(resumed)) and rounds(run.trainer) == rounds(resumed)
    assert run.trainer.ledger == resumed.ledger
    assert resumed.rounds is not None and same(run.state, state_of(resumed.rounds.method))


def test_the_warm_up_hands_over(name: str, whole: Any) -> None:
    """After round 1 the weights are those of the warm-up's method, and the state is that of the start."""
    first, usual = (whole(n).folder / "checkpoint-1" for n in (name, WARM_UP_METHOD))
    assert same(*(load_file(folder / "adapter_model.safetensors") for folder in (first, usual)))
    fresh = make_method(name, QUICK.get(name))
    simulation = whole(name).trainer.rounds
    fresh.setup(simulation.split, simulation.loss_spec, simulation.args.seed, first_round=1)
    saved = first / "method_state.safetensors"
    assert same(load_file(saved) if saved.exists() else {}, state_of(fresh))
    ends = [whole(n).trainer for n in (name, WARM_UP_METHOD)]
    assert same(*map(weights, ends)) is (name == WARM_UP_METHOD)


def test_the_ledger_is_the_predicted_one(name: str, whole: Any, cost_model: CostModel) -> None:
    """Each client's round costs what the table of costs says of one kind of round, to the byte; all kinds occur."""

    def figures(up: dict[str, int], down: dict[str, int], transfers: int) -> tuple[object, ...]:
        total = [dict(up), dict(down)]
        for sizes in total:  # federated weights beside the adapter: the table counts them with it
            sizes["adapters"] += sizes.pop("auxiliary_models", 0)
        return transfers, *(tuple(sorted(sizes.items())) for sizes in total)

    costs = cost_model.costs(make_method(name, QUICK.get(name)), 2, Round(num_samples=7, batch_size=4))
    entries = [entry for entry in whole(name).trainer.ledger.entries if entry["round"] > 1]
    assert len(entries) == 4
    assert {figures(e["up"], e["down"], e["transfers"]) for e in entries} == {
        figures(cost.up, cost.down, cost.transfers) for cost in costs
    }


def test_a_failing_client_is_skipped(name: str, tmp_path: Path) -> None:
    """However it fails, weights and state are those of the others."""
    rows, ends = images(12), []
    for fault in ("raises", "nan"):
        data = {f"c{c}": Faulty(rows.select(range(4 * c, 4 * c + 4)), fault if c == 1 else None) for c in range(3)}
        settings = {"num_clients": None, "num_rounds": 1, "warmup_rounds": 0, "save_strategy": "no"}
        run = make(tmp_path / fault, name, data=data, on_client_failure="skip", **settings)
        before = weights(run)
        run.train()
        assert [("failure" in entry) for entry in run.ledger.entries] == [False, True, False]
        assert run.rounds is not None and not same(before, weights(run))
        ends.append(weights(run) | {f"state.{key}": t for key, t in state_of(run.rounds.method).items()})
    assert same(*ends)


# ---- Rounds of one client ----


@cache
def untrained(checkpointing: bool) -> tuple[SplitModel, LossSpec, dict[str, Tensor]]:
    """Return one model for all methods, split, with the weights that each starts from: it takes as long as a round."""
    model: Any = tiny_vit(dropout=0.0, attn_implementation="sdpa")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss_spec = Samples(model).loss_spec
    split = split_model(get_peft_model(model, default_lora(model)), 2)
    return split, loss_spec, {name: t.clone() for name, t in split.model.state_dict().items()}


def one_client(
    name: str,
    link: type[LocalLink] = LocalLink,
    checkpointing: bool = False,
    number: int = 1,
    rate: float = 5e-3,
    **context: Any,
) -> SimpleNamespace:
    """Train one client and its server side for some rounds; return weights, state, meter and loss."""
    split, loss_spec, start = untrained(checkpointing)
    torch.manual_seed(0)
    split.train()
    split.model.zero_grad()
    split.model.load_state_dict(start)
    method = make_method(name, QUICK.get(name))
    method.setup(split, loss_spec, seed=0)
    rows = images(7)
    batches = [{k: rows[:7][k][part] for k in ("pixel_values", "labels")} for part in (slice(4), slice(4, 7))]
    meter = Meter()
    for index in range(number):
        shared = RoundContext(seed=0, round_index=index, client=0, **context)
        optimizers = [torch.optim.AdamW(list(side.values()), lr=rate) for side in trainable_sides(split)]
        client = ClientSide(split.client, batches, optimizers[0], shared, loss_spec)
        server = ServerSide(split.server, optimizers[1], shared, loss_spec)
        reached = link(method, client)
        method.round(reached, server)
        method.merge([ClientState(0, 7, {**client.kept, **server.kept})])
        meter.add(reached.meter)
    trained = {name: p.detach().clone() for side in trainable_sides(split) for name, p in side.items()}
    with torch.no_grad():
        loss = sum(split.model.eval()(**batch).loss.item() for batch in batches)
    return SimpleNamespace(weights=trained, state=state_of(method), meter=meter, loss=loss)


@pytest.fixture(scope="module")
def plain() -> Callable[[str], SimpleNamespace]:
    return cache(one_client)


def test_messages_survive_the_wire(name: str, plain: Any) -> None:
    here, wired = plain(name), one_client(name, WireLink)
    assert same(here.weights, wired.weights) and same(here.state, wired.state) and here.meter == wired.meter


@pytest.mark.parametrize("dtype", slow_except("mixed", of=["bfloat16", "float16", "int8", "mixed"]))
def test_every_exchange_dtype(name: str, dtype: str, plain: Any) -> None:
    codecs = MIXED if dtype == "mixed" else dtype
    full, narrow = plain(name), one_client(name, store=Store(codecs))
    assert all(t.isfinite().all() for t in (*narrow.weights.values(), *narrow.state.values()))
    assert not same(full.weights, narrow.weights)
    # Of two batches with 7 · 5 tokens of 16 features: float16 adds a scale to each, int8 and int4 to each token.
    tokens = 7 * 5
    size = {"bfloat16": tokens * 32, "float16": tokens * 32 + 2 * 4, "int8": tokens * 20, "mixed": tokens * 10}[dtype]
    assert narrow.meter.up["smashed_data"] * (4 * 7 * 5 * 16) == full.meter.up["smashed_data"] * size
    assert narrow.meter.up["extras"] == full.meter.up["extras"] and narrow.meter.transfers == full.meter.transfers
    assert narrow.loss == pytest.approx(full.loss, rel=0.2)
    if dtype == "mixed":  # both sides draw the same rotations, also if they only have the files
        wired = one_client(name, WireLink, store=Store(codecs))
        assert same(narrow.weights, wired.weights) and same(narrow.state, wired.state)
        assert narrow.meter == wired.meter


def test_bfloat16_autocast(name: str, plain: Any) -> None:
    full, half = plain(name), one_client(name, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    assert all(t.dtype == torch.float32 and t.isfinite().all() for t in half.weights.values())
    assert not same(full.weights, half.weights) and half.loss == pytest.approx(full.loss, rel=0.2)


def test_gradient_checkpointing(name: str, plain: Any) -> None:
    full, saving = plain(name), one_client(name, checkpointing=True)
    for weight, value in full.weights.items():
        torch.testing.assert_close(saving.weights[weight], value, atol=1e-6, rtol=1e-5)


def test_it_learns(name: str) -> None:
    before, after = (one_client(name, number=number, rate=1e-3) for number in (0, 4))
    assert after.loss < before.loss


# ---- What the rest of the package asks of a class ----


def test_its_options_have_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", name]) == 0
    text = capsys.readouterr().out
    for f in dataclasses.fields(METHODS[name]):  # type: ignore[arg-type]
        assert f.metadata["help"] and f"  {f.name}: " in text and f.metadata["help"] in text
    assert METHODS[name].title in text and make_method(name).effective_options().keys() <= {
        f.name
        for f in dataclasses.fields(METHODS[name])  # type: ignore[arg-type]
    }


def test_it_is_probed_or_refused(name: str, whole: Any, tmp_path: Path) -> None:
    if not make_method(name).can_be_probed():
        with pytest.raises(ValueError, match=f"enters the client half, and '{name}' has none"):
            check_probe(make_method(name))
        return
    plain, probed = whole(name).trainer, make(tmp_path, name, staleness_probe=1, save_strategy="no")
    probed.train()
    assert same(weights(plain), weights(probed)) and plain.ledger == probed.ledger
    assert same(whole(name).state, state_of(probed.rounds.method))  # type: ignore[union-attr]
    assert [point.displacement > 0 for point in probed.probe.points] == [False, True] * 2
    assert all(p.used_error <= (p.activation_error + p.server_error) * 1.001 for p in probed.probe.points)
