"""AccSFL: a round against plain torch code, its head, and what crosses the cut."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_coefsfl.methods import AccSFL
from hf_coefsfl.methods.parts.auxiliary import AuxiliaryHead
from hf_coefsfl.protocol.link import LocalLink
from hf_coefsfl.protocol.loss import LossSpec
from tests.support.federated import CLASSES, images, rounds, same, trainer, weights
from tests.support.toy import CAUSAL, CLASSIFICATION, MULTI_LABEL, REGRESSION, SPANS, TOKENS, toy_sides


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
    assert same(before, method.state_dict()), "the shared head may change in the average only"
    assert not same(before, {**before, **client.kept})
    assert client.kept.keys() == method.federated().keys()


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


def test_acc_sfl_learns(tmp_path: Path) -> None:
    run = trainer(tmp_path, method="acc_sfl", num_rounds=8, participation=1.0, eval_dataset=images(24, seed=1))
    before = run.evaluate()["eval_loss"]
    run.train()
    losses = [entry["client_loss"] for entry in rounds(run)]
    assert losses[-1] < losses[1] and run.evaluate()["eval_loss"] < before - 0.05
