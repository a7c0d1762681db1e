"""Rows that cannot be trained on are found before the first round, with their number and their client."""

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as Pictures
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    default_data_collator,
)
from transformers.utils import find_labels

from hf_coefsfl.federation.clients import Federation
from hf_coefsfl.federation.data_checks import DataError, RowCheck
from hf_coefsfl.protocol.loss import LossSpec
from tests.support.federated import CLASSES, config, images, texts, tiny_bert, tiny_vit, trainer
from tests.support.models import MODELS
from tests.support.words import words_tokenizer

SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
BAD = 5  # the row
ONE_CLASS = [0, 1, 2, 0, 1, 2, 0, 1]
LABELS: dict[str, tuple[Any, str]] = {
    "too large": (3, r"Label 3 of {}, row 5, is outside 0..2: the model has num_labels=3"),
    "negative": (-1, r"Label -1 of {}, row 5, is outside 0..2.*dataset.filter"),
    "missing": (None, r"Label None of {}, row 5, is missing. Fill it in, or leave the row out"),
}
COLUMNS: dict[str, tuple[list[Any], str]] = {
    "strings": (["ham", "spam"] * 4, r"Label 'ham' of {}, row 0, is not a number: a class is .* 0..2.*class_encode"),
    "known strings": (["LABEL_1"] * 8, r"Label 'LABEL_1' of {}, row 0, .*knows it as class 1: .*model.config.label2id"),
    "floats": ([float(x) for x in ONE_CLASS], r"Label 0.0 of {}, row 0, is a float.*cast_column\('labels', Value"),
    "NaN": ([0.0] * 5 + [float("nan")] + [1.0] * 2, r"Label nan of {}, row 5, is missing"),
    "bools": ([True, False] * 4, r"Label True of {}, row 0, is a bool: a class is a whole number 0..2"),
    "lists": ([[1, 0, 1]] * 8, r"Label 1 of {}, row 0, is in a list, and a sample has one class.*3 floats"),
    "short vectors": ([[1.0, 0.0]] * 8, r"Label 1.0 of {}, row 0, does not fit: a sample has 3 floats here"),
}
COLUMNS |= {name: ([*ONE_CLASS[:BAD], bad, *ONE_CLASS[BAD + 1 :]], text) for name, (bad, text) in LABELS.items()}


def rows(labels: list[Any], name: str = "labels") -> Dataset:
    tokens = texts(len(labels)).with_format(None).remove_columns("labels")
    return Dataset.from_dict({**tokens.to_dict(), name: labels})


def sound(size: int = 8) -> Dataset:
    return rows([i % CLASSES for i in range(size)])


def examine(data: Any, model: Any = None, collate: Any = default_data_collator, **changes: Any) -> None:
    """Do what a trainer does with its training data."""
    model = model or tiny_bert()
    args = config("out", **{"num_clients": None, **changes})
    check = RowCheck.of(model, LossSpec.of(model, find_labels(type(model))))
    check.clients(Federation.of(data, args), collate)


def refused(message: str, data: Any, *args: Any, **changes: Any) -> None:
    with pytest.raises(DataError, match=message):
        examine(data, *args, **changes)


@pytest.mark.parametrize("kind", sorted(COLUMNS))
def test_labels_of_every_kind(kind: str) -> None:
    labels, message = COLUMNS[kind]
    refused(message.format("client Bern"), {"Basel": sound(), "Bern": rows(labels)})
    refused(message.format("client Bern"), {"Basel": sound(), "Bern": [*rows(labels)]})  # a list of dicts


def test_a_trainer_looks_at_all_its_data(tmp_path: Path) -> None:
    bad, options = rows([0, 1, 9]), {"num_clients": None, "save_strategy": "no"}
    for data, evaluated, owner in (
        ({"Bern": sound(), "Basel": bad}, None, "client Basel"),
        ([sound()], bad, "eval_dataset"),
        ([sound()], {"dev": sound(), "test": bad}, r"eval_dataset\['test'\]"),
    ):
        with pytest.raises(DataError, match=f"Label 9 of {owner}, row 2, is outside 0..2"):
            trainer(tmp_path, tiny_bert(), data, eval_dataset=evaluated, **options)


