"""Datasets, their columns and their labels."""

from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, load_dataset
from PIL import Image as Pictures
from transformers import BertConfig, BertForQuestionAnswering

from hf_coefsfl.federation.data_checks import DataError
from hf_coefsfl.tasks import TASKS
from hf_coefsfl.tasks.loading import load_splits, pick, tell_truncated, with_class_labels
from hf_coefsfl.tasks.token_classification import class_names
from tests.support.real import real
from tests.support.task_arguments import arguments
from tests.support.words import words_tokenizer


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
    with pytest.raises(ValueError, match=r"columns='txt=a' is not role=column. Did you mean text\? The roles"):
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
    known = "ham" if isinstance(label, str) else 0
    with pytest.raises(ValueError, match=r"\(row 1\) is none of the model's 3: ham, junk, spam"):
        with_class_labels(Dataset.from_dict({"label": [known, label]}), {}, ["ham", "junk", "spam"])


def test_labels_that_files_change(caplog: pytest.LogCaptureFixture) -> None:
    """An empty cell makes floats of whole numbers; JSON has bools; fractions and lists are not classes."""
    train, evals, names = with_class_labels(
        Dataset.from_dict({"label": [1.0, None, 0.0, float("nan")]}), {"dev": Dataset.from_dict({"label": [2]})}
    )
    assert train["labels"][:] == [1, 0] and evals["dev"]["labels"][:] == [2] and names == ["0", "1", "2"]
    assert "2 of 4 rows of the training set have no label, the first is row 1. They are left out." in caplog.text
    train, _, names = with_class_labels(Dataset.from_dict({"label": [True, False]}), {})
    assert train["labels"][:] == [1, 0] and names == ["false", "true"]
    with pytest.raises(ValueError, match=r"Label 0.5 of dev, row 1, is a fraction.*--columns label="):
        with_class_labels(Dataset.from_dict({"label": [1]}), {"dev": Dataset.from_dict({"label": [1.0, 0.5]})})
    with pytest.raises(
        ValueError, match=r"Label \[1\] of the training set, row 1, is not one class, but List.*--columns label="
    ):
        with_class_labels(Dataset.from_dict({"label": [None, [1]]}), {})


@pytest.mark.parametrize("label", [1_000, 1_000_000, 2**40, 2**62])
def test_labels_far_above_their_number(label: int) -> None:
    """A head would get an output for every number below, and 2**40 names alone do not fit into memory."""
    sound, far = Dataset.from_dict({"label": [0, 1, 1]}), Dataset.from_dict({"label": [0, 1, label]})
    for train, evals, place in ((far, {}, "the training set"), (sound, {"dev": far}, "dev")):
        message = f"Label {label} of {place}, row 2, is far above the number of distinct labels, 3: .*max_train_samples"
        with pytest.raises(DataError, match=message):
            with_class_labels(train, evals)
    tags = {"the training set": Dataset.from_dict({"tags": [[0, 1], [1, label]]})}
    with pytest.raises(DataError, match=f"Label {label} of the training set, row 1, is far above"):
        class_names(tags)
    with pytest.raises(DataError, match="Label -7 of the training set, row 1, is below 0"):
        with_class_labels(Dataset.from_dict({"label": [0, -7]}), {})


def test_few_rows_of_many_classes() -> None:
    assert len(with_class_labels(Dataset.from_dict({"label": [0, 999]}), {})[2]) == 1000
    assert len(with_class_labels(Dataset.from_dict({"label": list(range(0, 20_000, 10))}), {})[2]) == 19_991


@pytest.mark.parametrize(
    ("task", "rows", "message"),
    [
        ("newsgroups", {"text": ["a", "b"], "label": [0, 1]}, None),
        ("newsgroups", {"text": [None, "b"], "label": [0, 1]}, None),  # as an empty text
        (
            "newsgroups",
            {"text": [None, 7], "label": [0, 1]},
            "The text of .*, row 1, is not a text, but 7",
        ),
        (
            "newsgroups",
            {"text": [["a"]], "label": [0]},
            r"The text of .*, row 0, is not a text, but \['a'\]",
        ),
        ("causal_lm", {"completion": ["a", None]}, "The completion of the training set, row 1, is missing"),
        ("causal_lm", {"completion": [1.5]}, "The completion of the training set, row 0, is not a text, but 1.5"),
        ("causal_lm", {"prompt": [None], "completion": ["a"]}, None),
        ("squad_v2", {"context": ["a", None]}, "The context of the training set, row 1, is missing"),
        ("squad_v2", {"question": [True, False]}, "The question of the training set, row 0, is not a text, but True"),
    ],
)
def test_texts_of_every_kind(task: str, rows: dict[str, list[Any]], message: str | None, tmp_path: Path) -> None:
    count = len(next(iter(rows.values())))
    if task == "squad_v2":
        answers = {"text": ["a"], "answer_start": [0]}
        rows = {"id": list(map(str, range(count))), "question": ["a"] * count, "context": ["a"] * count} | rows
        rows["answers"] = [answers] * count
    Dataset.from_dict(rows).to_parquet(str(tmp_path / "train.parquet"))
    job = TASKS[task](arguments(task, dataset_name=str(tmp_path)))
    if message is None:
        assert len(job._raw_splits(evaluation=False)["train"]) == count
        return
    with pytest.raises(DataError, match=message):
        job._raw_splits(evaluation=False)


def test_what_is_cut_off_is_told(caplog: pytest.LogCaptureFixture) -> None:
    rows = Dataset.from_dict({"input_ids": [[1] * n for n in (3, 8, 2, 8)]})
    tell_truncated({"train": rows.select([0, 2]), "dev": rows.select([1, 0])}, 8)
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 2 texts of dev fill max_length=8 tokens: what is longer is cut off. --max_length keeps more."
    ]


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


@pytest.mark.slow
def test_subsets_are_the_same_for_every_run() -> None:
    folder = real("data/sick_nli")
    options = {"dataset_name": folder, "max_train_samples": 5, "max_eval_samples": 3, "eval_split": ["test"]}
    first, second = (TASKS["mnli"](arguments("mnli", **options))._raw_splits() for _ in range(2))
    assert {name: len(rows) for name, rows in first.items()} == {"train": 5, "test": 3}
    assert first["train"][:] == second["train"][:]
    assert first["train"]["premise"][:] != load_dataset(folder)["train"]["premise"][:5]  # drawn, not the first ones
