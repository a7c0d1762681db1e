"""A client of a deployment that sends well-formed numbers which are wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

from hf_coefsfl.federation.simulation import Simulation
from hf_coefsfl.flower.checks import Declared
from hf_coefsfl.flower.wire import TransferError, chunk_of, content, has_chunk, header_of
from hf_coefsfl.protocol.messages import SmashedData
from hf_coefsfl.protocol.packing import Exchange, Store
from tests.support.deployed import Site
from tests.support.federated import same, weights
from tests.support.forged import forged, reply_with

HOSTILE = 102  # the node of the third client


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("three"), sizes=(4, 5, 3))


def alone(site: Site, rounds: int, **options: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a simulation in which the third client never takes part."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Simulation, "_is_dropped", lambda self, round_index, client: client == 2)
        return weights(site.simulated(num_rounds=rounds, **options))


def sends(message: Message, node: int, sequence: int) -> bool:
    return (
        node == HOSTILE
        and message.metadata.message_type == "train.step"
        and header_of(message.content)["sequence"] == sequence
    )


def test_huge_adapters_are_refused(three: Site) -> None:
    """Adapters of 3e38 are finite. They cost their client the round, and nobody else any."""

    def huge(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({n: torch.full_like(t, 3e38) for n, t in tensors.items() if n.startswith("0.adapters.")})

    def fault(node: int, message: Message, reply: Message) -> Message:
        return reply_with(message, reply, huge) if sends(message, node, 1) else reply

    trainer, _ = three.deployed(fault)
    assert same(weights(trainer), alone(three, 2, client_bound=0.0))
    failures = [(e["round"], e["client"], e["failure"]) for e in trainer.ledger.entries if "failure" in e]
    assert failures == [(number, "2", "the size of its client update is not finite") for number in (1, 2)]


def test_a_client_is_weighted_by_samples_that_it_has_sent(three: Site) -> None:
    def fault(node: int, message: Message, reply: Message) -> Message:
        if node != HOSTILE or "num_samples" not in header_of(reply.content):
            return reply
        records = reply.content
        chunk = chunk_of(records) if has_chunk(records) else None
        return forged(message, reply, content(header_of(records) | {"num_samples": 900}, chunk))

    trainer, _ = three.deployed(fault, num_rounds=1)
    assert same(weights(trainer), alone(three, 1))
    (failure,) = [e["failure"] for e in trainer.ledger.entries if "failure" in e]
    assert failure == "TransferError: the client says it has 900 samples, and has sent 3"


def test_a_large_update_counts_for_five(three: Site, caplog: pytest.LogCaptureFixture) -> None:
    def fault(node: int, message: Message, reply: Message) -> Message:
        return reply_with(message, reply, larger) if sends(message, node, 1) else reply

    def larger(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({n: 1e6 * t for n, t in tensors.items() if n.startswith("0.adapters.")})

    trainer, _ = three.deployed(fault, num_rounds=1)
    entries = json.loads((Path(str(trainer.args.output_dir)) / "communication.json").read_text())["entries"]
    (bounded,) = [entry for entry in entries if "bounded" in entry]
    assert bounded["client"] == "2" and bounded["bounded"]["client update"] < 1e-4
    assert "Round 1, client 2: client update" in caplog.text
    assert all(t.abs().max() < 10 for t in weights(trainer).values())


def test_statistics_of_huge_activations_are_not_kept(three: Site) -> None:
    """Statistics of classes last for the run: one upload of 1e18 would spoil what is drawn from them in every round."""

    def fault(node: int, message: Message, reply: Message) -> Message:
        return reply_with(message, reply, larger) if sends(message, node, 0) else reply

    def larger(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({n: torch.full_like(t, 1e15) for n, t in tensors.items() if n.endswith("activations")})

    trainer, _ = three.deployed(fault, method="gas", num_rounds=1)
    state = trainer.rounds.method.state_dict()  # type: ignore[union-attr]
    assert state and all(t.abs().max() < 100 for t in state.values())


def test_labels_that_change_within_a_round_are_refused(three: Site) -> None:
    """Batch 0 of two comes again in the second epoch, with the other label."""

    def fault(node: int, message: Message, reply: Message) -> Message:
        return reply_with(message, reply, flipped) if sends(message, node, 2) else reply

    def flipped(tensors: dict[str, torch.Tensor]) -> None:
        tensors["0.labels.labels"] = 1 - tensors["0.labels.labels"]

    options = {"method": "vanilla", "local_epochs": 2}
    trainer, _ = three.deployed(fault, num_rounds=1, **options)
    failures = [(e["client"], e["failure"]) for e in trainer.ledger.entries if "failure" in e]
    assert failures == [("2", "TransferError: batch 0 has other labels, masks or shapes than at first")]
    assert same(weights(trainer), alone(three, 1, **options))


def smashed(**changes: Any) -> SmashedData:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    context = {"attention_mask": mask, "bias": torch.ones(1, 3, 3)} | changes.pop("context", {})
    made = {"labels": {"labels": torch.tensor([0, 1])}, "shapes": {"input_ids": (2, 3)}} | changes
    return SmashedData(changes.pop("activations", torch.randn(2, 3, 4)), context, made["labels"], made["shapes"])


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": {"labels": torch.tensor([1, 1])}},
        {"shapes": {"input_ids": (2, 4)}},
        {"activations": torch.randn(1, 3, 4)},
        {"context": {"attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}},
        {"context": {"bias": torch.ones(1, 3, 2)}},
        {"context": {"position_ids": torch.tensor([[0, 1, 2]])}},
    ],
)
def test_what_is_declared_stays(changes: dict[str, Any]) -> None:
    """What depends on the weights may change: activations, and a bias that crosses the cut."""
    declared, store = Declared(), Store()
    declared.check(Exchange.of([smashed(), smashed(labels={"labels": torch.tensor([1, 0])})], store), range(2))
    declared.check(Exchange.of([smashed(context={"bias": torch.zeros(1, 3, 3)})], store), [0])
    with pytest.raises(TransferError, match="batch 0 has other"):
        declared.check(Exchange.of([smashed(**changes)], store), [0])
