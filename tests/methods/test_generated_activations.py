"""Activations that GAS generates: their number, their moments, their padding."""

from typing import Any

import pytest
import torch

from hf_coefsfl.methods.gas import can_generate, enlarge, missing_labels, num_generated, observe, share_of, spread
from hf_coefsfl.methods.parts.class_statistics import Moments, seen_positions, update
from hf_coefsfl.protocol.context import RoundContext
from hf_coefsfl.protocol.loss import LossSpec
from hf_coefsfl.protocol.messages import SmashedData
from hf_coefsfl.protocol.server_side import ServerSide
from hf_coefsfl.split import split_model
from tests.support.class_statistics import generator
from tests.support.models import MODELS
from tests.support.toy import CLASSIFICATION, toy_sides


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
    drawn = moments.draw(40_000, 3, generator(0))
    torch.testing.assert_close(drawn.mean(0), mean, atol=0.06, rtol=0)
    torch.testing.assert_close(drawn.var(0), variance, atol=0, rtol=0.04)
    correlation = torch.corrcoef(drawn.flatten(1).T)
    assert (correlation - torch.eye(6)).abs().max() < 0.03


def test_draws_fit_the_length_of_the_batch() -> None:
    moments = Moments(torch.tensor([2.0, 1.0, 0.0]), torch.ones(3, 2), torch.tensor([[1.0], [1.0], [0.0]]).expand(3, 2))
    assert moments.draw(4, 1, generator(0)).shape == (4, 1, 2)
    long = moments.draw(4, 5, generator(0))
    assert long.shape == (4, 5, 2) and (long[:, 2] == 1).all() and (long[:, 3:] == 0).all()
    assert [seen.tolist() for seen in seen_positions({7: moments}).values()] == [[True, True, False]]


def test_positions_that_any_has_seen() -> None:
    def of(*weight: float) -> Moments:
        return Moments(torch.tensor(weight), torch.zeros(len(weight), 1), torch.zeros(len(weight), 1))

    seen = seen_positions({0: of(1, 0), 1: of(0, 2)}, {0: of(0, 0, 3)}, {})
    assert {label: at.tolist() for label, at in seen.items()} == {0: [True, False, True], 1: [False, True]}


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
        statistics = update({}, observe(smashed, [0, 1, 2]))
        server = server_of(split)
        seen = seen_positions(statistics)
        assert can_generate(seen, [smashed], 3)
        enlarged = enlarge(smashed, [2, 0, 0, 1], statistics, seen, server, batch=0)
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
    statistics = update({}, observe(smashed, [0, 1]))
    enlarged = enlarge(smashed, [1, 0, 1], statistics, seen_positions(statistics), server, 0)
    assert torch.equal(enlarged.context["attention_mask"], mask[[0, 1, 1, 0, 1]])
    assert torch.equal(enlarged.context["padding"], ~mask[[0, 1, 1, 0, 1]])
    assert torch.equal(enlarged.context["position_ids"], context["position_ids"][[0, 1, 0, 1, 0]])
    assert enlarged.context["flag"].ndim == 0 and enlarged.shapes == {"input_ids": (5, 4)}
    assert (enlarged.activations[2, 2:] == 0).all()
    assert enlarge(smashed, [], {}, {}, server, 0) is smashed


def test_nothing_is_generated_before_every_class_has_been_seen() -> None:
    def data(length: int, masked: bool) -> SmashedData:
        mask = {"attention_mask": torch.ones(1, length, dtype=torch.bool)} if masked else {}
        return SmashedData(torch.zeros(1, length, 2), mask, {"labels": torch.tensor([0])})

    seen = torch.tensor([False, True])
    assert not can_generate({0: seen}, [data(2, True)], 2)
    assert can_generate({0: seen, 1: seen}, [data(2, True)], 2)
    assert can_generate({0: seen, 1: seen}, [data(9, True)], 2)  # the rest is padding
    assert not can_generate({0: seen, 1: seen}, [data(1, True)], 2)  # nothing but padding would be left
    assert not can_generate({0: seen, 1: seen}, [data(2, False)], 2)  # no mask to hide an unseen position
