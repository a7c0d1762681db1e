"""GAS: adjusted gradients, a round, an exchange for every batch, and what is refused."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForQuestionAnswering

from hf_coefsfl.methods import make_method
from hf_coefsfl.methods.base import ClientState
from hf_coefsfl.methods.gas import (
    GAS,
    adjusted_gradient,
    class_labels,
    enlarge,
    label_counts,
    missing_labels,
    observe,
    outlines,
    weighted,
)
from hf_coefsfl.methods.parts.class_statistics import (
    ClassStatistics,
    class_moments,
    from_tensors,
    pooled,
    seen_positions,
    to_tensors,
    update,
)
from hf_coefsfl.protocol.client_side import ClientSide
from hf_coefsfl.protocol.link import LocalLink
from hf_coefsfl.protocol.loss import LossSpec
from hf_coefsfl.protocol.messages import SmashedData
from hf_coefsfl.protocol.server_side import ServerSide
from tests.support.class_statistics import identical
from tests.support.federated import texts, trainer
from tests.support.toy import CAUSAL, CLASSIFICATION, MULTI_LABEL, REGRESSION, SPANS, TOKENS, toy_sides


def values(side: ClientSide | ServerSide) -> list[torch.Tensor]:
    return [p.detach().clone() for p in side.half.parameters()]


def run(method: GAS, sides: tuple[ClientSide, ServerSide]) -> LocalLink:
    link = LocalLink(method, sides[0])
    method.round(link, sides[1])
    return link


# ---- Adjusted logits ----


def test_adjusted_gradient_against_autograd() -> None:
    client, server = toy_sides(CLASSIFICATION, 2)
    smashed = client.exchange()
    labels = torch.cat([data.labels["labels"] for data in smashed]).tolist()
    batches = class_labels(outlines(smashed))
    assert [len(batch) for batch in batches] == [len(data.activations) for data in smashed]
    assert [label for batch in batches for label in batch] == labels
    assert label_counts(batches, 3) == [labels.count(c) for c in range(3)]
    counts = torch.tensor(label_counts(batches, 3)).float()
    leaf = smashed[0].activations.clone().requires_grad_()
    half: Any = server.half
    logits = half.head(half.hidden(leaf).tanh()).mean(1)
    prior = torch.tensor([math.log(labels.count(c) / len(labels) + 1e-12) for c in range(3)])
    loss = -(logits + prior).log_softmax(-1)[range(4), smashed[0].labels["labels"]].mean()
    (expected,) = torch.autograd.grad(loss, leaf)
    ours = adjusted_gradient(server, smashed[0], 0, counts)
    torch.testing.assert_close(ours, expected)
    assert server.observed.mean("feedback_loss") == pytest.approx(loss.item())
    assert not torch.allclose(ours, server.gradient(smashed[0], 0))
    # frequencies that are equal adjust nothing
    torch.testing.assert_close(adjusted_gradient(server, smashed[0], 0, torch.ones(3)), server.gradient(smashed[0], 0))


def test_client_steps_are_those_of_reuse_where_labels_are_balanced() -> None:
    moved = []
    for method in (make_method("gas"), make_method("reuse")):
        client, server = toy_sides(CLASSIFICATION, 3)
        for i, batch in enumerate(client.batches):
            batch["labels"] = (torch.arange(4) + i) % 3  # 12 samples, 4 of each class
        method.round(LocalLink(method, client), server)
        moved.append((values(client), values(server)))
    torch.testing.assert_close(moved[0][0], moved[1][0], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(moved[0][1][0], moved[1][1][0], atol=1e-3)  # the server saw more


# ---- A round ----


def labelled_sides(labels: list[list[int]], **setting: Any) -> tuple[ClientSide, ServerSide]:
    client, server = toy_sides(CLASSIFICATION, len(labels), **setting)
    for batch, target in zip(client.batches, labels, strict=True):
        batch["labels"] = torch.tensor(target)
    return client, server


def spy_on_batches(server: ServerSide) -> list[list[int]]:
    """Return the labels of each batch that the server trains on, as they come."""
    trained: list[list[int]] = []
    original = server.train_step

    def train_step(smashed: SmashedData, batch: int) -> torch.Tensor:
        trained.append(smashed.labels["labels"].tolist())
        return original(smashed, batch)

    server.train_step = train_step  # type: ignore[method-assign]
    return trained


def test_every_class_of_the_pool_is_padded() -> None:
    """Counts 5, 3 and 4 are padded to 6 by the labels 0 1 1 1 2 2, dealt out to three batches."""
    sides = labelled_sides([[0, 0, 1, 2], [0, 1, 2, 2], [0, 0, 1, 2]], local_epochs=2)
    trained = spy_on_batches(sides[1])
    link = run(GAS(samples_per_class=6), sides)
    enlarged = [[0, 0, 1, 2, 0, 1], [0, 1, 2, 2, 1, 2], [0, 0, 1, 2, 1, 2]]
    assert trained == enlarged * 2
    activations = 3 * 4 * 3 * 4 * 4  # what is generated does not cross the cut
    assert link.meter.transfers == 2
    assert link.meter.up == {"smashed_data": activations, "extras": 3 * 4 * 8}
    assert link.meter.down == {"gradients": activations}


def test_classes_that_only_other_clients_have_are_generated_once_known() -> None:
    method = GAS(samples_per_class=3)
    first = labelled_sides([[0, 0, 1, 1]])
    trained = spy_on_batches(first[1])
    run(method, first)
    assert trained == [[0, 0, 1, 1]]  # class 2 is not known yet
    assert method.statistics == {}  # shared by the clients of a round: it changes at the end
    second = labelled_sides([[2, 2, 2, 2]])
    run(method, second)
    method.merge([ClientState(i, 4, side.kept) for i, (_, side) in enumerate((first, second))])
    third = labelled_sides([[0, 0, 1, 1]])
    trained = spy_on_batches(third[1])
    before = to_tensors(method.statistics)
    run(method, third)
    assert trained == [[0, 0, 1, 1, 0, 1, 2, 2, 2]]
    after = to_tensors(method.statistics)
    assert all(after[name] is before[name] or torch.equal(after[name], before[name]) for name in before)


def test_a_round_works_with_its_own_upload_and_weighs_it_by_its_number() -> None:
    client, server = labelled_sides([[0, 0, 1, 2], [0, 1, 2, 2]])
    client.context = server.context = replace(server.context, round_index=4)
    smashed = client.exchange()
    expected = weighted(pooled(map(observe, smashed, class_labels(smashed))), server)
    method = GAS()
    run(method, (client, server))
    assert identical(from_tensors(server.kept), expected)
    assert (from_tensors(server.kept)[0].weight == 5 * 3).all()
    client.context = server.context = replace(server.context, round_index=0)
    assert (weighted(observe(smashed[0], class_labels(smashed)[0]), server)[0].weight == 2).all()


def test_generation_uses_the_statistics_of_start_and_own_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    import hf_coefsfl.methods.gas as module

    used: list[ClassStatistics] = []
    original = module.enlarge

    def spy(smashed: Any, labels: Any, statistics: ClassStatistics, *rest: Any) -> SmashedData:
        used.append(statistics)
        return original(smashed, labels, statistics, *rest)

    monkeypatch.setattr(module, "enlarge", spy)
    method = GAS()
    client, server = labelled_sides([[0, 0, 1, 2]])
    known = class_moments(5 + torch.randn(8, 3, 4), [0, 1, 2, 0, 1, 2, 0, 1], torch.ones(8, 3, dtype=torch.bool))
    method.merge([ClientState(1, 8, to_tensors(known))])
    start = method.statistics
    run(method, (client, server))
    assert identical(used[0], update(start, from_tensors(server.kept)))
    assert not identical(used[0], start)


def test_a_round_repeats_to_the_bit() -> None:
    results = []
    for _ in range(2):
        sides = labelled_sides([[0, 0, 1, 2], [0, 1, 2, 2]])
        run(GAS(), sides)
        results.append((values(sides[0]) + values(sides[1]), sides[1].kept))
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))
    assert all(torch.equal(t, results[1][1][name]) for name, t in results[0][1].items())


def test_ignored_labels_enter_nothing() -> None:
    client, server = labelled_sides([[0, 0, -100, 1]])
    (smashed,) = client.exchange()
    assert label_counts(class_labels([smashed]), 3) == [2, 1, 0]
    assert list(observe(smashed, [0, 0, -100, 1])) == [0, 1]
    assert adjusted_gradient(server, smashed, 0, torch.ones(3))[2].norm() == 0


# ---- An exchange for every batch ----


def test_per_batch_exchanges_at_the_present_weights() -> None:
    method = GAS(samples_per_class=6, per_batch=True)
    client, server = labelled_sides([[0, 0, 1, 2], [0, 1, 2, 2], [0, 0, 1, 2]], local_epochs=2)
    trained = spy_on_batches(server)
    link = run(method, (client, server))
    assert link.meter.transfers == 2 * 3 * 2
    activations = 2 * 3 * 4 * 3 * 4 * 4
    assert link.meter.up == {"smashed_data": activations, "extras": 2 * 3 * 4 * 8}
    assert link.meter.down == {"gradients": activations}
    # the share of a batch is 6 / 3 = 2 of each class
    enlarged = [[0, 0, 1, 2, 1, 2], [0, 1, 2, 2, 0, 1], [0, 0, 1, 2, 1, 2]]
    assert trained == enlarged * 2
    assert (from_tensors(server.kept)[0].weight == 2 * 5).all()


def test_per_batch_by_hand() -> None:
    """Two batches: each gradient at the weights of its time, with the label frequencies seen so far."""
    labels = [[0, 0, 1, 2], [1, 1, 2, 2]]
    client, server = labelled_sides(labels)
    run(GAS(per_batch=True), (client, server))
    twin_client, twin_server = labelled_sides(labels)
    statistics: ClassStatistics = {}
    counts = torch.zeros(3)
    for batch, target in enumerate(labels):
        smashed = twin_client.smash(batch)
        counts = counts + torch.tensor([float(target.count(c)) for c in range(3)])
        gradient = adjusted_gradient(twin_server, smashed, batch, counts)
        twin_client.descend(gradient)
        statistics = pooled([statistics, observe(smashed, target)])
        missing = missing_labels([target.count(c) for c in range(3)], 16)
        known = update({}, statistics)
        twin_server.train_step(enlarge(smashed, missing, known, seen_positions(known), twin_server, batch), batch)
    for ours, twin in zip(values(client) + values(server), values(twin_client) + values(twin_server), strict=True):
        assert torch.equal(ours, twin)


# ---- Refusals ----


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        (TOKENS, "a ForTokenClassification loss has none"),
        (SPANS, "a ForQuestionAnswering loss has none"),
        (CAUSAL, "a ForCausalLM loss has none"),
        (REGRESSION, "problem_type='regression' has none"),
        (MULTI_LABEL, "problem_type='multi_label_classification' has none"),
        (LossSpec("ForSequenceClassification", 1, ("labels",)), "num_labels=1 makes this a regression"),
    ],
    ids=lambda t: getattr(t, "loss_type", ""),
)
def test_tasks_without_classes_are_refused(task: LossSpec, reason: str) -> None:
    with pytest.raises(ValueError, match=f"needs one class label for each sample; {reason}.*another method"):
        GAS().check_loss(task)


@pytest.mark.parametrize("problem", [None, "single_label_classification"])
def test_single_labels_are_accepted(problem: str | None) -> None:
    for kind in ("Sequence", "Image", "Video", "Audio"):
        GAS().check_loss(LossSpec(f"For{kind}Classification", 3, ("labels",), problem_type=problem))


def test_multi_label_data_is_refused_even_if_the_config_does_not_say_so() -> None:
    client, server = toy_sides(CLASSIFICATION, 1)
    client.batches[0]["labels"] = torch.ones(4, 3)
    with pytest.raises(ValueError, match=r"got labels of shape \(4, 3\) and type torch.float32 for 4 samples"):
        run(GAS(), (client, server))


def test_trainer_refuses_question_answering_before_training(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    with pytest.raises(ValueError, match="GAS generates activations of a class"):
        trainer(tmp_path, BertForQuestionAnswering(BertConfig(vocab_size=40, **sizes)), texts(), method="gas")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"samples_per_class": 0}, "samples_per_class=0 must be a whole number of at least 1"),
        ({"samples_per_class": 2.5}, "must be int, got 2.5"),
        ({"per_batch": "yes"}, "must be bool, got 'yes'"),
        ({"num_generated": 3}, r"no option 'num_generated'.*samples_per_class \(default 32\), per_batch"),
    ],
)
def test_options(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_method("gas", kwargs)
