"""GAS: running statistics against pooled data, adjusted gradients, generated activations, and its state."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertForQuestionAnswering

from hf_coefsfl.methods import make_method
from hf_coefsfl.methods.base import ClientState
from hf_coefsfl.methods.gas import (
    GAS,
    adjusted_gradient,
    can_generate,
    enlarge,
    label_counts,
    missing_labels,
    num_generated,
    observe,
    share_of,
    spread,
    weighted,
)
from hf_coefsfl.methods.parts.class_statistics import (
    VARIANCE_FLOOR,
    ClassStatistics,
    Moments,
    class_moments,
    combine,
    from_tensors,
    pooled,
    to_tensors,
    update,
)
from hf_coefsfl.protocol.client_side import ClientSide
from hf_coefsfl.protocol.context import RoundContext
from hf_coefsfl.protocol.link import LocalLink
from hf_coefsfl.protocol.loss import LossSpec
from hf_coefsfl.protocol.messages import SmashedData
from hf_coefsfl.protocol.server_side import ServerSide
from hf_coefsfl.split import split_model
from hf_coefsfl.trainer.checkpoints import seal
from tests.support.federated import CLASSES, images, rounds, same, texts, tiny_bert, tiny_vit, trainer, weights
from tests.support.models import MODELS
from tests.support.toy import CAUSAL, CLASSIFICATION, MULTI_LABEL, REGRESSION, SPANS, TOKENS, toy_sides

NAN = float("nan")

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def close(a: ClassStatistics, b: ClassStatistics, **tolerance: Any) -> bool:
    ours, theirs = to_tensors(a), to_tensors(b)
    return ours.keys() == theirs.keys() and all(torch.allclose(ours[n], theirs[n], **tolerance) for n in ours)


def identical(a: ClassStatistics, b: ClassStatistics) -> bool:
    ours, theirs = to_tensors(a), to_tensors(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


def values(side: ClientSide | ServerSide) -> list[torch.Tensor]:
    return [p.detach().clone() for p in side.half.parameters()]


def run(method: GAS, sides: tuple[ClientSide, ServerSide]) -> LocalLink:
    link = LocalLink(method, sides[0])
    method.round(link, sides[1])
    return link


def uploads(lengths: list[int], seed: int = 0, size: int = 6, features: int = 2) -> list[Batch]:
    """Batches (activations, labels of two classes, mask) of several lengths, with padding at the right."""
    source, batches = generator(seed), []
    for length in lengths:
        s = 3 + 2 * torch.randn(size, length, features, generator=source)
        mask = torch.arange(length) < torch.randint(1, length + 1, (size, 1), generator=source)
        batches.append((s, torch.arange(size) % 2, mask))
    return batches


# ---- Statistics ----


def test_moments_by_hand() -> None:
    """Position 0 sees 1 and 3, position 1 only 5 (the other sample is padding there), position 2 nothing."""
    s = torch.tensor([[[1.0], [5.0], [NAN]], [[3.0], [NAN], [7.0]]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    moments = Moments.of(s, mask)
    assert moments.weight.tolist() == [2, 1, 0]
    assert moments.mean.flatten().tolist() == [2, 5, 0]
    assert moments.variance.flatten().tolist() == [1, 0, 0]


def test_formula_by_hand() -> None:
    """w 1 and 3: α = 1/4, mean = 0/4 + 3 · 4/4 = 3, variance = (2 + 9)/4 + 3 · (6 + 1)/4 + 1e-5 = 8 + 1e-5."""
    old, new = (Moments(torch.tensor([w]), torch.tensor([m]), torch.tensor([v])) for w, m, v in _TWO)
    result = combine(old, new)
    assert result.weight.item() == 4 and result.mean.item() == 3
    assert result.variance.item() == pytest.approx(8 + 1e-5, abs=1e-6)
    assert VARIANCE_FLOOR == 1e-5


_TWO = ((1.0, 0.0, 2.0), (3.0, 4.0, 6.0))


def test_the_first_upload_is_taken_as_it_is() -> None:
    moments = Moments.of(torch.randn(4, 3, 2, generator=generator(0)), torch.ones(4, 3, dtype=torch.bool))
    first = update({}, {1: moments})[1]
    assert torch.equal(first.mean, moments.mean) and torch.equal(first.weight, moments.weight)
    torch.testing.assert_close(first.variance, moments.variance + 1e-5)


def test_pooling_gives_the_moments_of_all_samples() -> None:
    """Batches of several lengths with padding, against the samples of each class and position in one heap."""
    batches = uploads([4, 7, 5])
    total = pooled(class_moments(*batch) for batch in batches)
    for label in (0, 1):
        for t in range(7):
            heap = [s[(y == label) & m[:, t], t] for s, y, m in batches if s.shape[1] > t]
            seen = torch.cat(heap)
            assert total[label].weight[t] == len(seen)
            if len(seen):
                torch.testing.assert_close(total[label].mean[t], seen.mean(0))
                torch.testing.assert_close(total[label].variance[t], seen.var(0, unbiased=False), atol=4e-6, rtol=0)
            else:
                assert (total[label].mean[t] == 0).all() and (total[label].variance[t] == 0).all()
    assert total[0].weight[-1] < total[0].weight[0]  # some of it was padding


def test_running_moments_are_weighted_pooled_moments_and_a_sum_of_floors() -> None:
    """The recursion solved: W_n v_n = Σ w_j (v_j + m_j²) − W_n m_n² + 1e-5 Σ W_j.

    Every update adds the floor to the whole variance, of weight W_j at the time; so the variance is
    the pooled one with each sample weighted by its round, plus 1e-5 Σ_j W_j / W_n.
    """
    floor = 0.25  # large enough to be seen
    running: ClassStatistics = {}
    source, heap, weights, cumulated = generator(1), [], [], []
    for number in (1, 1, 2, 5):
        s = torch.randn(number + 2, 3, 2, generator=source, dtype=torch.double).float()
        ours = class_moments(s, torch.zeros(len(s), dtype=torch.long), torch.ones(s.shape[:2], dtype=torch.bool))
        running = update(running, {0: ours[0].scaled(number)}, floor)
        heap.append(s)
        weights += [float(number)] * len(s)
        cumulated.append(sum(weights))
    w = torch.tensor(weights).reshape(-1, 1, 1) / sum(weights)
    samples = torch.cat(heap)
    mean = (w * samples).sum(0)
    variance = (w * (samples - mean).square()).sum(0)
    torch.testing.assert_close(running[0].mean, mean)
    torch.testing.assert_close(running[0].variance, variance + floor * sum(cumulated) / cumulated[-1])
    assert (running[0].weight == cumulated[-1]).all()


def test_a_position_that_an_upload_does_not_reach_keeps_its_statistics() -> None:
    long, short = (Moments.of(torch.randn(5, n, 2, generator=generator(n)), torch.ones(5, n) > 0) for n in (4, 2))
    old = update({}, {0: long})
    new = update(old, {0: short})
    for before, after in zip(to_tensors(old).values(), to_tensors(new).values(), strict=True):
        assert torch.equal(before[2:], after[2:]) and not torch.equal(before[:2], after[:2])


def test_statistics_survive_their_tensors() -> None:
    statistics = update({}, class_moments(*uploads([4])[0]))
    statistics = {0: statistics[0], 2: statistics[1], 11: statistics[0]}
    again = from_tensors(to_tensors(statistics))
    assert list(again) == [0, 2, 11] and identical(again, statistics)


def test_merging_hardly_depends_on_the_order_and_repeats_to_the_bit() -> None:
    kept = []
    for client, batch in enumerate(uploads([4, 6, 6], seed=2)):
        ours = {label: moments.scaled(7) for label, moments in class_moments(*batch).items()}
        kept.append(ClientState(client, 6, to_tensors(ours)))
    results = []
    for order in ([0, 1, 2], [0, 1, 2], [2, 0, 1]):
        method = GAS()
        method.merge([kept[i] for i in order])
        results.append(method.statistics)
    assert identical(results[0], results[1])
    assert close(results[0], results[2], atol=1e-4, rtol=1e-4)


def test_state_goes_out_and_in() -> None:
    method, other = GAS(), GAS()
    assert method.state_dict() == {}
    method.merge([ClientState(0, 6, to_tensors(class_moments(*uploads([4])[0])))])
    other.load_state_dict(method.state_dict())
    assert identical(other.statistics, method.statistics)
    other.setup(None, CLASSIFICATION, 0)  # type: ignore[arg-type]
    assert other.statistics == {}


# ---- Generated activations ----


def test_numbers_to_generate() -> None:
    assert num_generated([10] * 100, 32) == 2200  # CIFAR-100, a client with 1000 samples
    assert num_generated([40, 0, 31], 32) == 0 + 32 + 1
    assert missing_labels([4, 0, 2], 3) == [1, 1, 1, 2]
    assert spread([0, 0, 1, 1, 2], 3) == [[0, 1], [0, 2], [1]]
    assert [share_of(32, b, 5) for b in range(5)] == [6, 6, 7, 6, 7]
    assert [share_of(2, b, 4) for b in range(4)] == [0, 1, 0, 1]


def test_draws_have_the_moments_they_are_drawn_from() -> None:
    mean = torch.tensor([[0.0, 5.0], [-3.0, 1.0], [2.0, 2.0]])
    variance = torch.tensor([[1.0, 4.0], [0.25, 9.0], [1e-5, 1.0]])
    moments = Moments(torch.ones(3), mean, variance)
    drawn, mask = moments.draw(40_000, 3, generator(0))
    torch.testing.assert_close(drawn.mean(0), mean, atol=0.06, rtol=0)
    torch.testing.assert_close(drawn.var(0), variance, atol=0, rtol=0.04)
    correlation = torch.corrcoef(drawn.flatten(1).T)
    assert (correlation - torch.eye(6)).abs().max() < 0.03
    assert mask.shape == (40_000, 3) and mask.all()


def test_draws_fit_the_length_of_the_batch() -> None:
    moments = Moments(torch.tensor([2.0, 1.0, 0.0]), torch.ones(3, 2), torch.tensor([[1.0], [1.0], [0.0]]).expand(3, 2))
    short, mask = moments.draw(4, 1, generator(0))
    assert short.shape == (4, 1, 2) and mask.tolist() == [[True]] * 4
    long, mask = moments.draw(4, 5, generator(0))
    assert long.shape == (4, 5, 2) and mask.tolist() == [[True, True, False, False, False]] * 4
    assert (long[:, 3:] == 0).all()


def server_of(split: Any, task: LossSpec = CLASSIFICATION, client: int = 0, round_index: int = 0) -> ServerSide:
    setting = RoundContext(seed=0, round_index=round_index, client=client)
    return ServerSide(split.server, torch.optim.SGD(split.server.parameters(), lr=0.1), setting, task)


_CLASSIFIERS = ("bert", "deberta-v2", "gpt2", "falcon-alibi", "llama", "vit", "beit", "swin", "wav2vec2", "timm-vit")


@pytest.mark.parametrize("name", _CLASSIFIERS)
def test_servers_accept_enlarged_batches(name: str) -> None:
    """Of real models, with padding; the real samples' outputs are those without the generated ones."""
    entry = MODELS[name]
    split = split_model(entry.make().eval(), 2)
    batch = entry.batch()
    batch["labels"] = torch.tensor([0, 1, 2])
    with torch.no_grad():
        smashed = split.client(**batch)
        statistics = update({}, observe(smashed))
        server = server_of(split)
        assert can_generate(statistics, [smashed], 3)
        enlarged = enlarge(smashed, [2, 0, 0, 1], statistics, server, batch=0)
        whole, part = server.forward(enlarged, 0), server.forward(smashed, 0)
    assert enlarged.labels["labels"].tolist() == [0, 1, 2, 2, 0, 0, 1]
    assert enlarged.activations.shape == (7, *smashed.activations.shape[1:])
    assert all(shape[0] == 7 for shape in enlarged.shapes.values())
    torch.testing.assert_close(whole.logits[:3], part.logits, atol=1e-5, rtol=1e-5)
    assert whole.logits.shape == (7, 3) and whole.logits.isfinite().all() and whole.loss.isfinite()
    if name == "bert":  # one sample a class: the variance is the floor, and the draw nearly its sample
        rows = [2, 0, 0, 1]
        assert torch.equal(enlarged.context["attention_mask"][3:], smashed.context["attention_mask"][rows])
        torch.testing.assert_close(whole.logits[3:], part.logits[rows], atol=0.05, rtol=0)
        assert not torch.equal(whole.logits[4], whole.logits[5])


