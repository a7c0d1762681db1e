"""MU-SplitFed: a round against its twin, and what crosses the cut."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_coefsfl.methods import make_method
from hf_coefsfl.methods.mu_splitfed import MUSplitFed, Probes
from hf_coefsfl.methods.parts.zeroth_order import Direction, two_point
from hf_coefsfl.protocol.client_side import ClientSide
from hf_coefsfl.protocol.context import RoundContext
from hf_coefsfl.protocol.loss import LossSpec
from hf_coefsfl.protocol.messages import Message, SmashedData
from hf_coefsfl.protocol.server_side import ServerSide
from hf_coefsfl.split import split_model
from tests.support.federated import images, rounds, same, texts, tiny_bert, tiny_vit, trainer, weights
from tests.support.selection import slow_except
from tests.support.slopes import double_sides, generator, run, values
from tests.support.toy import CLASSIFICATION, toy_sides

# ---- A round ----


def loss_at(client: Any, server: Any, batch: dict[str, torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
    """L(f(x; θᶜ), θˢ) of given weights, by functional calls."""
    names_c, names_s = dict(client.named_parameters()), dict(server.named_parameters())

    def loss(theta_c: Any, theta_s: Any) -> torch.Tensor:
        smashed = torch.func.functional_call(client, dict(zip(names_c, theta_c, strict=True)), kwargs={"x": batch["x"]})
        labelled = SmashedData(smashed.activations, labels={"labels": batch["labels"]})
        output = torch.func.functional_call(server, dict(zip(names_s, theta_s, strict=True)), (labelled,))
        return output.loss.detach()

    return loss


def plus(theta: Any, u: Any, scale: Any) -> list[torch.Tensor]:
    return [t + scale * part for t, part in zip(theta, u, strict=True)]


@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize("epochs", [1, 2])
def test_round_against_its_twin(per_batch: bool, epochs: int) -> None:
    """The same round written out over whole lists of weights."""
    mu, tau, rate, count = 1e-2, 2, 0.05, 3
    method = MUSplitFed(mu, tau, rate, per_batch)
    client, server = double_sides(CLASSIFICATION, count, local_epochs=epochs)
    losses = [loss_at(client.half, server.half, batch) for batch in client.batches]
    theta_c, theta_s = values(client), values(server)
    initial = theta_c

    def draw(like: Any, number: int) -> list[torch.Tensor]:
        source = client.context.generator("method", number)
        return [torch.randn(t.shape, generator=source).double() for t in like]

    total = count * epochs
    steps = [[e * count + b] for e in range(epochs) for b in range(count)]
    if not per_batch:
        steps = [[e * count + b for b in range(count)] for e in range(epochs)]
    for walked in steps:
        for number in range(1, tau + 2):
            for w in walked:
                base = theta_c if per_batch else initial
                u, v = draw(theta_c, w if per_batch else w % count), draw(theta_s, number * total + w)
                ahead = behind = base
                if number == tau + 1:
                    ahead, behind = plus(base, u, mu), plus(base, u, -mu)
                loss = losses[w % count]
                d = (loss(ahead, plus(theta_s, v, mu)) - loss(behind, plus(theta_s, v, -mu))) / (2 * mu)
                theta_s = plus(theta_s, v, -rate * d)
                if number == tau + 1:
                    theta_c = plus(theta_c, u, -rate * d)
    run(method, (client, server))
    for ours, twin in zip(values(client) + values(server), theta_c + theta_s, strict=True):
        torch.testing.assert_close(ours, twin, rtol=1e-5, atol=1e-7)  # the slope crosses the cut in float32
    assert not torch.allclose(values(client)[0], initial[0], rtol=1e-3)
    assert len(server.observed.values["loss"]) == tau * total
    assert len(server.observed.values["feedback_loss"]) == total


@pytest.mark.parametrize("per_batch", [False, True])
def test_server_passes_draw_the_masks_of_their_batch(per_batch: bool) -> None:
    """Two passes of each batch for each of τ + 1 steps, under the batch's own number in every epoch."""
    client, server = toy_sides(CLASSIFICATION, 3, local_epochs=2)
    seen: list[int] = []
    forward = server.forward

    def spy(smashed: SmashedData, batch: int) -> Any:
        seen.append(batch)
        assert torch.equal(smashed.labels["labels"], client.batches[batch]["labels"])
        return forward(smashed, batch)

    server.forward = spy  # type: ignore[method-assign]
    run(MUSplitFed(per_batch=per_batch), (client, server))
    epoch = [b for b in range(3) for _ in range(6)] if per_batch else [b for b in range(3) for _ in range(2)] * 3
    assert seen == epoch * 2


