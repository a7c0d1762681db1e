"""A tiny language model."""

from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.words import WORDS, words_tokenizer


@pytest.fixture
def decoder(tmp_path: Path) -> str:
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16,
        bos_token_id=4, eos_token_id=5, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "decoder")
    words_tokenizer().save_pretrained(tmp_path / "decoder")
    return str(tmp_path / "decoder")
