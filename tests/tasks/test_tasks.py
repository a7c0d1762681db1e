"""The tasks on real rows, if they are available, and on hand-made ones."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as Pictures
from transformers import EvalPrediction, ViTConfig, ViTForImageClassification, ViTImageProcessor

from hf_coefsfl.tasks import TASKS
from hf_coefsfl.tasks.causal_lm import encode_completion, perplexity, token_sums
from tests.support.real import real
from tests.support.task_arguments import arguments
from tests.support.words import WORDS, words_tokenizer


def test_hub_ids_and_columns() -> None:
    found = {name: (task.dataset_name, task.dataset_config_name) for name, task in TASKS.items() if task.dataset_name}
    assert found == {
        "mnli": ("nyu-mll/glue", "mnli"),
        "newsgroups": ("SetFit/20_newsgroups", None),
        "squad_v2": ("rajpurkar/squad_v2", None),
        "cifar100": ("uoft-cs/cifar100", None),
        "food101": ("ethz/food101", None),
        "tiny_imagenet": ("zh-plus/tiny-imagenet", None),
        "causal_lm": ("trl-lib/tldr", None),
        "digits": ("digits", None),
    }
    assert TASKS["cifar100"].columns == {"image": "img", "label": "fine_label"}
    assert arguments("newsgroups").max_length == 256
    assert (arguments("squad_v2").max_length, arguments("squad_v2").stride) == (384, 128)
    assert TASKS["mnli"].model_name_or_path == "distilbert/distilroberta-base"
    assert TASKS["tiny_imagenet"].model_name_or_path == "WinKawaks/vit-tiny-patch16-224"


# ---- Text ----


@pytest.mark.slow
def test_nli_on_real_rows() -> None:
    task = TASKS["mnli"](
        arguments(
            "mnli",
            dataset_name=real("data/sick_nli"),
            model_name_or_path=real("models/granite-30m-roberta"),
            max_train_samples=20,
            max_eval_samples=10,
        )
    )
    prepared = task.prepare(seed=0)
    assert prepared.model.config.id2label == {0: "entailment", 1: "neutral", 2: "contradiction"}
    assert prepared.model.dtype == torch.float32
    row, raw = prepared.train_dataset[0], task._raw_splits()["train"][0]
    text = prepared.processing_class.decode(row["input_ids"], skip_special_tokens=True)
    assert raw["premise"] in text and raw["hypothesis"] in text and row["labels"] == raw["label"]
    names = list(prepared.eval_dataset)
    assert names == ["validation"] and task.scores({"eval_accuracy": 0.5}, names) == {"accuracy": 50.0}
    both = {"eval_matched_accuracy": 0.25, "eval_mismatched_accuracy": 0.75}
    assert task.scores(both, ["matched", "mismatched"]) == {"accuracy (matched)": 25.0, "accuracy (mismatched)": 75.0}
    own = TASKS["mnli"](arguments("mnli"))
    assert own.scores(both, ["matched", "mismatched"]) == {"MNLI-m": 25.0, "MNLI-mm": 75.0}


@pytest.mark.slow
def test_newsgroups_on_real_rows() -> None:
    task = TASKS["newsgroups"](
        arguments(
            "newsgroups",
            dataset_name=real("data/20newsgroups"),
            model_name_or_path=real("models/granite-30m-roberta"),
            max_train_samples=30,
            max_eval_samples=30,
        )
    )
    prepared = task.prepare(seed=0)
    lengths = [len(row["input_ids"]) for row in prepared.train_dataset]
    assert max(lengths) == 256 and min(lengths) < 256
    assert prepared.model.num_labels == 20 and list(prepared.eval_dataset) == ["test"]
    batch = prepared.data_collator([prepared.train_dataset[i] for i in range(3)])
    assert batch["input_ids"].shape == (3, max(lengths[:3]))
    scored = prepared.compute_metrics(EvalPrediction(np.array([1, 2, 3, 4]), np.array([1, 2, 0, 0])))
    assert scored == {"accuracy": 0.5}


@pytest.mark.slow
def test_length_beyond_the_model() -> None:
    options = {"model_name_or_path": real("models/granite-30m-roberta"), "max_length": 100_000}
    with pytest.raises(ValueError, match=r"max_length=100000: the tokenizer of .* allows 2 to 512 tokens"):
        TASKS["newsgroups"](arguments("newsgroups", **options)).load_processor()


# ---- Questions ----


@pytest.mark.slow
def test_squad_on_real_rows() -> None:
    options = {"dataset_name": real("data/squad_v2_half_dev"), "max_train_samples": 40, "max_eval_samples": 25}
    task = TASKS["squad_v2"](
        arguments("squad_v2", model_name_or_path=real("models/granite-30m-roberta"), **options), keep="title"
    )
    prepared = task.prepare(seed=0)
    raw = task._raw_splits()
    assert set(prepared.train_dataset["title"]) == set(raw["train"]["title"])  # a client for each article is possible
    features = prepared.eval_dataset["validation"]
    # Logits that point at the labels: every answer is found, every question without one is left without.
    length = max(map(len, features["input_ids"]))
    start, end = np.zeros((2, len(features), length))
    start[range(len(features)), features["start_positions"]] = 9
    end[range(len(features)), features["end_positions"]] = 9
    scored = prepared.compute_metrics(EvalPrediction((start, end), None))
    assert scored["exact"] == scored["f1"] == 100 and scored["total"] == 25
    assert task.scores({"eval_exact": 12.5, "eval_f1": 20.0}, ["validation"]) == {"EM": 12.5, "F1": 20.0}
    with pytest.raises(ValueError, match="evaluates one split, got a, b"):
        task.build(raw["train"], {"a": raw["train"], "b": raw["train"]}, None)


# ---- Images ----


@pytest.mark.slow
def test_cifar_on_real_rows() -> None:
    options = {"dataset_name": real("data/cifar100_small"), "max_train_samples": 12, "max_eval_samples": 6}
    task = TASKS["cifar100"](arguments("cifar100", model_name_or_path=real("models/vit-micro"), **options))
    prepared = task.prepare(seed=0)
    assert prepared.model.num_labels == 100 and prepared.model.config.id2label[0] == "apple"
    rows = [prepared.train_dataset[i] for i in range(4)]
    batch = prepared.data_collator(rows)
    assert batch["pixel_values"].shape == (4, 3, 32, 32) and batch["labels"].tolist() == [r["labels"] for r in rows]
    pixels = torch.tensor(np.asarray(rows[0]["image"])).permute(2, 0, 1) / 127.5 - 1  # [0, 255] to [-1, 1]
    torch.testing.assert_close(batch["pixel_values"][0], pixels, atol=1e-5, rtol=0)


def test_augmentation_follows_the_random_state(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (6, 16, 16, 3), dtype=np.uint8)
    pictures = []
    for values in noise:
        file = io.BytesIO()
        Pictures.fromarray(values).save(file, "PNG")
        pictures.append({"bytes": file.getvalue(), "path": None})
    features = Features({"image": Image(), "label": ClassLabel(names=["a", "b"])})
    rows = Dataset.from_dict({"image": pictures, "label": [0, 1] * 3}, features=features)
    config = ViTConfig(
        image_size=16, patch_size=8, hidden_size=8, num_hidden_layers=3, num_attention_heads=1, intermediate_size=8
    )
    folder = str(tmp_path / "vit")
    ViTForImageClassification(config).save_pretrained(folder)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
    task = TASKS["food101"](arguments("food101", model_name_or_path=folder, augment=True))
    prepared = task.build(rows, {"validation": rows}, task.load_processor())

    def pixels(seed: int, dataset: Any) -> torch.Tensor:
        torch.manual_seed(seed)
        return prepared.data_collator([dataset[i] for i in range(6)])["pixel_values"]

    train, evaluated = prepared.train_dataset, prepared.eval_dataset["validation"]
    assert torch.equal(pixels(0, train), pixels(0, train)) and not torch.equal(pixels(0, train), pixels(1, train))
    assert torch.equal(pixels(0, evaluated), pixels(1, evaluated))  # evaluation sees the images as they are
    assert train.with_format(None)["labels"][:] == [0, 1] * 3  # the partition reads labels without touching images


# ---- Language models ----


def test_loss_on_completions_only() -> None:
    ids, labels = encode_completion(words_tokenizer(), "the cat", "sat on a mat", 32)
    at = {word: i for i, word in enumerate(WORDS)}
    tail = [at[word] for word in ("sat", "on", "a", "mat", "</s>")]
    assert ids == [at["<s>"], at["the"], at["cat"], *tail] and labels == [-100, -100, -100, *tail]
    ids, labels = encode_completion(words_tokenizer(), "", "sat on a mat", 3)
    assert ids == [at["<s>"], at["sat"], at["on"]] and labels == [-100, at["sat"], at["on"]]


def test_perplexity_counts_every_token_once() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    labels[0, :3] = -100
    sums = token_sums(logits, labels)
    losses = [
        -logits[b, t].log_softmax(-1)[labels[b, t + 1]].item()
        for b in range(2)
        for t in range(4)
        if labels[b, t + 1] != -100
    ]
    assert sums[:, 1].tolist() == [2, 4] and len(losses) == 6
    found = perplexity(EvalPrediction(sums.numpy(), None))
    assert found["perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)


def test_causal_lm_leaves_out_what_has_no_completion(decoder: str) -> None:
    features = Features({"prompt": Value("string"), "completion": Value("string"), "who": Value("string")})
    rows = Dataset.from_dict(
        {"prompt": ["the cat", "the dog " * 20], "completion": ["sat", "ran far"], "who": ["ann", "bob"]}, features
    )
    task = TASKS["causal_lm"](arguments("causal_lm", model_name_or_path=decoder, max_length=16), keep="who")
    prepared = task.build(rows, {"dev": rows}, task.load_processor())
    assert prepared.train_dataset["who"][:] == ["ann"]  # the other's completion lies beyond the length
    sample = prepared.train_dataset.remove_columns("who")[0]  # as the trainer does
    batch = prepared.data_collator([sample, sample])
    assert batch["labels"].shape == batch["input_ids"].shape == (2, 5)
    output = prepared.model(**batch)
    sums = token_sums(output.logits, batch["labels"])
    assert sums[:, 1].tolist() == [2, 2]
    assert (sums[:, 0].sum() / sums[:, 1].sum()).item() == pytest.approx(output.loss.item(), rel=1e-5)
