"""A task of two topics, so small that a run of a recipe takes a second."""

from pathlib import Path

import torch
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification

from tests.support.words import words_tokenizer


def make_posts(folder: Path) -> dict[str, str]:
    """Return a model and a dataset so small that a run takes a second."""
    words = ["the", "cat", "sat", "on", "a", "mat", "dog", "ran", "far"]
    texts = [" ".join(words[(i + k) % len(words)] for k in range(4)) for i in range(24)]
    rows = Dataset.from_dict({"body": texts, "label": [i % 2 for i in range(24)]})
    rows.to_parquet(str(folder / "data" / "train.parquet"))
    rows.to_parquet(str(folder / "data" / "test.parquet"))
    config = BertConfig(
        vocab_size=15, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder / "model")
    words_tokenizer().save_pretrained(folder / "model")
    return {
        "dataset_name": str(folder / "data"),
        "model_name_or_path": str(folder / "model"),
        "output_dir": str(folder / "out"),
    }


def small(options: dict[str, str]) -> list[str]:
    fixed = {
        "num_clients": "4", "participation": "0.5", "num_rounds": "3", "warmup_rounds": "1", "max_length": "8",
        "per_device_train_batch_size": "2", "eval_steps": "2", "learning_rate": "1e-2", "use_cpu": "true",
    }  # fmt: skip
    return [part for name, value in (fixed | options).items() for part in (f"--{name}", value)] + [
        "--columns",
        "text=body",
    ]
