"""The halves are exact for other inputs than the ones they were calibrated with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from hf_coefsfl.split import split_model
from tests.support.exactness import assert_exact
from tests.support.models import MODELS, PAD


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "bert", "roberta-qa", "falcon-alibi"])
def test_any_length_padding_side_and_positions(name: str) -> None:
    entry = MODELS[name]
    model, batch = entry.make(), entry.batch()
    split = split_model(model, 2)
    flipped = batch | {key: batch[key].flip(1) for key in ("input_ids", "attention_mask")}
    assert_exact(model, split, flipped)
    assert_exact(model, split, {key: t for key, t in batch.items() if key != "attention_mask"})
    longer = batch | {key: torch.cat([batch[key]] * 3, 1) for key in ("input_ids", "attention_mask")}
    assert_exact(model, split, longer)
    if name in ("gpt2", "llama", "bert"):
        positions = torch.arange(9).flip(0).expand(3, 9)
        assert_exact(model, split, batch | {"position_ids": positions})
        with_default, with_reversed = split.client(**batch), split.client(**batch, position_ids=positions)
        assert not torch.equal(with_default.activations, with_reversed.activations)


def test_padding_id_inside_the_text() -> None:
    """GPT-2 pads with its end-of-text id; a classifier pools at the last other token."""
    entry = MODELS["gpt2"]
    model, batch = entry.make(eos_token_id=PAD), entry.batch()
    split = split_model(model, 2)
    assert "padding" not in split.client(**batch).context
    batch["input_ids"][0, -1] = PAD  # a token of the text, not padding
    smashed = split.client(**batch)
    assert smashed.context["padding"].dtype == torch.bool
    assert_exact(model, split, batch)
    split.eval()
    without = replace(smashed, context={"attention_mask": smashed.context["attention_mask"]})
    assert not torch.equal(split.server(smashed).logits, split.server(without).logits), "the pattern must matter"


def test_a_batch_of_one_without_a_padding_id() -> None:
    entry = MODELS["llama"]
    model, batch = entry.make(pad_token_id=None), {key: t[:1] for key, t in entry.batch().items()}
    assert_exact(model, split_model(model, 2), batch)


def test_token_types_stay_with_the_client() -> None:
    model, batch = MODELS["bert"].make(), MODELS["bert"].batch()
    batch["token_type_ids"] = (torch.arange(9) > 4).long().expand(3, 9)
    split = split_model(model, 2)
    assert_exact(model, split, batch)
    assert set(split.client(**batch).context) == {"attention_mask"}


@pytest.mark.parametrize("name", ["swin", "swinv2", "vit", "dinov2", "deit", "beit", "beit-shared"])
def test_other_image_sizes_than_calibrated(name: str) -> None:
    entry = MODELS[name]
    model, batch = entry.make(), entry.batch()
    side = 2 * batch["pixel_values"].shape[-1]
    other = batch | {"pixel_values": torch.randn(3, 3, side, side + side // 2)}
    if name != "dinov2":
        other["interpolate_pos_encoding"] = True
    assert_exact(model, split_model(model, 2), other)


class ScalingEncoder(nn.Module):
    """A loop that changes the hidden state between its blocks."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.layer = encoder.layer

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> Any:
        for layer in self.layer:
            hidden_states = layer(1.5 * hidden_states, attention_mask)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden_states)


def test_what_happens_between_blocks_happens_once() -> None:
    """The smashed data is the input of the block at the cut, not the output of the one before."""
    model, batch = MODELS["bert"].make(), MODELS["bert"].batch()
    model.bert.encoder = ScalingEncoder(model.bert.encoder)
    assert_exact(model, split_model(model, 2), batch)


def test_no_labels_no_loss() -> None:
    entry = MODELS["bert"]
    model, batch = entry.make().eval(), entry.batch()
    labels = batch.pop("labels")
    split = split_model(model, 2)
    smashed = split.client(**batch)
    assert smashed.labels == {}
    assert split.server(smashed).loss is None
    assert torch.equal(split.server(smashed, labels=labels).loss, model(**batch, labels=labels).loss)


def test_later_labels_win() -> None:
    entry = MODELS["bert"]
    model, batch = entry.make().eval(), entry.batch()
    split = split_model(model, 2)
    other = (batch["labels"] + 1) % 3
    smashed = split.client(**batch)
    assert torch.equal(smashed.labels["labels"], batch["labels"])
    assert torch.equal(split.server(smashed, labels=other).loss, model(**(batch | {"labels": other})).loss)
