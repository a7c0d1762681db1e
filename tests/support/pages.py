"""The code blocks of the documentation, and a folder in which they run small and offline."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from PIL import Image
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from tests.support.paths import ROOT
from tests.support.words import CHAT_TEMPLATE, WORDS, words_tokenizer

PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip
IMAGES, TEXTS, DECODER = "WinKawaks/vit-tiny-patch16-224", "distilbert/distilroberta-base", "HuggingFaceTB/SmolLM2-135M"


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in a language."""
    text = (ROOT / page).read_text()
    return [
        code for kind, code in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE) if kind == language
    ]


def languages(page: str) -> set[str]:
    """Return the languages of a page's code blocks."""
    return set(re.findall(r"^```(\w*)\n.*?^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE))


def commands(page: str) -> list[list[str]]:
    """Return the words of each command of a page, without comments and variables in front."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [_without_variables(command) for command in words if command]


def _without_variables(words: list[str]) -> list[str]:
    return words[next((i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)), 0) :]


def small_world(folder: Path) -> None:
    """Make the files and models that the pages name, each tiny and under its name on the Hub."""
    torch.manual_seed(0)
    tokenizer = words_tokenizer()
    tokenizer.model_max_length = 512
    BertForSequenceClassification(BertConfig(vocab_size=len(WORDS), **SIZES)).save_pretrained(folder / TEXTS)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), **SIZES)).save_pretrained(folder / DECODER)
    vit = ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **SIZES))
    vit.save_pretrained(folder / IMAGES)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder / IMAGES)
    tokenizer.save_pretrained(folder / TEXTS)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder / DECODER)
    rows = Dataset.from_dict(ROWS)
    rows.rename_columns({"text": "body", "name": "queue"}).to_csv(str(folder / "tickets.csv"))
    words = [{"words": text.split(), "entities": ["O", "B", "O", "O"]} for text in ROWS["text"]]
    for name in ("posts", "sentences"):
        (folder / name).mkdir()
    for split in ("train", "test"):
        rows.to_parquet(str(folder / "my_posts" / f"{split}.parquet"))
        rows.to_csv(str(folder / "posts" / f"{split}.csv"))
        (folder / "sentences" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, words)))
        for i in range(16):
            path = folder / "my_images" / split / "ab"[i % 2] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((16, 16, 3), 9 * i, np.uint8)).save(path)
    pairs = rows.rename_columns({"text": "premise", "name": "hypothesis"})
    for split in ("train", "validation_matched", "validation_mismatched"):
        pairs.to_parquet(str(folder / "pairs" / f"{split}.parquet"))
    notes = [json.dumps({"text": text, "author": name}) for text, name in zip(ROWS["text"], ROWS["name"], strict=True)]
    (folder / "notes.jsonl").write_text("\n".join(notes))
    talks = [
        {"title": name, "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": name}]}
        for text, name in zip(ROWS["text"], ROWS["name"], strict=True)
    ]
    for split in ("train", "test"):
        Dataset.from_list(talks).to_json(str(folder / "outputs" / "smol_squad" / f"{split}.jsonl"))
    (folder / "my_model").symlink_to(folder / TEXTS)
    (folder / "options.yaml").write_text("learning_rate: 1.0e-3\n")
    (folder / "my_spec.yaml").write_text(blocks("docs/comparing.md", "yaml")[0])


ROWS: dict[str, list[Any]] = {
    "text": [" ".join(WORDS[6 + (i + k) % 9] for k in range(4)) for i in range(80)],
    "name": ["cat dog"[4 * (i % 2) :][:3] for i in range(80)],
    "label": [i % 2 for i in range(80)],
}


def names_of_a_reader() -> dict[str, Any]:
    """Return what a page takes for granted: a model, data and what belongs to them."""
    tokenizer = words_tokenizer()
    encoded = Dataset.from_dict({**tokenizer(ROWS["text"]), "labels": ROWS["label"]}).select(range(48))
    collator = DataCollatorWithPadding(tokenizer)
    batch = dict(collator([encoded[i] for i in range(4)]))

    def model() -> BertForSequenceClassification:
        return BertForSequenceClassification(BertConfig(vocab_size=len(WORDS), **SIZES))

    def metrics(prediction: Any) -> dict[str, float]:
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    return {
        "model": model(), "base": model(), "fresh": model(),
        "train": encoded, "test": encoded, "collator": collator, "metrics": metrics,
        "tokenizer": tokenizer, "labels": batch.pop("labels"), "inputs": batch,
    }  # fmt: skip