@pytest.mark.parametrize("per_batch", [False, True])
def test_transfers_and_bytes(per_batch: bool) -> None:
    """3 batches of 4 samples with 3 x 4 activations of 4 bytes, three times; int64 labels once; a float a batch."""
    link = run(MUSplitFed(per_batch=per_batch), toy_sides(CLASSIFICATION, 3))
    assert link.meter.transfers == (6 if per_batch else 2)
    assert link.meter.up == {"smashed_data": 3 * (3 * 4 * 3 * 4 * 4), "extras": 3 * 4 * 8}
    assert link.meter.down == {"gradients": 3 * 4}


def test_downlink_of_the_cost_table() -> None:
    link = run(MUSplitFed(), toy_sides(CLASSIFICATION, 32))
    assert round(link.meter.down["gradients"] / 2**20, 6) == 0.000122


def test_every_local_epoch_has_its_slope() -> None:
    link = run(MUSplitFed(), toy_sides(CLASSIFICATION, 3, local_epochs=4))
    assert link.meter.transfers == 2 and link.meter.down == {"gradients": 4 * 3 * 4}


def test_no_graph_is_ever_built() -> None:
    client, server = toy_sides(CLASSIFICATION, 2)

    def fail(t: torch.Tensor) -> torch.Tensor:
        raise AssertionError("autograd saved a tensor for a backward pass")

    with torch.autograd.graph.saved_tensors_hooks(fail, lambda t: t):
        run(MUSplitFed(), (client, server))
    assert all(p.grad is None for side in (client, server) for p in side.half.parameters())


def test_uploading_leaves_the_client_as_it_was() -> None:
    client, _ = toy_sides(CLASSIFICATION, 2)
    before = values(client)
    method = MUSplitFed()
    first, second = list(method.upload(client, None)), list(method.upload(client, None))
    assert all(torch.equal(a, b) for a, b in zip(before, values(client), strict=True))
    for a, b in zip(first, second, strict=True):
        assert isinstance(a, Probes) and isinstance(b, Probes)
        assert torch.equal(a.ahead, b.ahead) and torch.equal(a.behind, b.behind)
        assert not torch.equal(a.ahead, a.behind) and not torch.equal(a.ahead, a.activations)


def test_directions_differ_by_round_client_and_batch() -> None:
    client, _ = toy_sides(CLASSIFICATION, 2)
    drawn = []
    for round_index, number in ((0, 0), (1, 0), (0, 1)):
        for batch in (0, 1):
            setting = RoundContext(seed=0, round_index=round_index, client=number)
            drawn.append(next(iter(Direction(values(client), setting.generator("method", batch))))[1])
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[i + 1 :])


def test_both_ends_of_a_difference_see_the_same_dropout_masks() -> None:
    """With half of everything dropped, other masks would change activations by their own size."""
    split = split_model(tiny_vit(dropout=0.5), 2)
    split.client.train()
    split.server.train()
    batch = images(4)[:]
    data = [{"pixel_values": batch["pixel_values"], "labels": batch["labels"]}]
    setting = RoundContext(seed=0, round_index=0, client=0)
    task = LossSpec("ForImageClassification", 3, ("labels",))
    client = ClientSide(split.client, data, torch.optim.SGD(split.client.parameters(), lr=0.1), setting, task)
    server = ServerSide(split.server, torch.optim.SGD(split.server.parameters(), lr=0.1), setting, task)
    (probes,) = MUSplitFed(perturbation_scale=1e-6).upload(client, None)
    assert isinstance(probes, Probes)
    size = probes.activations.norm()
    assert (probes.ahead - probes.activations).norm() < 1e-3 * size
    assert 0 < (probes.behind - probes.activations).norm() < 1e-3 * size
    (seeded,) = client.exchange()
    client.context.synchronize_masks(split.client, "client_forward", 1)  # masks of another batch
    with torch.no_grad():
        other = split.client(pixel_values=batch["pixel_values"]).activations
    assert (other - seeded.activations).norm() > 0.1 * size

    parameters = list(split.server.parameters())
    with torch.no_grad():
        losses = [server.forward(probes, 0).loss for _ in range(2)]
        direction = Direction(parameters, generator(0))

        def loss() -> torch.Tensor:
            return server.forward(probes, 0).loss

        slopes = [two_point(direction, scale, loss, loss)[0].item() for scale in (3e-3, 1e-3)]
    assert torch.equal(*losses)
    assert slopes[0] == pytest.approx(slopes[1], rel=0.2)


