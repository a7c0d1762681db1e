"""What an upload and a report may be, and that checking them ends when their time is up."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_coefsfl.flower.checks import Declared, UploadCheck, check_observed
from hf_coefsfl.flower.link import FlowerLink
from hf_coefsfl.flower.transport import Deadline, Unanswered
from hf_coefsfl.flower.wire import Manifest, TransferError
from hf_coefsfl.methods.reuse import _observe
from hf_coefsfl.protocol.context import Observations, RoundContext
from hf_coefsfl.protocol.messages import Parameters, SmashedData
from hf_coefsfl.protocol.packing import Exchange, Store
from hf_coefsfl.protocol.wire import read_exchange, write_exchange
from hf_coefsfl.split.surgery import Cut
from tests.support.toy import CLASSIFICATION

LABELS = {"labels": torch.zeros(2, dtype=torch.int64)}
MASK, BIAS = torch.ones(2, 3, dtype=torch.bool), torch.ones(1, 4, 3, 3)
EXAMPLE = SmashedData(torch.ones(2, 3, 4), {"attention_mask": MASK, "block.bias": BIAS}, LABELS)
CUT = Cut("", 1, 2, (), {"bias": "tensor"}, ("token_type_ids",))
CHECK = UploadCheck(CLASSIFICATION, CUT, EXAMPLE, LABELS, (torch.float32,), 2, 6, token_types=2)


def upload(**context: torch.Tensor) -> SmashedData:
    return SmashedData(torch.ones(2, 5, 4), {"attention_mask": torch.ones(2, 5)} | context, LABELS)


@pytest.mark.parametrize(
    ("name", "t", "reason"),
    [
        ("my_attention_mask", torch.ones(2, 5), "nothing that crosses"),
        ("block.other", torch.ones(2, 5), "nothing that crosses"),
        ("attention_mask", torch.ones(2, 10), "has shape"),
        ("attention_mask", torch.ones(2, 1, 5, 5), "has shape"),
        ("padding", torch.ones(2, 99), "has shape"),
        ("position_ids", torch.ones(2, 1, 1, 5), "has shape"),
        ("block.bias", torch.ones(2, 4, 5, 5, 5), "has shape"),
        ("block.bias", torch.ones(2, 4, 5, 99), "has shape"),
        ("token_type_ids", torch.full((2, 5), 2), "reaches beyond the 2 types"),
        ("token_type_ids", torch.full((2, 5), -1), "reaches beyond the 2 types"),
    ],
)
def test_what_crosses_has_the_examples_form(name: str, t: torch.Tensor, reason: str) -> None:
    whole = {"token_type_ids": torch.ones(2, 5), "block.bias": torch.ones(2, 8, 6, 6), "padding": torch.ones(1, 6)}
    CHECK.sound(upload(**whole, position_ids=torch.arange(5)[None]))
    with pytest.raises(TransferError, match=f"{name} .*{reason}"):
        CHECK.sound(upload(**whole | {name: t}))


def test_little_is_read_beside_the_activations(tmp_path: Path) -> None:
    """What is read into memory before its form is known is bounded by what the model can need."""
    write_exchange(Exchange.of([upload()], Store()), tmp_path / "honest")
    read_exchange(tmp_path / "honest", SmashedData, Store(), most_beside=CHECK.most_beside())
    write_exchange(Exchange.of([upload(padding=torch.ones(2, 10**5))], Store()), tmp_path / "large")
    with pytest.raises(ValueError, match="beside its packed tensors, at most"):
        read_exchange(tmp_path / "large", SmashedData, Store(), most_beside=CHECK.most_beside())


def test_scales_are_not_beside_the_activations(tmp_path: Path) -> None:
    """A token of 4,098 features has a scale for each two of them: more than a mask takes."""
    wide, store = SmashedData(torch.ones(2, 6, 4098), {}, LABELS), Store("int4")
    write_exchange(Exchange.of([wide], store), tmp_path / "wide")
    most = 2 * 6 * 4098  # bytes, of all scales
    read_exchange(tmp_path / "wide", SmashedData, store, most_beside=most - 1)


def test_checks_end_with_the_deadline(tmp_path: Path) -> None:
    over, sent = Deadline(0.0), Exchange.of([upload()], Store())
    file = tmp_path / "file"
    file.write_bytes(b"x")
    checks: list[Callable[[Any], object]] = [
        lambda left: CHECK.exchange(sent, 1, 2, left),
        lambda left: Declared().check(sent, [0], left),
        lambda left: Manifest.of(file, left),
    ]
    for check in checks:
        check(Deadline(1000.0).left)
        with pytest.raises(Unanswered, match="no answer within"):
            check(over.left)


def test_many_batches_have_room_for_their_reports() -> None:
    """Six numbers for each batch and epoch of 10**6 batches are more than the room for names."""
    limits = list[int]()

    def step(calls: Any, payload: Any, limit: int) -> Any:
        limits.append(limit)
        raise Unanswered

    channel = SimpleNamespace(step=step, sequence=1)
    context: Any = SimpleNamespace(client=0, local_epochs=1, num_rounds=1)
    check = SimpleNamespace(batch_size=1)
    link = FlowerLink(channel, context, check, None, Parameters(), 10**6)  # type: ignore[arg-type]
    with pytest.raises(Unanswered):
        link._finish()
    assert limits[0] >= 6 * 4 * 2 * 10**6


def test_a_vanished_gradient_is_reported_with_a_number_that_is_taken() -> None:
    client: Any = SimpleNamespace(observed=Observations(), context=RoundContext(0, 0, 0))
    for size in (1e-22, 1e-38, 0.0):
        _observe(client, torch.full((2, 3), size), torch.ones(2, 3), torch.ones(2, 3))
    check_observed({"correction_ratio": torch.stack(client.observed.values["correction_ratio"])}, 3)
