"""Models that cannot be split are refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hf_coefsfl.split import split_model
from tests.support.exactness import assert_exact
from tests.support.models import BLOCKS, MODELS, PAD, VOCAB


def tiny(head: str, **options: Any) -> Any:
    model_class = getattr(transformers, head)
    torch.manual_seed(0)
    return model_class(model_class.config_class(**options))


@pytest.mark.parametrize(
    ("name", "head"), [("bart", "BartForSequenceClassification"), ("t5", "T5ForSequenceClassification")]
)
def test_classifiers_that_decode_raw_ids_are_refused(name: str, head: str) -> None:
    with pytest.raises(ValueError, match=f"{head} cannot be cut after block 2 of .*encoder-only"):
        split_model(tiny(head, **MODELS[name].options), 2)


def test_pooling_at_a_special_token_is_refused() -> None:
    """CLIP's text model looks for the end-of-text id: placeholders do not have it."""
    model = tiny("CLIPTextModelWithProjection", **MODELS["bert"].options)
    with pytest.raises(ValueError, match=r"outputs differ by .* of the largest"):
        split_model(model, 2)


@pytest.mark.parametrize(
    ("name", "field"), [("wav2vec2", "layerdrop"), ("opt", "layerdrop"), ("bart", "encoder_layerdrop")]
)
def test_layer_drop_is_refused(name: str, field: str) -> None:
    with pytest.raises(ValueError, match=rf"config\.{field} is 0\.1.*{field}=0\.0"):
        split_model(MODELS[name].make(**{field: 0.1}), 2)


def test_layer_drop_of_the_decoder_is_the_servers_own() -> None:
    entry = MODELS["bart"]
    model = entry.make(decoder_layerdrop=0.5)
    assert_exact(model, split_model(model, 2), entry.batch())


def test_dropout_before_the_blocks_that_both_halves_need_is_reported() -> None:
    options = {"vocab_size": VOCAB, "d_model": 32, "n_layer": BLOCKS, "n_head": 4, "d_inner": 48, "pad_token_id": PAD}
    with pytest.warns(UserWarning, match="XLNetForSequenceClassification draws random numbers.*dropout 0"):
        split_model(tiny("XLNetForSequenceClassification", **options), 2)
    model = tiny("XLNetForSequenceClassification", **options, dropout=0.0, summary_last_dropout=0.0, num_labels=3)
    assert_exact(model, split_model(model, 2), MODELS["bert"].batch())


def test_models_whose_input_is_unknown_ask_for_an_example() -> None:
    model = MODELS["bert"].make()
    batch = {key: t for key, t in MODELS["bert"].batch().items() if key != "labels"}
    type(model).main_input_name, name = "mystery", type(model).main_input_name
    try:
        with pytest.raises(ValueError, match=r"'mystery' of BertForSequenceClassification.*example_inputs"):
            split_model(model, 2)
        assert_exact(model, split_model(model, 2, example_inputs=batch), MODELS["bert"].batch())
    finally:
        type(model).main_input_name = name


def test_an_example_that_does_not_run_is_reported() -> None:
    with pytest.raises(ValueError, match=r"could not run on an example with \['input_ids'\].*example_inputs"):
        split_model(MODELS["bert"].make(), 2, example_inputs={"input_ids": torch.full((1, 3), 10**6)})


def test_modules_without_a_config_are_refused() -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(4)))
    with pytest.raises(ValueError, match="has no config: expected a transformers PreTrainedModel"):
        split_model(nn.Sequential(blocks), 2)


def test_blocks_that_run_more_than_once_are_refused() -> None:
    model = MODELS["bert"].make()
    layers = model.bert.encoder.layer
    original = layers[3].forward
    layers[3].forward = lambda hidden, *args, **kwargs: layers[2](original(hidden, *args, **kwargs), *args, **kwargs)
    with pytest.raises(ValueError, match=r"ran 2 times in one forward pass.*blocks="):
        split_model(model, 2)
