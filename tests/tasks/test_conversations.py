"""Messages as training data of language models: what is learned of them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from benchmarks.smollm2 import contexts, write_data
from hf_coefsfl.federation.data_checks import DataError
from hf_coefsfl.tasks import TASKS
from hf_coefsfl.tasks.base import Prepared
from hf_coefsfl.tasks.chat import as_texts, last_answer
from hf_coefsfl.tasks.loading import load_splits
from tests.support.task_arguments import arguments
from tests.support.words import CHAT_TEMPLATE, WORDS, words_tokenizer


def said(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


TALK = said("the cat", "sat", "the dog", "ran far")
TOKENS = ["<s>", "the", "cat", "</s>", "a", "sat", "</s>", "<s>", "the", "dog", "</s>", "a", "ran", "far", "</s>"]


def prepared(folder: Path, model: str, rows: list[dict[str, Any]], **options: Any) -> Prepared:
    for split in ("train", "test"):
        Dataset.from_list(rows).to_json(str(folder / "data" / f"{split}.jsonl"))
    given = arguments(
        "causal_lm", model_name_or_path=model, dataset_name=str(folder / "data"), **{"max_length": 32} | options
    )
    return TASKS["causal_lm"](given).prepare(seed=0)


def learned(row: dict[str, Any]) -> list[str]:
    """Return the words with a label, which must be those of the tokens."""
    assert [t for t, label in zip(row["input_ids"], row["labels"], strict=True) if label not in (-100, t)] == []
    return [WORDS[label] for label in row["labels"] if label != -100]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK},
        {"messages": [*TALK, *said("on a mat")]},  # nobody answered
        {"prompt": TALK[:3], "completion": TALK[3:]},
        {"prompt": "far", "messages": TALK},  # without a completion the prompt is of no use
    ],
)
def test_only_the_last_answer_is_learned(row: dict[str, Any], tmp_path: Path, talker: str) -> None:
    found = prepared(tmp_path, talker, [row]).train_dataset[0]
    assert [WORDS[token] for token in found["input_ids"]] == TOKENS
    assert learned(found) == ["ran", "far", "</s>"]


def test_texts_stay_as_they_were(tmp_path: Path, talker: str) -> None:
    row = {"prompt": "the cat", "completion": "sat", "messages": TALK}
    found = prepared(tmp_path, talker, [row])
    assert [WORDS[t] for t in found.train_dataset[0]["input_ids"]] == ["<s>", "the", "cat", "sat", "</s>"]
    found = prepared(tmp_path, talker, [row], columns=["messages=messages"])
    assert [WORDS[t] for t in found.train_dataset[0]["input_ids"]] == TOKENS


def test_a_batch_is_as_long_as_its_longest_sample(tmp_path: Path, talker: str) -> None:
    found = prepared(tmp_path, talker, [{"messages": TALK}, {"messages": TALK[:2]}])
    batch = found.data_collator([found.train_dataset[0], found.train_dataset[1]])
    assert batch["input_ids"].shape == (2, len(TOKENS)) and batch["attention_mask"].sum(1).tolist() == [len(TOKENS), 7]
    assert batch["labels"][1, 7:].tolist() == [-100] * (len(TOKENS) - 7)


def test_conversations_without_an_answer(
    tmp_path: Path, talker: str, caplog: pytest.LogCaptureFixture, decoder: str
) -> None:
    rows = [{"messages": TALK}, {"messages": said("the cat")}, {"messages": said("the mat " * 20, "sat")}]
    found = prepared(tmp_path, talker, rows)
    assert len(found.train_dataset) == 1 and "2 of 3 samples have no answer within max_length=32" in caplog.text
    with pytest.raises(DataError, match=r"No row of test has an answer within max_length=32 tokens.*--max_length"):
        prepared(tmp_path, talker, rows[1:])


def test_a_tokenizer_without_a_template(tmp_path: Path, decoder: str) -> None:
    for row in ({"messages": TALK}, {"prompt": TALK[:1], "completion": TALK[1:2]}):
        with pytest.raises(ValueError, match=r"The tokenizer of .*decoder has no chat template, which messages need"):
            prepared(tmp_path, decoder, [row])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chat": TALK}, "neither completions nor messages, only the columns chat. Say which it is with --columns"),
        ({"completions": "a"}, r"neither completions nor messages.*Did you mean completion"),
        ({"messages": [{"role": "user"}]}, "The messages of the training set, row 0, has a message without a role or"),
        ({"messages": "hello"}, "The messages of the training set, row 0, has a message without a role or .*: hello"),
        ({"prompt": "the cat", "completion": TALK[1:2]}, "of the training set must both be texts, or both lists of"),
        ({"prompt": TALK[:1], "completion": "sat"}, "of the training set must both be texts, or both lists of"),
        ({"completion": ["sat"]}, r"The completion of the training set, row 0, is not a text, but \['sat'\]"),
    ],
)
def test_what_is_refused(row: dict[str, Any], message: str, tmp_path: Path, talker: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, talker, [row])


def test_a_column_by_another_name(tmp_path: Path, talker: str) -> None:
    found = prepared(tmp_path, talker, [{"chat": TALK}], columns=["messages=chat"])
    assert learned(found.train_dataset[0]) == ["ran", "far", "</s>"]


def test_questions_as_conversations(tmp_path: Path) -> None:
    """What benchmarks/smollm2.py makes of data in SQuAD's format."""
    text = "The dog ran. A cat sat on 3.5 mats. It sat far."
    start = text.index("3.5")
    assert contexts(text, start, start + 8) == ["The dog ran. A cat sat on 3.5 mats.", "A cat sat on 3.5 mats."]
    assert contexts(text, 0, len(text)) == [text]
    none, one = {"text": [], "answer_start": []}, {"text": ["3.5 mats", "mats"], "answer_start": [start, start + 4]}
    rows = [
        {"title": f"t{i % 4}", "context": text, "question": "the cat", "answers": none if i == 0 else one}
        for i in range(8)
    ]
    Dataset.from_list(rows).to_json(str(tmp_path / "squad" / "train.jsonl"))
    tokenizer = words_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    for most, context in ((40, "The dog ran. A cat sat on 3.5 mats."), (30, "A cat sat on 3.5 mats.")):
        write_data(str(tmp_path / "squad"), tmp_path / "made", tokenizer, most)
        found = load_splits(str(tmp_path / "made"))
        assert len(found["train"]) + len(found["test"]) == 7
        assert not set(found["train"]["title"]) & set(found["test"]["title"])
        assert found["test"][0]["messages"][1:] == said(f"{context}\n\nthe cat", "3.5 mats")


def test_a_template_that_rewrites_the_prompt() -> None:
    tokenizer = words_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match="The chat template writes a conversation in another way"):
        as_texts(tokenizer, *last_answer(TALK))
