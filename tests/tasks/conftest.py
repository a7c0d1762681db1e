"""A tiny language model."""

from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.words import CHAT_TEMPLATE, WORDS, words_tokenizer


@pytest.fixture
def decoder(tmp_path: Path) -> str:
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16,
        bos_token_id=4, eos_token_id=5, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "decoder")
    words_tokenizer().save_pretrained(tmp_path / "decoder")
    return str(tmp_path / "decoder")


@pytest.fixture
def talker(decoder: str) -> str:
    """The language model with a chat template."""
    tokenizer = words_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(decoder)
    return decoder