def test_padding_of_generated_text_is_where_its_class_was_never_seen() -> None:
    s, labels = torch.randn(2, 4, 3, generator=generator(0)), torch.tensor([0, 1])
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    context = {"attention_mask": mask, "padding": ~mask, "position_ids": torch.arange(8).reshape(2, 4)}
    context["flag"] = torch.tensor(1)
    smashed = SmashedData(s, context, {"labels": labels}, {"input_ids": (2, 4)})
    _, server = toy_sides(CLASSIFICATION)
    enlarged = enlarge(smashed, [1, 0, 1], update({}, observe(smashed)), server, 0)
    assert torch.equal(enlarged.context["attention_mask"], mask[[0, 1, 1, 0, 1]])
    assert torch.equal(enlarged.context["padding"], ~mask[[0, 1, 1, 0, 1]])
    assert torch.equal(enlarged.context["position_ids"], context["position_ids"][[0, 1, 0, 1, 0]])
    assert enlarged.context["flag"].ndim == 0 and enlarged.shapes == {"input_ids": (5, 4)}
    assert (enlarged.activations[2, 2:] == 0).all()
    assert enlarge(smashed, [], {}, server, 0) is smashed


def test_nothing_is_generated_before_every_class_has_been_seen() -> None:
    def data(length: int, masked: bool) -> SmashedData:
        mask = {"attention_mask": torch.ones(1, length, dtype=torch.bool)} if masked else {}
        return SmashedData(torch.zeros(1, length, 2), mask, {"labels": torch.tensor([0])})

    seen = Moments(torch.tensor([0.0, 1.0]), torch.zeros(2, 2), torch.ones(2, 2))
    assert not can_generate({0: seen}, [data(2, True)], 2)
    assert can_generate({0: seen, 1: seen}, [data(2, True)], 2)
    assert can_generate({0: seen, 1: seen}, [data(9, True)], 2)  # the rest is padding
    assert not can_generate({0: seen, 1: seen}, [data(1, True)], 2)  # nothing but padding would be left
    assert not can_generate({0: seen, 1: seen}, [data(2, False)], 2)  # no mask to hide an unseen position


