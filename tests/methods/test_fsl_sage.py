"""FSL-SAGE: the alignment against plain torch code and finite differences, and the buffer of samples."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_coefsfl.methods import FSLSAGE, make_method
from hf_coefsfl.methods.base import ClientState
from hf_coefsfl.methods.fsl_sage import Alignment, batched, decode, encode, push, select
from hf_coefsfl.protocol.client_side import ClientSide
from hf_coefsfl.protocol.context import RoundContext
from hf_coefsfl.protocol.link import LocalLink
from hf_coefsfl.protocol.loss import LossSpec
from hf_coefsfl.protocol.messages import SmashedData
from hf_coefsfl.protocol.server_side import ServerSide
from hf_coefsfl.split import SplitModel, split_model
from hf_coefsfl.split.lora import trainable_sides
from tests.support.auxiliary import QUICK
from tests.support.federated import rounds, same, trainer, weights
from tests.support.models import MODELS
from tests.support.toy import CLASSIFICATION


def sides(
    split: SplitModel, batches: list[dict[str, Tensor]], round_index: int = 0, client: int = 0, lr: float = 1e-2
) -> tuple[ClientSide, ServerSide]:
    """Both sides of one client's round on a real model."""
    labels = [name for name in batches[0] if "label" in name or "positions" in name]
    base = split.model.get_base_model() if hasattr(split.model, "get_base_model") else split.model
    task = LossSpec.of(base, labels)
    ours, theirs = trainable_sides(split)
    setting = RoundContext(seed=3, round_index=round_index, client=client)
    return (
        ClientSide(split.client, batches, torch.optim.AdamW(list(ours.values()), lr), setting, task),
        ServerSide(split.server, torch.optim.AdamW(list(theirs.values()), lr), setting, task),
    )


def prepared(
    name: str, batches: int = 3, attention: str | None = None, **options: Any
) -> tuple[FSLSAGE, ClientSide, ServerSide]:
    """FSL-SAGE set up on a tiny model without dropout, with both sides of a client."""
    split = split_model(MODELS[name].make(attention), 2).eval()
    client, server = sides(split, [MODELS[name].batch(seed) for seed in range(batches)])
    method = make_method("fsl_sage", QUICK | options)
    assert isinstance(method, FSLSAGE)
    method.setup(split, client.loss_spec, seed=0)
    return method, client, server


