"""CycleSL: a round against plain autograd, and resampled batches whose samples keep what belongs to them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_coefsfl.methods import make_method
from hf_coefsfl.methods.cycle_sl import alike_batches, resampled
from hf_coefsfl.protocol.client_side import ClientSide
from hf_coefsfl.protocol.link import LocalLink
from hf_coefsfl.protocol.loss import LossSpec
from hf_coefsfl.protocol.messages import SmashedData
from hf_coefsfl.protocol.server_side import ServerSide
from hf_coefsfl.split import split_model
from tests.support.federated import texts, tiny_bert
from tests.support.toy import CAUSAL, CLASSIFICATION, REGRESSION, SPANS, TOKENS, toy_sides

Sides = tuple[ClientSide, ServerSide]
TASKS = [CLASSIFICATION, REGRESSION, TOKENS, CAUSAL, SPANS]


def run(name: str, sides: Sides, **options: Any) -> tuple[list[Tensor], LocalLink]:
    method = make_method(name, options)
    link = LocalLink(method, sides[0])
    method.round(link, sides[1])
    return [p.detach().clone() for side in sides for p in side.half.parameters()], link


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- Rounds ----


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.loss_type)
def test_a_round_against_plain_autograd(task: LossSpec) -> None:
    """All samples in one pool, dealt out by the same numbers; then the gradients of the client's batches."""
    client, server = toy_sides(task, 3, local_epochs=2)
    for side in (client, server):
        side.optimizer = torch.optim.SGD(side.half.parameters(), lr=0.5)
    batches = [task.separate(batch) for batch in client.batches]
    initial = [client.half(**inputs).activations.detach() for inputs, _ in batches]
    pool = torch.cat(initial)
    labels = {name: torch.cat([own[name] for _, own in batches]) for name in batches[0][1]}
    for epoch in range(2):
        source = drawn(server.context.derive_seed("method", epoch))
        dealt = torch.randperm(12, generator=source).reshape(3, 4)
        for rows in dealt[torch.randperm(3, generator=source)]:
            server.optimizer.zero_grad()
            server.half(SmashedData(pool[rows]), **{name: t[rows] for name, t in labels.items()}).loss.backward()
            server.optimizer.step()
    gradients = []
    for s, (_, own) in zip(initial, batches, strict=True):
        leaf = s.clone().requires_grad_()
        gradients += torch.autograd.grad(server.half(SmashedData(leaf), **own).loss, leaf)
    for _ in range(2):
        for gradient, (inputs, _) in zip(gradients, batches, strict=True):
            client.optimizer.zero_grad()
            client.half(**inputs).activations.backward(gradient)
            client.optimizer.step()
    expected = [p.detach().clone() for side in (client, server) for p in side.half.parameters()]
    sides = toy_sides(task, 3, local_epochs=2)
    for side in sides:
        side.optimizer = torch.optim.SGD(side.half.parameters(), lr=0.5)
    for ours, twin in zip(run("cycle_sl", sides)[0], expected, strict=True):
        torch.testing.assert_close(ours, twin, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("epochs", [1, 2])
def test_without_resampling_it_is_reuse_at_the_trained_server(monkeypatch: pytest.MonkeyPatch, epochs: int) -> None:
    def trained(name: str, **options: Any) -> list[Tensor]:
        return run(name, toy_sides(CLASSIFICATION, 3, local_epochs=epochs), **options)[0]

    reuse, mixed = trained("reuse", feedback_at="final"), trained("cycle_sl")
    monkeypatch.setattr("hf_coefsfl.methods.cycle_sl.resampled", lambda smashed, *_: smashed)
    assert same(trained("cycle_sl"), reuse) and not same(mixed, reuse)


def test_epochs_of_the_server_are_its_own() -> None:
    def passes(epochs: int, **options: Any) -> int:
        client, server = toy_sides(CLASSIFICATION, 3, local_epochs=epochs)
        seen: list[int] = []
        server.half.register_forward_hook(lambda *_: seen.append(1))
        run("cycle_sl", (client, server), **options)
        return len(seen) - 3  # those of the answers

    assert [passes(1), passes(2), passes(2, server_epochs=1), passes(1, server_epochs=4)] == [3, 6, 3, 12]


def test_transfers_and_bytes_are_those_of_reuse() -> None:
    meters = [run(name, toy_sides(CLASSIFICATION, 3, local_epochs=2))[1].meter for name in ("cycle_sl", "reuse")]
    assert meters[0] == meters[1] and meters[0].transfers == 2


@pytest.mark.parametrize(("value", "message"), [(0, "server_epochs=0 must be a whole"), (1.5, "must be int or None")])
def test_options(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_method("cycle_sl", {"server_epochs": value})


# ---- Resampling ----


def marked(size: int, start: int, length: int = 3, **shared: Tensor) -> SmashedData:
    """A batch whose samples carry their number in everything that is theirs."""
    number = torch.arange(start, start + size)
    return SmashedData(
        number[:, None, None].float().expand(size, length, 2).clone(),
        {"attention_mask": number[:, None].expand(size, length).clone(), **shared},
        {"labels": number.clone()},
        {"input_ids": (size, length)},
    )


def test_samples_are_dealt_out_anew_with_all_that_is_theirs() -> None:
    shared = {"block.bias": torch.ones(1, 2, 3, 3), "block.flag": torch.tensor(7)}
    batches = [marked(4, 0, **shared), marked(4, 4, **shared), marked(2, 8, **shared)]
    groups = alike_batches(batches)
    assert groups == [{0: 4, 1: 4, 2: 2}]
    orders = []
    for seed in range(5):
        dealt = list(resampled(batches, groups, drawn(seed)))
        assert sorted(len(data.activations) for data in dealt) == [2, 4, 4]
        for data in dealt:
            number = data.labels["labels"]
            assert torch.equal(data.activations, number[:, None, None].float().expand(-1, 3, 2))
            assert torch.equal(data.context["attention_mask"], number[:, None].expand(-1, 3))
            assert torch.equal(data.context["block.bias"], shared["block.bias"]) and data.context["block.flag"] == 7
            assert data.shapes == {"input_ids": (len(number), 3)}
        orders.append([int(n) for data in dealt for n in data.labels["labels"]])
        assert sorted(orders[-1]) == list(range(10))
        mixed = [{int(n) // 4 for n in data.labels["labels"]} for data in dealt]
        assert any(len(sources) > 1 for sources in mixed)
    assert len({tuple(order) for order in orders}) == 5
    again = [int(n) for data in resampled(batches, groups, drawn(0)) for n in data.labels["labels"]]
    assert again == orders[0]


def test_batches_of_another_form_are_not_mixed() -> None:
    one, other = {"block.flag": torch.tensor(1)}, {"block.flag": torch.tensor(2)}
    batches = [marked(4, 0), marked(4, 4, length=5), marked(2, 8), marked(4, 10, **one), marked(4, 14, **other)]
    groups = alike_batches(batches)
    assert groups == [{0: 4, 2: 2}, {1: 4}, {3: 4}, {4: 4}]
    dealt = {frozenset(data.labels["labels"].tolist()) for data in resampled(batches, groups, drawn(0))}
    assert {frozenset(range(4, 8)), frozenset(range(10, 14)), frozenset(range(14, 18))} < dealt


def test_a_tensor_over_positions_stays_if_there_are_as_many_samples() -> None:
    positions = torch.arange(4)
    batches = [marked(4, 4 * i, length=4, **{"block.positions": positions}) for i in range(3)]
    groups = alike_batches(batches)
    assert len(groups) == 1
    for data in resampled(batches, groups, drawn(0)):
        assert torch.equal(data.context["block.positions"], positions)
        assert torch.equal(data.context["attention_mask"][:, 0], data.labels["labels"])


def test_masks_of_texts_go_with_their_samples() -> None:
    """The logits of a resampled batch are those that its samples have in their own batches."""
    split = split_model(tiny_bert(dropout=0.0), 2).eval()
    rows = texts(10)
    parts = [(slice(0, 4), 8), (slice(4, 6), 6), (slice(6, 10), 8)]  # the second is cut short
    with torch.no_grad():
        batches = [
            split.client(**{k: rows[part][k][:, :length] for k in ("input_ids", "attention_mask")}, labels=number)
            for (part, length), number in zip(parts, torch.arange(10).split([4, 2, 4]), strict=True)
        ]
        logits = torch.cat(
            [split.server(data, labels=torch.zeros_like(data.labels["labels"])).logits for data in batches]
        )
        groups = alike_batches(batches)
        assert groups == [{0: 4, 2: 4}, {1: 2}]
        for data in resampled(batches, groups, drawn(1)):
            number = data.labels["labels"]
            again = split.server(data, labels=torch.zeros_like(number)).logits
            torch.testing.assert_close(again, logits[number], rtol=1e-4, atol=1e-6)