# ---- Adjusted logits ----


def test_adjusted_gradient_against_autograd() -> None:
    client, server = toy_sides(CLASSIFICATION, 2)
    smashed = client.exchange()
    counts = label_counts(smashed, 3)
    labels = torch.cat([data.labels["labels"] for data in smashed]).tolist()
    assert counts.tolist() == [labels.count(c) for c in range(3)]
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
    expected = weighted(pooled(observe(data) for data in smashed), server)
    method = GAS()
    run(method, (client, server))
    assert identical(from_tensors(server.kept), expected)
    assert (from_tensors(server.kept)[0].weight == 5 * 3).all()
    client.context = server.context = replace(server.context, round_index=0)
    assert (weighted(observe(smashed[0]), server)[0].weight == 2).all()


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
    known = class_moments(5 + torch.randn(8, 3, 4), torch.arange(8) % 3, torch.ones(8, 3, dtype=torch.bool))
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
    assert label_counts([smashed], 3).tolist() == [2, 1, 0]
    assert list(observe(smashed)) == [0, 1]
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
        statistics = pooled([statistics, observe(smashed)])
        missing = missing_labels([target.count(c) for c in range(3)], 16)
        twin_server.train_step(enlarge(smashed, missing, update({}, statistics), twin_server, batch), batch)
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