def test_learning_rate_is_the_runs_unless_given() -> None:
    moved = []
    for rate, given in ((0.1, None), (0.2, 0.1), (0.2, None)):
        sides = toy_sides(CLASSIFICATION, 1, lr=rate)
        run(MUSplitFed(server_passes=1, learning_rate=given), sides)
        moved.append(values(sides[0]))
    assert torch.equal(moved[0][0], moved[1][0]) and not torch.equal(moved[0][0], moved[2][0])


def test_descends_over_many_rounds() -> None:
    client, server = toy_sides(CLASSIFICATION, 2)
    method = MUSplitFed(learning_rate=0.02)

    def total() -> float:
        with torch.no_grad():
            return sum(server.forward(client.smash(b), b).loss.item() for b in range(2))

    before = total()
    for index in range(40):
        client.context = server.context = RoundContext(seed=0, round_index=index, client=0)
        run(method, (client, server))
    assert total() < before - 0.2


def test_messages_of_other_methods_are_refused() -> None:
    client, _ = toy_sides(CLASSIFICATION, 1)
    with pytest.raises(ValueError, match="expected Slopes messages, got Message"):
        MUSplitFed().update(client, [Message()], None)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"perturbation_scale": 0}, r"perturbation_scale=0 must be a finite number above 0"),
        ({"perturbation_scale": float("inf")}, r"perturbation_scale=inf must be"),
        ({"server_passes": 0}, r"server_passes=0 must be a whole number of at least 1"),
        ({"server_passes": 1.5}, r"'server_passes' of method 'mu_splitfed' must be int"),
        ({"learning_rate": -1.0}, r"learning_rate=-1.0 must be a finite number above 0"),
        ({"learning_rate": "fast"}, r"must be float or None, got 'fast'"),
        ({"per_batch": 1}, r"must be bool, got 1"),
        ({"tau": 2}, r"no option 'tau'.*server_passes \(default 2\)"),
    ],
)
def test_options(kwargs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_method("mu_splitfed", kwargs)


# ---- Through the trainer ----


@pytest.mark.parametrize(
    ("kind", "per_batch"),
    slow_except(("vit", False), ("bert", True), of=[("vit", False), ("vit", True), ("bert", False), ("bert", True)]),
)
def test_trains(tmp_path: Path, kind: str, per_batch: bool) -> None:
    model, data = (tiny_vit(), images()) if kind == "vit" else (tiny_bert(dropout=0.3), texts())
    run = trainer(
        tmp_path,
        model,
        data,
        method="mu_splitfed",
        method_kwargs={"per_batch": per_batch},
        eval_dataset=None,
        warmup_rounds=1,
        num_rounds=2,
    )
    before = weights(run)
    run.train()
    warmup, round_ = rounds(run)
    tokens, masks = 3 * 12 * 5, 0
    if kind == "bert":  # padding is not sent, its pattern is
        assert run.federation is not None
        clients = [int(entry["client"]) for entry in run.ledger.entries if entry["round"] == 2]
        rows = [int(i) for client in clients for i in run.federation.partition.indices[client]]
        tokens, masks = int(data[rows]["attention_mask"].sum()), 3 * 12 * 8
        assert tokens < masks
    activations = tokens * 16 * 4
    adapters = 3 * sum(p.numel() * 4 for p in run.client_parameters.values())
    assert warmup["transfers"] == 3 * 2 * 3 and round_["transfers"] == 3 * 2 * (3 if per_batch else 1)
    assert round_["bytes_up"] == 3 * activations + 36 * 8 + masks + adapters
    assert round_["bytes_down"] == 3 * 3 * 4 + adapters
    for name in ("server_loss", "client_loss"):
        assert math.isfinite(round_[name]) and 0.5 < round_[name] < 2
    assert not same(before, weights(run))


def test_resume_is_bit_identical(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "method": "mu_splitfed",
        "method_kwargs": {"per_batch": True},
        "num_rounds": 4,
        "local_epochs": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    whole = trainer(tmp_path / "whole", **changes)
    whole.train()
    resumed = trainer(tmp_path / "resumed", **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert same(weights(whole), weights(resumed)) and rounds(whole) == rounds(resumed)
