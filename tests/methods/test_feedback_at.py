"""Which server answers: the round-initial one (the paper), the one that trains on the batch, or the trained one."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_coefsfl.methods import make_method
from hf_coefsfl.methods.reuse import FEEDBACK_AT
from hf_coefsfl.protocol.client_side import ClientSide
from hf_coefsfl.protocol.link import LocalLink
from hf_coefsfl.protocol.loss import LossSpec
from hf_coefsfl.protocol.messages import Feedback, Message
from hf_coefsfl.protocol.server_side import ServerSide
from tests.support.toy import CAUSAL, CLASSIFICATION, REGRESSION, SPANS, TOKENS, toy_sides

METHODS = ["reuse", "oracle", "coef_d", "coef_j", "ggn", "hutchinson"]
ONCE = [name for name in METHODS if name != "oracle"]
Weights = list[Tensor]


class Recorded(LocalLink):
    """A link that keeps every gradient it carries down."""

    def update(self, messages: Any = None, batches: Any = None) -> None:
        sent = list(messages)
        self.gradients = [*getattr(self, "gradients", []), *(m.gradient.clone() for m in sent)]
        super().update(sent, batches)


def run(method: str, sides: tuple[ClientSide, ServerSide], **options: Any) -> tuple[Weights, Weights, list[Tensor]]:
    client, server = sides
    rule = make_method(method, options)
    link = Recorded(rule, client)
    rule.round(link, server)
    weights = [[p.detach().clone() for p in half.parameters()] for half in (client.half, server.half)]
    return weights[0], weights[1], link.gradients


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("task", [CLASSIFICATION, REGRESSION, TOKENS, CAUSAL, SPANS], ids=lambda t: t.loss_type)
@pytest.mark.parametrize("method", METHODS)
def test_the_walk_with_one_batch_equals_vanilla(method: str, task: LossSpec) -> None:
    ours = run(method, toy_sides(task, 1), feedback_at="walk")
    theirs = run("vanilla", toy_sides(task, 1))
    assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_the_walk_of_a_client_that_stays_equals_vanilla_at_every_step(method: str) -> None:
    def still() -> tuple[ClientSide, ServerSide]:
        client, server = toy_sides(CLASSIFICATION, 3, max_grad_norm=0.1)
        client.optimizer.param_groups[0].update(lr=0.0)
        return client, server

    ours, theirs = run(method, still(), feedback_at="walk"), run("vanilla", still())
    assert len(ours[2]) == 3 and same(ours[2], theirs[2]) and same(ours[1], theirs[1])


@pytest.mark.parametrize("at", ["walk", "final"])
def test_no_compensation_equals_reuse(at: str) -> None:
    def trained(method: str, **options: Any) -> Weights:
        return run(method, toy_sides(CLASSIFICATION, 3, local_epochs=2), feedback_at=at, **options)[0]

    reuse = trained("reuse")
    assert same(trained("coef_d", compensation_factor=0), reuse)
    assert same(trained("coef_j", curvature_bound=0.0), reuse)
    assert not same(trained("coef_d", compensation_factor=3000.0), reuse)
    assert not same(trained("coef_j"), reuse)


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_the_server_trains_alike_and_the_client_does_not(method: str, epochs: int) -> None:
    runs = {at: run(method, toy_sides(CLASSIFICATION, 3, local_epochs=epochs), feedback_at=at) for at in FEEDBACK_AT}
    assert all(same(runs[at][1], runs["initial"][1]) for at in FEEDBACK_AT)
    assert not any(same(runs[a][0], runs[b][0]) for a, b in (("initial", "walk"), ("walk", "final")))


@pytest.mark.parametrize("at", FEEDBACK_AT)
def test_gradients_equal_those_of_a_loop_over_copies_of_the_server(at: str) -> None:
    """The definition, by brute force: every server of the walk is kept, then each answers where it is due."""
    client, server = toy_sides(CLASSIFICATION, 3, local_epochs=2)
    twin_client, twin = toy_sides(CLASSIFICATION, 3, local_epochs=2)
    smashed = list(twin_client.exchange())
    servers = [copy.deepcopy(twin.half)]
    for _ in range(2):
        for data in smashed:
            twin.optimizer.zero_grad()
            twin.half(data).loss.backward()
            twin.optimizer.step()
            servers.append(copy.deepcopy(twin.half))
    expected = []
    for batch, data in enumerate(smashed):
        due = {"initial": 0, "walk": batch, "final": len(servers) - 1}[at]
        leaf = data.activations.detach().requires_grad_()
        expected.append(torch.autograd.grad(servers[due](type(data)(leaf, labels=data.labels)).loss, leaf)[0])
    gradients = run("reuse", (client, server), feedback_at=at)[2]
    assert len(gradients) == 3
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("method", ONCE)
def test_compensation_belongs_to_the_same_server_as_the_gradient(method: str) -> None:
    """All that comes down for batch 1 of a walk is what an initial round sends if it begins at that server."""
    sent: list[list[Message]] = []

    class Kept(LocalLink):
        def update(self, messages: Any = None, batches: Any = None) -> None:
            sent.append(list(messages))
            super().update(sent[-1], batches)

    client, server = toy_sides(CLASSIFICATION, 2)
    rule = make_method(method, {"feedback_at": "walk"})
    rule.round(Kept(rule, client), server)
    client, server = toy_sides(CLASSIFICATION, 2)
    server.train_step(client.exchange()[0], 0)
    rule = make_method(method)
    rule.round(Kept(rule, client), server)
    walked, initial = sent[0][1], sent[1][1]
    assert isinstance(walked, Feedback) and isinstance(initial, Feedback)
    for name in ("gradient", "curvature", "scalars"):
        ours, theirs = getattr(walked, name), getattr(initial, name)
        assert ours is theirs is None or torch.equal(ours, theirs)


@pytest.mark.parametrize(("at", "passes"), [("initial", 6), ("walk", 3), ("final", 6)])
@pytest.mark.parametrize("method", ["reuse", "coef_d", "coef_j"])
def test_the_walk_passes_once_over_each_batch(method: str, at: str, passes: int) -> None:
    client, server = toy_sides(CLASSIFICATION, 3)
    seen = []
    server.half.register_forward_hook(lambda *_: seen.append(1))
    run(method, (client, server), feedback_at=at)
    assert len(seen) == passes


def test_titles_name_what_is_not_the_papers() -> None:
    assert make_method("coef_j").full_title == "CoeF-J"
    assert make_method("coef_j", {"feedback_at": "walk"}).full_title == "CoeF-J, walk"
    assert make_method("oracle", {"feedback_at": "final"}).full_title.endswith("perfect comp.), final")
    with pytest.raises(ValueError, match="must be one of initial, walk, final, got 'end'"):
        make_method("reuse", {"feedback_at": "end"})
    with pytest.raises(ValueError, match="has no option 'feedback_at'"):
        make_method("gas", {"feedback_at": "walk"})


@pytest.mark.parametrize("at", FEEDBACK_AT)
@pytest.mark.parametrize("method", [*ONCE, "celu_vfl", "ho_sfl"])
def test_a_second_pass_trains_the_server_as_a_second_epoch_would(method: str, at: str) -> None:
    """The gradients are those of the first pass or, with "final", of the server after both."""

    def trained(epochs: int, passes: int) -> tuple[Weights, Weights, list[Tensor]]:
        sides = toy_sides(CLASSIFICATION, 3, local_epochs=epochs)
        return run(method, sides, feedback_at=at, server_passes=passes)

    (once, once_server, _), (_, epochs_server, epochs), (twice, twice_server, sent) = (
        trained(epochs, passes) for epochs, passes in ((1, 1), (2, 1), (1, 2))
    )
    assert same(twice_server, epochs_server) and not same(twice_server, once_server)
    assert same(sent, epochs) and same(twice, once) == (at != "final")


def test_tables_name_the_passes() -> None:
    walk = make_method("coef_d", {"feedback_at": "walk", "server_passes": 2})
    assert walk.full_title == "CoeF-D, walk, 2 passes"
    with pytest.raises(ValueError, match=r"server_passes=0 must be a whole number of at least 1"):
        make_method("ggn", {"server_passes": 0})