# ---- Through the trainer ----


def to_longest(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate, cut to the longest text of the batch: batches differ in length."""
    batch = {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}
    length = int(batch["attention_mask"].sum(1).max())
    return {name: t if name == "labels" else t[:, :length] for name, t in batch.items()}


def saved_statistics(run: Any, folder: Path) -> ClassStatistics:
    """Return the statistics as a run writes them down; a run without any writes no file."""
    run.save_model(str(folder))
    state = folder / "method_state.safetensors"
    return from_tensors(load_file(state)) if state.exists() else {}


@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize("kind", ["vit", "bert"])
def test_trains(tmp_path: Path, kind: str, per_batch: bool) -> None:
    changes: dict[str, Any] = {"method": "gas", "method_kwargs": {"per_batch": per_batch, "samples_per_class": 8}}
    model: Any = tiny_vit()
    data = images()
    if kind == "bert":
        model, data = tiny_bert(dropout=0.3), texts()
        changes |= {"data_collator": to_longest}
    run = trainer(tmp_path, model, data, eval_dataset=None, warmup_rounds=1, num_rounds=3, **changes)
    run.train()
    warmup, *rest = rounds(run)
    assert warmup["transfers"] == 3 * 2 * 3
    for entry in rest:
        assert entry["transfers"] == 3 * 2 * (3 if per_batch else 1)
        assert math.isfinite(entry["server_loss"]) and math.isfinite(entry["client_loss"])
    statistics = saved_statistics(run, tmp_path / "saved")
    assert sorted(statistics) == list(range(CLASSES))
    for moments in statistics.values():
        assert moments.variance[moments.weight > 0].min() >= 1e-5
    # rounds 2 and 3 of 3 clients with 12 samples each weigh 2 and 3; every text has a first token
    assert sum(moments.weight[0] for moments in statistics.values()) == 3 * 12 * (2 + 3)
    if kind == "bert":
        assert all(moments.weight[-1] < moments.weight[0] for moments in statistics.values())


def test_warmup_leaves_the_statistics_alone(tmp_path: Path) -> None:
    run = trainer(tmp_path, method="gas", num_rounds=2, warmup_rounds=2)
    run.train()
    assert saved_statistics(run, tmp_path / "saved") == {}


@pytest.mark.parametrize("per_batch", [False, True])
def test_resume_is_bit_identical(tmp_path: Path, per_batch: bool) -> None:
    changes: dict[str, Any] = {
        "method": "gas",
        "method_kwargs": {"per_batch": per_batch},
        "num_rounds": 4,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    whole = trainer(tmp_path / "whole", **changes)
    whole.train()
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    resumed = trainer(tmp_path / "resumed", **changes)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert same(weights(whole), weights(resumed)) and rounds(whole) == rounds(resumed)
    ours, theirs = (saved_statistics(run, tmp_path / name) for run, name in ((whole, "a"), (resumed, "b")))
    assert len(ours) == CLASSES and identical(ours, theirs)
    # The statistics matter: without the file the run goes another way.
    (checkpoint / "method_state.safetensors").unlink()
    seal(checkpoint)
    forgetful = trainer(tmp_path / "forgetful", **changes)
    forgetful.train(resume_from_checkpoint=str(checkpoint))
    assert not same(weights(whole), weights(forgetful))


def test_a_used_trainer_that_resumes_from_the_warmup_forgets(tmp_path: Path) -> None:
    """Checkpoints of the warm-up hold no statistics: those of the later rounds must not stay."""
    run = trainer(tmp_path, method="gas", num_rounds=3, warmup_rounds=1, save_strategy="steps", save_steps=1)
    run.train()
    first = weights(run)
    assert not (tmp_path / "checkpoint-1" / "method_state.safetensors").exists()
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert same(first, weights(run))