@pytest.mark.parametrize("kind", sorted(LABELS))
def test_one_dataset_with_a_partition(kind: str) -> None:
    """The row is that of the dataset, also if it was selected from another; the client is the one that has it."""
    labels, message = COLUMNS[kind]
    data = rows(labels).add_column("owner", ["a", "b"] * 4)
    options = {"partition": "column", "partition_column": "owner"}
    refused(message.format("client b"), data, **options)
    refused(message.format("client b").replace("row 5", "row 2"), data.select(range(7, -1, -1)), **options)


@pytest.mark.parametrize("collator", [default_data_collator, DataCollatorWithPadding(words_tokenizer())])
def test_label_columns_that_collators_rename(collator: Any) -> None:
    refused("Label 9 of client 0, row 2, is outside", [rows([0, 1, 9], "label")], None, collator)


def test_what_the_collator_mends_is_no_fault() -> None:
    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        numbers = [{"ham": 0, "spam": 1}[sample["labels"]] for sample in samples]
        cut = {name: torch.tensor([sample[name][:4] for sample in samples]) for name in ("input_ids", "attention_mask")}
        return cut | {"labels": torch.tensor(numbers)}

    model = BertForSequenceClassification(BertConfig(vocab_size=40, **SIZES, max_position_embeddings=6))
    examine([rows(["ham", "spam"] * 4)], model, collate)
    refused("Label 'eggs' of client 0, row 0, is not a number", [rows(["eggs", "spam"] * 4)], model, collate)


def test_sound_labels_of_every_kind() -> None:
    one = BertForSequenceClassification(BertConfig(vocab_size=40, **SIZES, num_labels=1))
    classes = Features({**rows(ONE_CLASS).features, "labels": ClassLabel(names=["a", "b", "c"])})
    examine([rows(ONE_CLASS).cast(classes)])
    examine([rows([-100, *ONE_CLASS[1:]])])
    examine([rows([True, False] * 4, "label")])  # which the collator makes numbers of
    examine([sound().cast_column("labels", Value("int8")).with_format("numpy")])
    examine([rows([[1.0, 0.0, 1.0]] * 8)])
    examine([rows([0.5, -7.0] * 4)], one)


def test_tags() -> None:
    model = BertForTokenClassification(BertConfig(vocab_size=40, **SIZES, num_labels=CLASSES))
    collator = DataCollatorForTokenClassification(words_tokenizer())
    fine = [[-100, 0, 2, 1, 0, 0, 0, -100]] * 6
    examine([rows(fine)], model, collator)
    for bad, message in (
        ([[-100, 0, 3, *[0] * 5]], "Label 3 of client 0, row 6, is outside 0..2"),
        ([[0, None, *[0] * 6]], "Label None of client 0, row 6, is missing"),
    ):
        refused(message, [rows(fine + bad)], model, collator)
    message = "Label 0 of client 0, row 0, is one number, and BertForTokenClassification needs one for each token"
    refused(message, [sound()], model, collator)


def test_an_encoder_decoder_with_classes() -> None:
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 4, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    message = r"Label 0 .* is one number, and T5ForConditionalGeneration needs tokens: tokenise the name of the class"
    refused(message + r".*AutoModelForSequenceClassification", [sound()], model)
    answers = rows([*[[3, 4]] * 7, [3, 99]])
    refused(r"Label 99 of client 0, row 7, is outside the vocabulary 0..39", [answers], model)


