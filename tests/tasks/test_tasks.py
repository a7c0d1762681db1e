"""The tasks on real rows where they lie beside the clone, and on hand-made ones."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value, load_dataset
from PIL import Image as Pictures
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    EvalPrediction,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from hf_coefsfl.tasks import TASKS
from hf_coefsfl.tasks.causal_lm import encode_completion, perplexity, token_sums
from hf_coefsfl.tasks.loading import load_splits, pick, with_class_labels
from tests.support.real import real
from tests.support.words import WORDS, words_tokenizer


def arguments(name: str, **options: Any) -> Any:
    return TASKS[name].arguments_class(**options)


@pytest.fixture
def decoder(tmp_path: Path) -> str:
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16,
        bos_token_id=4, eos_token_id=5, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "decoder")
    words_tokenizer().save_pretrained(tmp_path / "decoder")
    return str(tmp_path / "decoder")


def test_hub_ids_and_columns() -> None:
    found = {name: (task.dataset_name, task.dataset_config_name) for name, task in TASKS.items()}
    assert found == {
        "mnli": ("nyu-mll/glue", "mnli"),
        "newsgroups": ("SetFit/20_newsgroups", None),
        "squad_v2": ("rajpurkar/squad_v2", None),
        "cifar100": ("uoft-cs/cifar100", None),
        "food101": ("ethz/food101", None),
        "tiny_imagenet": ("zh-plus/tiny-imagenet", None),
        "causal_lm": ("trl-lib/tldr", None),
    }
    assert TASKS["cifar100"].columns == {"image": "img", "label": "fine_label"}
    assert arguments("newsgroups").max_length == 256
    assert (arguments("squad_v2").max_length, arguments("squad_v2").stride) == (384, 128)
    assert TASKS["mnli"].model_name_or_path == "distilbert/distilroberta-base"
    assert TASKS["tiny_imagenet"].model_name_or_path == "WinKawaks/vit-tiny-patch16-224"


# ---- Loading ----


def test_local_files(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]})
    rows.to_csv(str(tmp_path / "rows.csv"))
    rows.to_json(str(tmp_path / "rows.jsonl"))
    rows.to_parquet(str(tmp_path / "folder" / "test.parquet"))
    DatasetDict({"dev": rows}).save_to_disk(str(tmp_path / "saved"))
    for name, split in (("rows.csv", "train"), ("rows.jsonl", "train"), ("folder", "test"), ("saved", "dev")):
        splits = load_splits(str(tmp_path / name))
        assert list(splits) == [split] and splits[split]["text"][:] == ["a", "b"]


def test_image_folder(tmp_path: Path) -> None:
    for i, kind in enumerate(("cat", "dog")):
        for split in ("train", "test"):
            (tmp_path / split / kind).mkdir(parents=True)
            Pictures.new("RGB", (8, 8), (i * 255, 0, 0)).save(tmp_path / split / kind / "0.png")
    raw = TASKS["cifar100"](arguments("cifar100", dataset_name=str(tmp_path)))._raw_splits()
    train, _, names = with_class_labels(raw["train"], {"test": raw["test"]})
    assert names == ["cat", "dog"] and sorted(train["labels"]) == [0, 1]
    assert train[0]["image"].getpixel((0, 0)) == (train[0]["labels"] * 255, 0, 0)


def test_dataset_that_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"'nobody/nothing' cannot be loaded from the Hub.*--dataset_name takes"):
        load_splits("nobody/nothing")


def test_columns_are_mapped() -> None:
    rows = Dataset.from_dict({"first": ["a"], "text": ["b"], "label": [0]})
    roles = {"text": "first", "label": "fine_label"}
    picked = pick(rows.remove_columns("text"), roles, {"text"}, ())
    assert picked.column_names == ["text", "label"] and picked[0] == {"text": "a", "label": 0}
    with pytest.raises(ValueError, match=r"no column 'body' for the text, only first, text, label.*--columns text="):
        pick(rows, {"text": "body", "label": "label"}, {"text"}, ())
    with pytest.raises(ValueError, match=r"columns='txt=a' is not role=column. The roles here are text, label"):
        TASKS["newsgroups"](arguments("newsgroups", columns=["txt=a"]))


def test_labels_of_all_kinds() -> None:
    numbers = Dataset.from_dict({"label": [2, 0, -1]})
    train, evals, names = with_class_labels(numbers, {"dev": Dataset.from_dict({"label": [3]})})
    assert train["labels"][:] == [2, 0] and evals["dev"]["labels"][:] == [3] and names == ["0", "1", "2", "3"]
    train, evals, names = with_class_labels(
        Dataset.from_dict({"label": ["spam", "ham"]}), {"dev": Dataset.from_dict({"label": ["ham"]})}
    )
    assert train["labels"][:] == [1, 0] and evals["dev"]["labels"][:] == [0] and names == ["ham", "spam"]
    with pytest.raises(ValueError, match="No row has a label"):
        with_class_labels(Dataset.from_dict({"label": [-1]}), {})
    with pytest.raises(ValueError, match="labels are of several kinds: int, str"):
        with_class_labels(numbers, {"dev": Dataset.from_dict({"label": ["ham"]})})
    hidden = Dataset.from_dict({"label": [-1]})
    with pytest.raises(ValueError, match="No row of test has a label"):
        with_class_labels(numbers, {"test": hidden})


@pytest.mark.parametrize("kind", ["strings", "numbers", "classes", "other classes"])
def test_labels_of_a_client_with_few_classes(kind: str) -> None:
    """Where the model's classes are known, a client's labels are matched with them by name."""
    names, mine = ["ham", "junk", "spam"], ["spam", "ham", "spam"]
    numbers = [names.index(name) for name in mine]
    rows = {
        "strings": Dataset.from_dict({"label": mine}),
        "numbers": Dataset.from_dict({"label": numbers}),
        "classes": Dataset.from_dict({"label": numbers}, Features(label=ClassLabel(names=names))),
        "other classes": Dataset.from_dict({"label": [0, 1, 0]}, Features(label=ClassLabel(names=["spam", "ham"]))),
    }[kind]
    train, evals, found = with_class_labels(rows, {"none": rows.select([])}, names)
    assert train["labels"][:] == numbers and len(evals["none"]) == 0 and found == names


@pytest.mark.parametrize("label", ["eggs", 3])
def test_a_label_that_the_model_does_not_know(label: Any) -> None:
    with pytest.raises(ValueError, match="none of the model's 3: ham, junk, spam"):
        with_class_labels(Dataset.from_dict({"label": [label]}), {}, ["ham", "junk", "spam"])


@pytest.mark.parametrize("task", ["squad_v2", "causal_lm"])
def test_sides_that_lack_the_others_rows(task: str, tmp_path: Path, decoder: str) -> None:
    """A client has nothing to evaluate on, a server nothing to train on."""
    answers = {"text": ["cat"], "answer_start": [4]}
    question = {"id": "1", "context": "the cat sat on a mat", "question": "the dog", "answers": answers}
    row = question if task == "squad_v2" else {"prompt": "the cat", "completion": "sat on a mat"}
    for split in ("train", "validation"):
        (tmp_path / split).mkdir()
        Dataset.from_list([row]).to_parquet(str(tmp_path / split / f"{split}.parquet"))
    model = decoder
    if task == "squad_v2":
        config = BertConfig(vocab_size=15, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        BertForQuestionAnswering(config).save_pretrained(tmp_path / "model")
        words_tokenizer().save_pretrained(tmp_path / "model")
        model = str(tmp_path / "model")
    options = {"model_name_or_path": model, "max_length": 16} | ({"stride": 4} if task == "squad_v2" else {})
    made = {
        split: TASKS[task](arguments(task, dataset_name=str(tmp_path / split), **options)).prepare(
            0, train=split == "train", evaluation=split != "train"
        )
        for split in ("train", "validation")
    }
    assert len(made["train"].train_dataset) == 1 and len(made["validation"].train_dataset) == 0
    assert len(made["validation"].eval_dataset["validation"]) == 1


def test_string_labels_of_files(tmp_path: Path) -> None:
    """CSV and what pandas writes come as another kind of strings, and with empty cells."""
    (tmp_path / "rows.csv").write_text("text,label\na,spam\nb,\nc,ham\n")
    Dataset.from_csv(str(tmp_path / "rows.csv")).to_pandas().to_parquet(tmp_path / "rows.parquet")
    for name in ("rows.csv", "rows.parquet"):
        train, _, names = with_class_labels(load_splits(str(tmp_path / name))["train"], {})
        assert train["labels"][:] == [1, 0] and train["text"][:] == ["a", "c"] and names == ["ham", "spam"]


def test_a_column_has_one_role() -> None:
    rows = Dataset.from_dict({"premise": ["a"], "label": [0]})
    with pytest.raises(ValueError, match="gives 'premise' two roles: premise and hypothesis"):
        pick(rows, {"premise": "premise", "hypothesis": "premise", "label": "label"}, {"hypothesis"}, ())


def test_partition_column_that_is_trained_on() -> None:
    with pytest.raises(ValueError, match="partition_column='text' is what the task trains on"):
        TASKS["newsgroups"](arguments("newsgroups"), keep="text")


def test_subsets_are_the_same_for_every_run() -> None:
    folder = real("data/sick_nli")
    options = {"dataset_name": folder, "max_train_samples": 5, "max_eval_samples": 3, "eval_split": ["test"]}
    first, second = (TASKS["mnli"](arguments("mnli", **options))._raw_splits() for _ in range(2))
    assert {name: len(rows) for name, rows in first.items()} == {"train": 5, "test": 3}
    assert first["train"][:] == second["train"][:]
    assert first["train"]["premise"][:] != load_dataset(folder)["train"]["premise"][:5]  # drawn, not the first ones


# ---- Text ----


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
    assert task.scores(both, ["matched", "mismatched"]) == {"MNLI-m": 25.0, "MNLI-mm": 75.0}


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


def test_length_beyond_the_model() -> None:
    options = {"model_name_or_path": real("models/granite-30m-roberta"), "max_length": 100_000}
    with pytest.raises(ValueError, match=r"max_length=100000: the tokenizer of .* allows 2 to 512 tokens"):
        TASKS["newsgroups"](arguments("newsgroups", **options)).load_processor()


# ---- Questions ----


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
