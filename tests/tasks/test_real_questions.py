"""Question answering: windows and answers of real questions."""

import pyarrow.parquet as parquet
import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from hf_coefsfl.tasks.metrics import load_metric
from hf_coefsfl.tasks.spans import encode_questions
from tests.support.questions import answer_of, answers_of, encode, peaked, row
from tests.support.real import real

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def questions():
    return Dataset.from_list(parquet.read_table(real("data/squad_v2_half_dev") + "/validation.parquet").to_pylist())


@pytest.mark.parametrize(("max_length", "stride", "count"), [(384, 128, 700), (160, 64, 300)])
def test_real_questions(questions, max_length, stride, count):
    tokenizer = AutoTokenizer.from_pretrained(real("models/granite-30m-roberta"))
    questions = questions.select(range(count))
    features = questions.map(
        lambda batch: encode_questions(batch, tokenizer, max_length, stride),
        batched=True,
        remove_columns=questions.column_names,
    )
    assert "token_type_ids" not in features.column_names and len(features) > count
    rows = {one["id"]: one for one in questions}
    covered, held = {name: set() for name in rows}, set()
    for window in features:
        one = rows[window["example_id"]]
        covered[one["id"]].update(*(range(*span) for span in window["offset_mapping"] if span is not None))
        assert len(window["input_ids"]) == len(window["offset_mapping"]) <= max_length
        if window["start_positions"] == 0:
            assert window["end_positions"] == 0
            continue
        held.add(one["id"])
        first, text = one["answers"]["answer_start"][0], one["answers"]["text"][0]
        low, high = (window["offset_mapping"][window[name]] for name in ("start_positions", "end_positions"))
        # the fewest tokens that hold the answer: its ends lie in the first and in the last
        assert low[0] <= first < low[1] and high[0] < first + len(text) <= high[1]
        # a token may also hold the punctuation that follows
        assert one["context"][low[0] : high[1]].strip(",.\"'") == text.strip(",.\"'")
    assert held == {name for name, one in rows.items() if one["answers"]["text"]}
    for name, one in rows.items():
        assert {i for i, letter in enumerate(one["context"]) if not letter.isspace()} <= covered[name]

    windows = list(features)
    answers = answers_of(questions, features, peaked(windows, max_length + 7), max_answer_length=200)
    found = load_metric("squad_v2").compute(
        predictions=[{name: a[name] for name in ("id", "prediction_text", "no_answer_probability")} for a in answers],
        references=[{"id": one["id"], "answers": one["answers"]} for one in questions],
    )
    assert found["exact"] == found["f1"] == 100 and found["total"] == count >= 300
    assert 0 < found["NoAns_total"] < count


def test_real_tokenizer_cuts_letters_of_several_tokens():
    tokenizer = AutoTokenizer.from_pretrained(real("models/granite-30m-roberta"))
    context = "The grin 😀 is one letter and several tokens."
    for size in range(40):
        windows = encode([row("😀", question="x" + "🦊" * size, context=context)], tokenizer, max_length=24, stride=6)
        assert all(len(window["input_ids"]) <= 24 for window in windows)
        assert "😀" in [answer_of(window, context) for window in windows if window["start_positions"]]


def test_real_tokenizer_sees_no_blanks_around_a_question():
    tokenizer = AutoTokenizer.from_pretrained(real("models/granite-30m-roberta"))
    plain, led = (encode([row(question=question)], tokenizer)[0]["input_ids"] for question in ("Who?", " \n Who?"))
    assert plain == led
    cut = encode([row(question="word " * 400)], tokenizer, max_length=64, stride=16)[0]["input_ids"]
    # 64 - 4 special tokens - 16 of stride leave 44, half of them for the question
    assert cut[1:23] == tokenizer(("word " * 22).strip(), add_special_tokens=False)["input_ids"]
    assert cut[23:25] == [tokenizer.sep_token_id] * 2
