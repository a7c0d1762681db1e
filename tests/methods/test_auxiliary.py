"""AccSFL and FSL-SAGE: auxiliary networks against plain torch code, hand-sized cases and closed forms."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

from hf_coefsfl.methods import FSLSAGE, AccSFL, make_method
from hf_coefsfl.methods.base import ClientState
from hf_coefsfl.methods.fsl_sage import Alignment, batched, decode, encode, push, select
from hf_coefsfl.methods.parts.auxiliary import AuxiliaryHead, AuxiliaryNetwork, choose_pooling, pool, task_loss
from hf_coefsfl.protocol.client_side import ClientSide
from hf_coefsfl.protocol.context import RoundContext
from hf_coefsfl.protocol.link import LocalLink
from hf_coefsfl.protocol.loss import LossSpec
from hf_coefsfl.protocol.messages import SmashedData
from hf_coefsfl.protocol.server_side import ServerSide
from hf_coefsfl.split import SplitModel, split_model
from hf_coefsfl.split.lora import default_lora, trainable_sides
from tests.support.federated import CLASSES, images, rounds, same, texts, tiny_bert, tiny_vit, trainer, weights
from tests.support.models import BATCH, MODELS
from tests.support.toy import (
    CAUSAL,
    CLASSIFICATION,
    MULTI_LABEL,
    REGRESSION,
    SPANS,
    TOKENS,
    ToyServer,
    toy_batch,
    toy_sides,
)
from tests.support.wire_link import WireLink

QUICK = {"align_every": 2, "align_epochs": 3, "align_warmup_steps": 0, "buffer_every": 2, "num_blocks": 1}


def numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


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


# ---- Heads ----


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"kind": "fc"}, 19_300),
        ({"kind": "fc_lora", "rank": 2}, 684),
        ({"kind": "fc_lora", "rank": 4}, 1_268),
        ({"kind": "mlp", "hidden_layers": 1}, 28_228),
        ({"kind": "mlp", "hidden_layers": 4}, 56_164),
        ({"kind": "mlp", "hidden_layers": 8}, 93_412),
        ({"kind": "mlp", "hidden_layers": 12}, 130_660),
    ],
)
def test_head_sizes_are_the_papers(options: dict[str, Any], size: int) -> None:
    task = LossSpec("ForImageClassification", 100, ("labels",))
    head = AuxiliaryHead(width=192, outputs=100, loss_spec=task, pooling="first", **options)
    assert numel(head) == size
    head(SmashedData(torch.randn(2, 3, 192), labels={"labels": torch.tensor([1, 2])})).backward()
    assert all(p.grad is not None for p in head.parameters())


@pytest.mark.parametrize("task", [CLASSIFICATION, REGRESSION, MULTI_LABEL, TOKENS, CAUSAL, SPANS])
def test_head_loss_is_that_of_the_task(task: LossSpec) -> None:
    """The toy server computes each loss in plain torch."""
    torch.manual_seed(0)
    pooled = task.loss_type == "ForSequenceClassification"
    outputs = torch.randn(4, task.num_labels) if pooled else torch.randn(4, 3, task.num_labels)
    _, labels = task.separate(toy_batch(task))
    named = {"logits": outputs}
    if task is SPANS:
        named = {"start_logits": outputs[..., 0], "end_logits": outputs[..., 1]}
    torch.testing.assert_close(task_loss(task, outputs, labels), ToyServer(task).loss(named, labels))


def test_pooling_by_hand() -> None:
    s = torch.arange(12.0).view(2, 3, 2)
    padded = SmashedData(s, {"attention_mask": torch.tensor([[True, True, False], [False, True, True]])})
    assert pool(padded, "first").tolist() == [[0, 1], [6, 7]]
    assert pool(padded, "last").tolist() == [[2, 3], [10, 11]]
    assert pool(padded, "mean").tolist() == [[1, 2], [9, 10]]
    assert pool(padded, "tokens") is s
    assert pool(SmashedData(s), "last").tolist() == [[4, 5], [10, 11]]
    assert pool(SmashedData(s), "mean").tolist() == [[2, 3], [8, 9]]
    by_id = SmashedData(s, {"padding": torch.tensor([[False, False, True], [False, False, False]])})
    assert pool(by_id, "last").tolist() == [[2, 3], [10, 11]]
    longer = SmashedData(s, {"attention_mask": torch.tensor([[1, 0, 0, 0, 0], [1, 1, 1, 1, 1]])})  # of a waveform
    assert pool(longer, "mean").tolist() == [[2, 3], [8, 9]]


@pytest.mark.parametrize(
    ("name", "pooling"),
    [
        ("bert", "first"),
        ("gpt2", "last"),
        ("llama", "last"),
        ("vit", "first"),
        ("clip-vision", "first"),
        ("timm-vit", "first"),
        ("swin", "mean"),
        ("wav2vec2", "mean"),
        ("roberta-qa", "tokens"),
        ("llama-lm", "tokens"),
        ("t5-tags", "tokens"),
    ],
)
def test_pooling_follows_the_model(name: str, pooling: str) -> None:
    model = MODELS[name].make()
    assert choose_pooling(split_model(model, 1), LossSpec.of(model, [])) == pooling


def test_timm_without_class_token_is_averaged() -> None:
    entry = MODELS["timm-vit"]
    arguments = entry.options["model_args"] | {"class_token": False, "global_pool": "avg"}
    model = dataclasses.replace(entry, options=entry.options | {"model_args": arguments}).make()
    assert choose_pooling(split_model(model, 1), LossSpec.of(model, [])) == "mean"


# ---- AccSFL ----


def toy_acc_sfl(task: LossSpec, pooling: str = "mean") -> AccSFL:
    method = AccSFL()
    torch.manual_seed(5)
    method.network = AuxiliaryHead("fc", 4, task.num_labels, task, pooling)
    return method


def test_acc_sfl_equals_plain_torch() -> None:
    client, server = toy_sides(CLASSIFICATION, 2, local_epochs=2)
    method = toy_acc_sfl(CLASSIFICATION)
    half, head, above = copy.deepcopy((client.half, method.network.layers, server.half))
    batches = client.batches
    method.round(LocalLink(method, client), server)

    ce = nn.functional.cross_entropy
    initial = [half.layer(b["x"]).tanh().detach() for b in batches]
    both = torch.optim.AdamW([*half.parameters(), *head.parameters()], lr=0.1)
    theirs = torch.optim.AdamW(above.parameters(), lr=0.1)
    for _ in range(2):
        for b, s0 in zip(batches, initial, strict=True):
            both.zero_grad()
            ce(head(half.layer(b["x"]).tanh().mean(1)), b["labels"]).backward()
            both.step()
            theirs.zero_grad()
            ce(above.outputs(s0)["logits"], b["labels"]).backward()
            theirs.step()
    for ours, expected in ((client.half, half), (server.half, above)):
        for p, q in zip(ours.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(p, q)
    for name, p in head.named_parameters():
        torch.testing.assert_close(client.kept[f"auxiliary.layers.{name}"], p.detach())


@pytest.mark.parametrize("task", [CLASSIFICATION, REGRESSION, MULTI_LABEL, TOKENS, CAUSAL, SPANS])
def test_acc_sfl_trains_side_and_head_for_each_task(task: LossSpec) -> None:
    client, server = toy_sides(task, 3, local_epochs=8)
    method = toy_acc_sfl(task, "mean" if task.loss_type == "ForSequenceClassification" else "tokens")
    before = {name: t.clone() for name, t in method.state_dict().items()}
    method.round(LocalLink(method, client), server)
    losses = client.observed.values["client_loss"]
    assert sum(losses[-3:]) < sum(losses[:3])
    assert same(before, method.state_dict()), "the shared head may change in merge only"
    assert not same(before, {**before, **client.kept})
    method.merge([ClientState(0, 12, client.kept)])
    assert same(method.state_dict(), client.kept)


def test_merge_is_the_weighted_mean() -> None:
    method = toy_acc_sfl(CLASSIFICATION)
    ones = {name: torch.ones_like(t) for name, t in method.federated().items()}
    method.merge([ClientState(2, 1, ones), ClientState(5, 3, {name: 5 * t for name, t in ones.items()})])
    assert all((t == 4).all() for t in method.state_dict().values())


def test_a_frozen_weight_stays_and_does_not_travel(tmp_path: Path) -> None:
    run = trainer(tmp_path, method="acc_sfl", method_kwargs={"head": "fc_lora", "rank": 3}, warmup_rounds=0)
    before = {name: t.clone() for name, t in run.rounds.method.state_dict().items()}
    run.train()
    after = run.rounds.method.state_dict()
    assert torch.equal(before["auxiliary.layers.weight"], after["auxiliary.layers.weight"])
    assert all(not torch.equal(before[f"auxiliary.layers.{n}"], after[f"auxiliary.layers.{n}"]) for n in ("bias", "up"))
    assert sum(t.numel() for t in run.rounds.method.federated().values()) == 3 * (16 + CLASSES) + CLASSES


def test_acc_sfl_bytes(tmp_path: Path) -> None:
    """3 clients x 12 samples x (1 + 4) tokens x 16 floats up; the head of 16 x 3 + 3 beside the adapters."""
    run = trainer(tmp_path, method="acc_sfl", warmup_rounds=0, num_rounds=1)
    run.train()
    adapters = 3 * 4 * sum(p.numel() for p in run.client_parameters.values())
    heads = 3 * 4 * (16 * 3 + 3)
    total = run.ledger.total
    assert total.transfers == 3
    down = {"adapters": adapters, "auxiliary_models": heads}
    assert total.up == {"smashed_data": 3 * 12 * 5 * 16 * 4, "extras": 36 * 8, **down}
    assert total.down == down
    (entry,) = rounds(run)
    assert entry["client_loss"] != entry["server_loss"] and entry["client_loss"] > 0


def test_acc_sfl_server_is_that_of_gradient_reuse(tmp_path: Path) -> None:
    runs = [trainer(tmp_path / m, method=m, warmup_rounds=0, num_rounds=1) for m in ("acc_sfl", "reuse")]
    for run in runs:
        run.train()
    ours, theirs = (weights(run) for run in runs)
    for name in runs[0].server_parameters:
        assert torch.equal(ours[name], theirs[name])
    assert not same(ours, theirs)


# ---- The truncated network ----


@pytest.mark.parametrize("head", ["frozen", "full"])
def test_the_network_on_vit_tiny_has_the_papers_size(head: str) -> None:
    sizes = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3, "intermediate_size": 768}
    model: Any = ViTForImageClassification(ViTConfig(**sizes, num_labels=100))
    split = split_model(get_peft_model(model, default_lora(model, head=head)), 4)
    network = AuxiliaryNetwork(split, 3)
    assert network.num_parameters() == 1_395_748
    assert sum(t.numel() * t.element_size() for t in network.weights().values()) / 2**20 == pytest.approx(5.324, 1e-4)
    owned = {p.data_ptr() for p in network.half.parameters()}
    assert not owned & {p.data_ptr() for p in split.model.parameters()}
    fewer = AuxiliaryNetwork(split, 1).num_parameters()
    assert 1_395_748 - fewer == 2 * 458_688


@pytest.mark.parametrize("name", ["bert", "llama", "vit", "timm-vit", "swin", "t5-tags"])
def test_a_network_of_all_blocks_is_the_server(name: str) -> None:
    split = split_model(MODELS[name].make(), 1).eval()
    smashed = split.client(**MODELS[name].batch()).detach()
    network = AuxiliaryNetwork(split, 100)
    s = smashed.activations.requires_grad_()
    loss = split.server(smashed).loss
    torch.testing.assert_close(network.gradient(smashed), (loss.detach(), torch.autograd.grad(loss, s)[0]))


def test_truncation_removes_the_blocks_after() -> None:
    """As a model that has just these blocks: its config says so and the weights are the same."""
    whole = MODELS["bert"].make()
    short = MODELS["bert"].make(num_hidden_layers=3)
    short.load_state_dict(whole.state_dict(), strict=False)
    whole, small = split_model(whole, 1).eval(), split_model(short, 1).eval()
    smashed = whole.client(**MODELS["bert"].batch()).detach()
    loss, _ = AuxiliaryNetwork(whole, 2).gradient(smashed)
    torch.testing.assert_close(loss, small.server(smashed).loss.detach())


def test_a_random_network_is_seeded_and_shares_nothing() -> None:
    model: Any = tiny_vit()
    split = split_model(get_peft_model(model, default_lora(model)), 1)
    before = {name: t.clone() for name, t in split.model.state_dict().items()}
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(drawn))
        state = torch.get_rng_state()
        network = AuxiliaryNetwork(split, 2)
        network.draw(split.model, seed)
        drawn.append(network.weights())
        assert torch.equal(state, torch.get_rng_state())
    assert same(drawn[0], drawn[1]) and not same(drawn[0], drawn[2])
    assert same(before, split.model.state_dict())
    copied = AuxiliaryNetwork(split, 2).weights()
    matrices = [name for name, t in copied.items() if t.dim() > 1 and "lora_B" not in name]
    assert matrices and all(not torch.equal(copied[name], drawn[0][name]) for name in matrices)
    assert all((t == 0).all() for name, t in drawn[0].items() if "lora_B" in name)


def test_a_model_that_cannot_lose_blocks_is_refused() -> None:
    four = {"depths": [1, 1, 1, 1], "num_heads": [2, 2, 2, 2], "image_size": 64}
    split = split_model(MODELS["swin"].make(**four), 1)  # its head fits the width of the last stage
    with pytest.raises(ValueError, match=r"does not run without its blocks after number 2.*Set num_blocks to 3"):
        AuxiliaryNetwork(split, 1)


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


# ---- Both, through the trainer ----


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("acc_sfl", {}),
        ("acc_sfl", {"head": "fc_lora"}),
        ("fsl_sage", QUICK),
        ("fsl_sage", QUICK | {"init": "copy_server"}),
    ],
)
def test_resume_is_bit_identical_across_an_alignment(tmp_path: Path, method: str, options: dict[str, Any]) -> None:
    changes: dict[str, Any] = {"method": method, "method_kwargs": options, "num_rounds": 4, "save_strategy": "steps"}
    changes |= {"save_steps": 1}
    whole = trainer(tmp_path / "whole", **changes)
    whole.train()
    for reached in (1, 2):  # before any alignment and between two of them (in rounds 2 and 4)
        resumed = trainer(tmp_path / f"resumed{reached}", tiny_vit(seed=7), **changes)
        resumed.model.load_state_dict(
            {k: v for k, v in whole.model.state_dict().items() if "lora" not in k and "modules_to_save" not in k},
            strict=False,
        )
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{reached}"))
        assert same(weights(whole), weights(resumed))
        assert same(whole.rounds.method.state_dict(), resumed.rounds.method.state_dict())
        assert rounds(whole) == rounds(resumed)


@pytest.mark.parametrize("method", ["acc_sfl", "fsl_sage"])
def test_warmup_leaves_the_state_alone(tmp_path: Path, method: str) -> None:
    run = trainer(tmp_path, method=method, warmup_rounds=2, num_rounds=2)
    before = {name: t.clone() for name, t in run.rounds.method.state_dict().items()}
    run.train()
    assert same(before, run.rounds.method.state_dict())
    plain = 4 * sum(p.numel() for p in run.client_parameters.values())
    assert all(entry["down"]["adapters"] == plain for entry in run.ledger.entries)


@pytest.mark.parametrize("method", ["acc_sfl", "fsl_sage"])
def test_setup_leaves_the_random_state_alone(method: str) -> None:
    split = split_model(tiny_vit(), 2)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    states = []
    for seed in (1, 1, 2):
        rule = make_method(method)
        rule.setup(split, LossSpec.of(split.model, ["labels"]), seed)
        states.append({name: t.clone() for name, t in rule.state_dict().items()})
    assert torch.equal(state, torch.get_rng_state())
    assert same(states[0], states[1]) and not same(states[0], states[2])


def rows(name: str, seeds: int = 6) -> list[dict[str, Any]]:
    """The samples of several batches of a tiny model."""
    batches = [MODELS[name].batch(seed) for seed in range(seeds)]
    return [{key: t[i].tolist() for key, t in batch.items()} for batch in batches for i in range(BATCH)]


@pytest.mark.parametrize("name", ["bert", "gpt2", "swin", "roberta-qa", "distilbert-tags", "llama-lm", "bert-mlm"])
@pytest.mark.parametrize("method", ["acc_sfl", "fsl_sage"])
def test_tasks_train(tmp_path: Path, method: str, name: str) -> None:
    data = Dataset.from_list(rows(name)).with_format("torch")
    options = {k: v for k, v in QUICK.items() if k != "num_blocks"} if method == "fsl_sage" else {}
    run = trainer(
        tmp_path,
        MODELS[name].make(),
        data,
        method=method,
        method_kwargs=options,
        cut=1,
        eval_dataset=None,
        compute_metrics=None,
        warmup_rounds=0,
        num_rounds=3,
        num_clients=2,
        participation=1.0,
    )
    before = weights(run)
    run.train()
    after = weights(run)
    assert all(torch.isfinite(torch.tensor(e["client_loss"])) and e["client_loss"] > 0 for e in rounds(run))
    moved = [n for n in run.client_parameters if not torch.equal(before[n], after[n])]
    assert len(moved) > len(run.client_parameters) / 2


@pytest.mark.parametrize("method", ["acc_sfl", "fsl_sage"])
def test_samples_of_several_lengths_train(tmp_path: Path, method: str) -> None:
    """Batches padded to their own longest sample, as data collators do."""
    data = texts().with_format(None)

    def collate(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        columns = {name: torch.tensor([sample[name] for sample in samples]) for name in samples[0]}
        longest = int(columns["attention_mask"].sum(1).max())
        return {name: t[:, :longest] if t.dim() > 1 else t for name, t in columns.items()}

    options = QUICK | {"buffer_every": 1} if method == "fsl_sage" else {}
    run = trainer(
        tmp_path, tiny_bert(), data, method=method, method_kwargs=options, eval_dataset=None, data_collator=collate
    )
    run.train()
    if isinstance(run.rounds.method, FSLSAGE):
        lengths = {p.activations.shape[1] for s in run.rounds.method.clients.values() for p in s.buffer}
        assert len(lengths) > 1


@pytest.mark.parametrize("method", ["acc_sfl", "fsl_sage"])
def test_the_wire_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    options = QUICK if method == "fsl_sage" else {}
    local = trainer(tmp_path / "a", method=method, method_kwargs=options)
    local.train()
    monkeypatch.setattr("hf_coefsfl.federation.simulation.LocalLink", WireLink)
    wired = trainer(tmp_path / "b", method=method, method_kwargs=options)
    wired.train()
    assert same(weights(local), weights(wired)) and rounds(local) == rounds(wired)


@pytest.mark.parametrize("method", ["acc_sfl", "fsl_sage"])
def test_bf16_and_gradient_checkpointing(tmp_path: Path, method: str) -> None:
    options = QUICK if method == "fsl_sage" else {}
    plain = trainer(tmp_path / "a", method=method, method_kwargs=options, num_rounds=2)
    saving = trainer(tmp_path / "b", method=method, method_kwargs=options, num_rounds=2, gradient_checkpointing=True)
    half = trainer(tmp_path / "c", method=method, method_kwargs=options, num_rounds=2, bf16=True)
    for run in (plain, saving, half):
        run.train()
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(saving)[name], value, atol=1e-6, rtol=1e-5)
    assert not same(weights(half), weights(plain))
    assert all(t.isfinite().all() for t in weights(half).values())


def test_acc_sfl_learns(tmp_path: Path) -> None:
    run = trainer(tmp_path, method="acc_sfl", num_rounds=8, participation=1.0, eval_dataset=images(24, seed=1))
    before = run.evaluate()["eval_loss"]
    run.train()
    losses = [entry["client_loss"] for entry in rounds(run)]
    assert losses[-1] < losses[1] and run.evaluate()["eval_loss"] < before - 0.05


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("acc_sfl", {"head": "big"}, r"head='big' is not an auxiliary head. Choose one of: fc, fc_lora, mlp"),
        ("acc_sfl", {"rank": 0}, r"rank=0 must be a whole number of at least 1"),
        ("acc_sfl", {"hidden_layers": 0}, r"hidden_layers=0 must be"),
        ("acc_sfl", {"rank": 1.5}, r"must be int, got 1.5"),
        ("fsl_sage", {"align_every": 0}, r"align_every=0 must be a whole number of at least 1"),
        ("fsl_sage", {"align_epochs": 0}, r"align_epochs=0"),
        ("fsl_sage", {"buffer_size": 0}, r"buffer_size=0"),
        ("fsl_sage", {"num_blocks": 0}, r"num_blocks=0"),
        ("fsl_sage", {"align_warmup_steps": -1}, r"align_warmup_steps=-1 must be .* at least 0"),
        ("fsl_sage", {"align_learning_rate": float("nan")}, r"align_learning_rate=nan must be a finite number above 0"),
        ("fsl_sage", {"init": "zeros"}, r"init='zeros' .* Choose one of: random, copy_server"),
    ],
)
def test_bad_options_are_refused(method: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        make_method(method, options)


def test_tasks_without_a_head_are_refused() -> None:
    with pytest.raises(ValueError, match="encoder-decoder"):
        make_method("acc_sfl").check_loss(LossSpec.of(MODELS["bart"].make(), []))
    with pytest.raises(ValueError, match="does not know a ForObjectDetection loss"):
        make_method("acc_sfl").check_loss(LossSpec("ForObjectDetection", 3, ("labels",)))
    config = BertConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=30)
    make_method("acc_sfl").check_loss(LossSpec.of(BertForSequenceClassification(config), []))