# ---- Alignment ----


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_gradient_of_the_mismatch_against_finite_differences(attention: str) -> None:
    split = split_model(MODELS["bert"].make(attention).double(), 1).eval()
    smashed = split.client(**MODELS["bert"].batch()).detach()
    method = make_method("fsl_sage", {"num_blocks": 2})
    assert isinstance(method, FSLSAGE)
    method.setup(split, CLASSIFICATION, seed=0)
    target = torch.randn(smashed.activations.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    target = target / 10

    def mismatch() -> Tensor:  # in double precision; the method's own sum is in float32
        _, estimate = method.network.gradient(smashed)
        return (estimate - target).square().sum()

    network = method.network
    loss = method.mismatch(smashed, target)
    torch.testing.assert_close(loss.double(), mismatch(), atol=0, rtol=1e-5)
    parameters = list(network.parameters.values())
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    generator = torch.Generator().manual_seed(0)
    seen = 0
    for p, g in zip(parameters, gradients, strict=True):
        v = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        start, step = p.detach().clone(), 1e-5
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                p.copy_(start + sign * step * v)
            values.append(mismatch().item())
        with torch.no_grad():
            p.copy_(start)
        expected = (values[0] - values[1]) / (2 * step)
        ours = 0.0 if g is None else (g * v).sum().item()
        assert ours == pytest.approx(expected, rel=2e-4, abs=2e-7)
        seen += abs(expected) > 1e-6
    assert seen > len(parameters) / 2


@pytest.mark.parametrize("init", ["random", "copy_server"])
def test_alignment_reduces_the_mismatch(init: str) -> None:
    method, client, server = prepared("bert", init=init, align_epochs=60, align_learning_rate=3e-3, align_batch_size=3)
    buffer = push((), client.exchange(), 64)
    state = method.align(server, Alignment(buffer=buffer))
    assert state.steps == 60 * 3

    def mismatch(auxiliary: dict[str, Tensor]) -> float:
        method.network.load(auxiliary)
        return sum(method.mismatch(part, server.gradient(part, 0)).item() for part in buffer)

    before, after = mismatch(method.initial), mismatch(state.auxiliary)
    assert after < 0.5 * before
    assert state.auxiliary.keys() == method.initial.keys()


def test_alignment_step_equals_plain_torch() -> None:
    """One batch, two epochs, with the linear rise of the learning rate: AdamW by torch on the same loss."""
    method, client, server = prepared("vit", 1, align_epochs=2, align_warmup_steps=4, align_learning_rate=1e-2)
    (part,) = buffer = push((), client.exchange(), 64)
    state = method.align(server, Alignment(buffer=buffer, steps=1))
    method.network.load(method.initial)
    parameters = method.network.parameters
    optimizer = torch.optim.AdamW(parameters.values(), 1e-2, weight_decay=0.01, eps=1e-6)
    s = part.activations.clone().requires_grad_()
    (true,) = torch.autograd.grad(server.half(dataclasses.replace(part, activations=s)).loss, s)
    for rise in (2 / 4, 3 / 4):
        optimizer.param_groups[0]["lr"] = 1e-2 * rise
        optimizer.zero_grad()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            loss = method.network.half(dataclasses.replace(part, activations=s)).loss
            (estimate,) = torch.autograd.grad(loss, s, create_graph=True)
        ((estimate - true) ** 2).sum().backward()
        optimizer.step()
    assert state.steps == 3
    for name, p in parameters.items():
        torch.testing.assert_close(state.auxiliary[name], p.detach(), atol=1e-5, rtol=1e-4)


def test_alignment_ignores_dropout() -> None:
    """The true gradients are those without masks, and the server half keeps its mode."""
    method, client, server = prepared("bert")
    buffer = push((), client.exchange(), 64)
    calm = method.align(server, Alignment(buffer=buffer))
    server.half.train()
    assert same(calm.auxiliary, method.align(server, Alignment(buffer=buffer)).auxiliary)
    assert all(m.training for m in server.half.modules())


def test_fsl_sage_of_the_whole_server_is_the_oracle(tmp_path: Path) -> None:
    """A copy of all server blocks that alignment leaves alone gives the gradients of the round-initial server."""
    frozen = {"init": "copy_server", "num_blocks": 9, "align_learning_rate": 1e-30, "align_epochs": 1}
    shared: dict[str, Any] = {"warmup_rounds": 0, "num_rounds": 1, "dropout": "off"}
    ours = trainer(tmp_path / "a", method="fsl_sage", method_kwargs=frozen, **shared)
    oracle = trainer(tmp_path / "b", method="oracle", **shared)
    for run in (ours, oracle):
        run.train()
    for name, value in weights(oracle).items():
        torch.testing.assert_close(weights(ours)[name], value, atol=1e-6, rtol=1e-5)
    client_loss, oracle_loss = (rounds(run)[0]["client_loss"] for run in (ours, oracle))
    assert client_loss == pytest.approx(oracle_loss, rel=1e-5)


def test_fsl_sage_bytes_and_alignment_rounds(tmp_path: Path) -> None:
    run = trainer(tmp_path, method="fsl_sage", method_kwargs=QUICK, warmup_rounds=1, num_rounds=4)
    run.train()
    auxiliary = 4 * run.rounds.method.network.num_parameters()  # type: ignore[attr-defined]
    adapters = 4 * sum(p.numel() for p in run.client_parameters.values())
    up = {"smashed_data": 12 * 5 * 16 * 4, "extras": 12 * 8, "adapters": adapters}
    by_round = {r: [e for e in run.ledger.entries if e["round"] == r] for r in range(1, 5)}
    for entry in (*by_round[2], *by_round[4]):  # the first after the warm-up, then every second
        assert (entry["transfers"], entry["up"]) == (2, up)
        assert entry["down"] == {"auxiliary_models": auxiliary, "adapters": adapters}
    for entry in by_round[3]:
        assert (entry["transfers"], entry["up"], entry["down"]) == (1, up, {"adapters": adapters})
    assert all(entry["transfers"] == 2 * 3 for entry in by_round[1])
    assert all(entry["client_loss"] != entry["server_loss"] for entry in rounds(run)[1:])


def test_networks_are_the_clients_own_and_persist(tmp_path: Path) -> None:
    run = trainer(
        tmp_path, method="fsl_sage", method_kwargs=QUICK | {"align_every": 100}, warmup_rounds=0, num_rounds=3
    )
    run.train()
    method = run.rounds.method
    assert isinstance(method, FSLSAGE)
    first = {e["client"] for e in run.ledger.entries if e["round"] == 1}
    taken_part = {e["client"] for e in run.ledger.entries}
    assert {str(c) for c in method.clients} == taken_part != first
    for client, state in method.clients.items():
        assert bool(state.auxiliary) == (str(client) in first)
        assert state.steps == (3 * 1 if str(client) in first else 0)  # 3 epochs over one batch of 8
        assert 8 <= sum(len(part.activations) for part in state.buffer) <= 24
    own = [state.auxiliary for state in method.clients.values() if state.auxiliary]
    assert not same(own[0], own[1]) and not same(own[0], method.initial)


def test_a_round_changes_nothing_before_merge() -> None:
    method, client, server = prepared("vit")
    before = {name: t.clone() for name, t in method.state_dict().items()}
    method.round(LocalLink(method, client), server)
    assert same(before, method.state_dict())
    kept = {**client.kept, **server.kept}
    method.merge([ClientState(0, 9, kept)])
    assert {name for name in method.state_dict() if name.startswith("client.0.")} == {f"client.0.{n}" for n in kept}
    # A later round uses the client's own network; another client still starts from the initial one.
    used: list[dict[str, Tensor]] = []
    method.network.load, load = lambda w: (used.append(dict(w)), load(w))[1], method.network.load  # type: ignore
    for number in (0, 4):
        client.context = dataclasses.replace(client.context, client=number)
        method.update(client, None, None)
    assert same(used[0], method.clients[0].auxiliary) and same(used[1], method.initial)


# ---- The buffer ----


def message(values: list[float], length: int = 2) -> SmashedData:
    count = len(values)
    return SmashedData(
        torch.tensor(values)[:, None, None].expand(count, length, 1),
        {"attention_mask": torch.ones(count, length, dtype=torch.bool), "block.bias": torch.ones(1, 3, length, length)},
        {"labels": torch.tensor(values).long()},
        {"input_ids": (count, length)},
    )


def held(buffer: tuple[SmashedData, ...]) -> list[float]:
    return [v for part in buffer for v in part.activations[:, 0, 0].tolist()]


def test_buffer_is_first_in_first_out() -> None:
    buffer = push((), [message([0, 1, 2]), message([3, 4])], 4)
    assert held(buffer) == [1, 2, 3, 4]
    buffer = push(buffer, [message([5])], 4)
    assert held(buffer) == [2, 3, 4, 5]
    assert held(push(buffer, [message([6, 7, 8, 9, 10])], 4)) == [7, 8, 9, 10]
    assert [part.labels["labels"].tolist() for part in buffer] == [[2], [3, 4], [5]]
    assert [part.shapes["input_ids"] for part in buffer] == [(1, 2), (2, 2), (1, 2)]


def test_batches_hold_samples_of_one_length() -> None:
    buffer = push((), [message([0, 1, 2]), message([3, 4], length=5), message([5, 6])], 64)
    batches = batched(buffer, 2, torch.Generator().manual_seed(0))
    assert sorted(held(tuple(batches))) == list(range(7))
    assert sorted((len(b.activations), b.activations.shape[1]) for b in batches) == [(1, 2), (2, 2), (2, 2), (2, 5)]
    for batch in batches:
        count, length = batch.activations.shape[:2]
        assert batch.labels["labels"].tolist() == batch.activations[:, 0, 0].tolist()
        assert batch.shapes == {"input_ids": (count, length)}
        assert batch.context["block.bias"].shape == (count, 3, length, length)


def test_buffer_of_shared_context_gives_the_servers_gradients() -> None:
    """T5 sends one position bias for all samples: taken apart and put together again, the gradient is the same."""
    split = split_model(MODELS["t5-tags"].make(), 2).eval()
    client, server = sides(split, [MODELS["t5-tags"].batch(seed) for seed in range(2)])
    whole = client.exchange()[0]
    (batch,) = batched(push((), [whole], 64), 8, torch.Generator().manual_seed(1))
    order = [next(i for i, s in enumerate(whole.activations) if torch.equal(s, t)) for t in batch.activations]
    torch.testing.assert_close(server.gradient(batch, 0), server.gradient(whole, 0)[order])


def test_state_survives_its_encoding() -> None:
    state = Alignment({"a.b": torch.ones(2)}, 7, push((), [message([1, 2]), message([3], length=4)], 64))
    again = decode(encode(state))
    assert encode(again).keys() == encode(state).keys() and again.steps == 7
    assert all(torch.equal(t, encode(again)[name]) for name, t in encode(state).items())
    assert [part.shapes for part in again.buffer] == [part.shapes for part in state.buffer]


def test_what_cannot_be_taken_apart_is_refused() -> None:
    odd = dataclasses.replace(message([1, 2]), context={"block.alibi": torch.ones(6, 1)})
    with pytest.raises(ValueError, match=r"shape \(6, 1\).* 2 samples cannot be taken apart"):
        select(odd, torch.tensor([0]))
