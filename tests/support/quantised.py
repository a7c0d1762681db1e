"""Tiny models whose blocks are quantised by bitsandbytes, and twins with the same weights as floats."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, BitsAndBytesConfig, PreTrainedModel

KINDS = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
}
HEADS = ["classifier", "score", "lm_head"]


def need_bitsandbytes() -> None:
    """Skip a module of tests if bitsandbytes is not there."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'hf_coefsfl[quantized]'")


def wide_bert(seed: int = 0, dropout: float = 0.1, width: int = 64) -> BertForSequenceClassification:
    """The tiny BERT of `federated`, as wide as a block of 4-bit weights that shares a scale."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 2 * width}
    drop = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForSequenceClassification(BertConfig(vocab_size=40, **sizes, **drop, num_labels=3))


def quantised(model: PreTrainedModel, kind: str, **changes: Any) -> Any:
    """Return a model as `from_pretrained` quantises it, with its head left out unless `changes` say otherwise."""
    options = {"llm_int8_skip_modules": HEADS} | KINDS[kind] | changes
    dtype = options.pop("dtype", torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        settings = BitsAndBytesConfig(**options)
        return type(model).from_pretrained(folder, quantization_config=settings, dtype=dtype)


def dequantised(model: PreTrainedModel) -> Any:
    """Turn a quantised model, in place, into one of floats."""
    twin = model.dequantize()
    for p in twin.parameters():
        p.requires_grad_(True)
    assert not any(type(m).__name__.startswith("Linear") and type(m) is not nn.Linear for m in twin.modules())
    return twin