def test_answers_of_questions() -> None:
    model = BertForQuestionAnswering(BertConfig(vocab_size=40, **SIZES))
    data = rows([0, 1, 2, 3], "start_positions").add_column("end_positions", [1.5, 2.0, 2.0, 3.0])
    refused("Label 1.5 of client 0, row 0, is a float: a whole number is needed", [data], model)


@pytest.mark.parametrize(
    ("make", "positions"),
    [
        (lambda: BertForSequenceClassification(BertConfig(vocab_size=40, **SIZES, max_position_embeddings=6)), 6),
        (
            lambda: RobertaForSequenceClassification(
                RobertaConfig(vocab_size=40, **SIZES, max_position_embeddings=8, pad_token_id=1)
            ),
            6,
        ),
        (
            lambda: OPTForCausalLM(
                OPTConfig(vocab_size=40, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, ffn_dim=32,
                          word_embed_proj_dim=16, max_position_embeddings=6)
            ),
            6,
        ),
    ],
    ids=["bert", "roberta", "opt"],
)  # fmt: skip
def test_texts_longer_than_the_model(make: Callable[[], Any], positions: int) -> None:
    model = make()
    check = RowCheck.of(model, LossSpec.of(model, ["labels"]))
    assert check.max_tokens == positions
    with torch.no_grad():  # as many as the model really takes, and no more
        model(input_ids=torch.full((1, positions), 7))
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.full((1, positions + 1), 7))
    data = Dataset.from_list([{"input_ids": [5] * n, "attention_mask": [1] * n, "labels": [5] * n} for n in (4, 6, 7)])
    if not isinstance(model, OPTForCausalLM):
        data = data.remove_columns("labels").add_column("labels", [0, 0, 0])
    cut = rf"tokenizer\(..., truncation=True, max_length={positions}\)"
    refused(f"The text of client 0, row 2, has 7 tokens, but the model 6 positions. Truncate it: {cut}", [data], model)


def test_tokens_of_another_tokenizer() -> None:
    data = sound().map(lambda row, i: {"input_ids": [7, 40 if i == BAD else 3, *[0] * 6]}, with_indices=True)
    refused(r"Token 40 of client 0, row 5, is outside the vocabulary 0..39", [data])


def test_texts_without_a_token() -> None:
    """As a tokenizer without special tokens makes them of an empty text, padded or not."""
    empty = "The text of client 0, row 5, is empty: the tokenizer gives no token .* leave the row out"
    padded = sound().map(lambda row, i: {"attention_mask": [int(i != BAD)] * 8}, with_indices=True)
    refused(empty, [padded])
    tokens = [[] if i == BAD else [7, 3] for i in range(8)]
    bare = Dataset.from_dict({"input_ids": tokens, "labels": ONE_CLASS})
    refused(empty, [bare], None, DataCollatorWithPadding(words_tokenizer()))
    check = RowCheck.of(tiny_bert(), LossSpec.of(tiny_bert(), ["labels"]))
    batch = DataCollatorWithPadding(words_tokenizer())([bare[i] for i in (4, 5, 6)])  # the others pad it
    fault = check.batch(batch)
    assert fault is not None and fault.row == 1
    assert check.batch(batch | {"attention_mask": torch.zeros(3, 2)}) is None  # added to scores: every token is read


class Pixels:
    """Makes a batch of images."""

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        pixels = [torch.tensor(np.asarray(sample["image"].convert("L"), "float32"))[None] for sample in samples]
        return {"pixel_values": torch.stack(pixels), "labels": torch.tensor([sample["labels"] for sample in samples])}


def pictures(**bad: bytes) -> Dataset:
    stored = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (8, 8), dtype="uint8")
    Pictures.fromarray(noise).save(stored, "PNG")
    content = [bad.get(f"row{i}", stored.getvalue()) for i in range(8)]
    data = {"image": [{"bytes": c, "path": None} for c in content], "labels": ONE_CLASS}
    return Dataset.from_dict(data, features=Features(image=Image(), labels=Value("int64")))


