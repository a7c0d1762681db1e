"""Halves that were damaged or made to do harm are refused, each with one sentence."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_coefsfl.split import load_client, split_model
from tests.support.models import MODELS

EMBEDDING = "bert.embeddings.word_embeddings.weight"


@pytest.fixture
def half(tmp_path: Path) -> Path:
    split_model(MODELS["bert"].make(), 2).client.save_pretrained(tmp_path)
    return tmp_path


def describe(half: Path, **changes: Any) -> None:
    description = json.loads((half / "split.json").read_text())
    cut = description["cut"] | changes.pop("cut", {})
    (half / "split.json").write_text(json.dumps(description | {"cut": cut} | changes))


def change(half: Path, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(half / "model.safetensors")
    tensors[EMBEDDING] = edit(tensors[EMBEDDING]).contiguous()
    save_file(tensors, half / "model.safetensors")


def refused(half: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as failed:
        load_client(half)
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t[:-1], r"is torch.float32 of shape \(\d+, \d+\), and the model of config.json needs .* of shape"),
        (lambda t: t.T, "word_embeddings.weight in model.safetensors is torch.float32 of shape"),
        (lambda t: t.long(), "is torch.int64 of shape"),
        (lambda t: t.index_fill(0, torch.tensor(3), math.nan), "holds NaN or infinity. Copy or write the half anew"),
        (lambda t: t.index_fill(0, torch.tensor(3), -math.inf), "holds NaN or infinity"),
    ],
    ids=["fewer rows", "transposed", "integers", "NaN", "infinity"],
)
def test_weights(half: Path, edit: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    change(half, edit)
    refused(half, message)


@pytest.mark.parametrize("index", [0, -1, 4, 2**40, 1.5, True, None, "2"])
def test_a_cut_outside_the_model(half: Path, index: Any) -> None:
    describe(half, cut={"index": index})
    refused(half, r"split.json has the cut .* of 4 blocks, and the model has 4: a cut is a number 1..3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cut": {"num_blocks": 9}}, "has the cut 2 of 9 blocks, and the model has 4"),
        ({"cut": {"blocks": "bert.nowhere"}}, "names the blocks 'bert.nowhere', which the model does not have"),
        ({"cut": {"templates": None}}, "split.json cannot be read"),
        ({"cut": {"more": 1}}, "split.json cannot be read"),
        ({"attention": "nonsense"}, r"names the attention implementation 'nonsense'. Choose one of: eager, .*sdpa"),
        ({"attention": "someone/kernel"}, "names the attention implementation 'someone/kernel'"),  # code of the Hub
        ({"attention": {"text": "sdpa"}}, "names the attention implementation"),
        ({"parameters": ["no.such"]}, "names 'no.such', which BertForSequenceClassification does not have"),
    ],
)
def test_descriptions(half: Path, changes: dict[str, Any], message: str) -> None:
    describe(half, **changes)
    refused(half, message)


@pytest.mark.parametrize("content", ["", "[]", "null", "{}", '{"format": 1}', "\xff"])
def test_files_that_are_no_descriptions(half: Path, content: str) -> None:
    (half / "split.json").write_text(content)
    refused(half, "split.json cannot be read .* Copy or write the half anew")


def test_weights_that_break_off(half: Path) -> None:
    file = half / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(half, "model.safetensors cannot be read .* Copy or write the half anew")