def test_unreadable_images() -> None:
    broken = pictures(row5=b"GIF of a cat")
    refused(r"The image of client 0, row 5, cannot be read \(UnidentifiedImageError\)", [broken], tiny_vit(), Pixels())


def test_images_that_break_off_are_named_when_they_come(tmp_path: Path) -> None:
    whole = pictures().cast_column("image", Image(decode=False))[0]["image"]["bytes"]
    broken = pictures(row5=whole[: len(whole) // 2])
    options: dict[str, Any] = {"data_collator": Pixels(), "remove_unused_columns": False, "num_clients": None}
    options |= {"num_rounds": 1, "method": "vanilla"}
    message = r"Row 5 of {} cannot be read \(\w+: .*\). Repair it, or leave the row out"
    with pytest.raises(DataError, match=message.format("client Bern")):
        trainer(tmp_path, tiny_vit(), {"Bern": broken}, eval_dataset=None, **options).train()
    run = trainer(tmp_path, tiny_vit(), [pictures()], eval_dataset=broken, per_device_eval_batch_size=2, **options)
    with pytest.raises(DataError, match=message.format("the evaluation data")):
        run.evaluate()


class Torch(torch.utils.data.Dataset):
    """A dataset whose rows are known only when they are read."""

    def __init__(self, samples: Any):
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.samples[i]


def test_rows_that_cannot_be_checked_ahead(tmp_path: Path) -> None:
    data = images(16).map(lambda row, i: {"labels": 7 if i == BAD else 1}, with_indices=True).with_format("torch")
    options: dict[str, Any] = {"num_clients": 2, "participation": 1.0, "num_rounds": 1, "eval_dataset": None}
    with pytest.raises(DataError, match=r"Label 7 of client \d, row 5, is outside 0..2"):
        trainer(tmp_path, data=Torch(data), **options).train()
    run = trainer(tmp_path, **{**options, "eval_dataset": Torch(data)}, per_device_eval_batch_size=2)
    with pytest.raises(DataError, match=r"Label 7 of the evaluation data, row 5, is outside 0..2"):
        run.evaluate()


def test_failing_clients_that_are_skipped_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = {"good": sound(), "bad": rows([9] * 8)}
    options: dict[str, Any] = {"num_clients": None, "on_client_failure": "skip", "eval_dataset": None}
    run = trainer(tmp_path, tiny_bert(), data, participation=1.0, num_rounds=1, **options)
    assert "Label 9 of client bad, row 0, is outside 0..2" in caplog.text
    run.train()
    assert [entry["client"] for entry in run.ledger.entries if "failure" in entry] == ["bad"]


def test_many_rows_take_seconds() -> None:
    size = 100_000
    draw = np.random.default_rng(0)
    tokens = pa.FixedSizeListArray.from_arrays(draw.integers(0, 40, size * 64, dtype="int32"), 64).cast(
        pa.list_(pa.int32())
    )
    data = Dataset(pa.table({"labels": draw.integers(0, 3, size), "input_ids": tokens}))
    model = tiny_bert()
    check = RowCheck.of(model, LossSpec.of(model, ["labels"]))
    for rows_of in (data, data.shuffle(seed=0)):
        start = time.perf_counter()
        check.dataset(rows_of, lambda row: "", lambda row: {})
        assert time.perf_counter() - start < 10  # a second or less on an idle machine
    labels = [9 if row == 54_321 else 0 for row in range(size)]
    with pytest.raises(DataError, match="Label 9 of all, row 54321, is outside"):
        check.dataset(data.select_columns("input_ids").add_column("labels", labels), lambda row: "all", lambda row: {})


def test_sound_batches_of_all_models() -> None:
    for entry in MODELS.values():
        model = entry.make()
        check = RowCheck.of(model, LossSpec.of(model, [name for name in entry.batch() if name in entry.targets()]))
        assert check.batch(entry.batch()) is None, entry.name
