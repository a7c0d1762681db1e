"""Question answering: windows that hold the answers, and answers out of logits, by hand and on real questions."""

import math
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as parquet
import pytest
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_coefsfl.tasks.metrics import load_metric
from hf_coefsfl.tasks.spans import answers_from_logits, encode_questions
from tests.support.real import real

SPECIAL = {"[UNK]": 0, "[PAD]": 1, "[CLS]": 2, "[SEP]": 3}
TEMPLATES = {  # pair template, special tokens, side of the padding, token types
    "bert": ("[CLS] $A [SEP] $B:1 [SEP]:1", 3, "right", True),
    "roberta": ("[CLS] $A [SEP] [SEP] $B [SEP]", 4, "right", False),
    "xlnet": ("$A [SEP] $B:1 [SEP]:1 [CLS]:2", 3, "left", True),
    "gpt": (None, 0, "left", False),
}
CONTEXT = "one two three four five six seven eight"


def make_tokenizer(kind):
    """Return a tokenizer of words and punctuation, with special tokens placed as that kind of model does."""
    template, _, side, types = TEMPLATES[kind]
    tokenizer = Tokenizer(models.WordLevel(SPECIAL, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if template is not None:
        known = [(name, SPECIAL[name]) for name in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(pair=template, special_tokens=known)
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]"} if template is not None else {}
    inputs = ["input_ids", "token_type_ids", "attention_mask"] if types else ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        padding_side=side,
        model_input_names=inputs,
        **names,
    )


def row(answer=None, question="which ?", context=CONTEXT, name="q"):
    texts = [] if answer is None else [answer]
    answers = {"text": texts, "answer_start": [context.index(text) for text in texts]}
    return {"id": name, "question": question, "context": context, "answers": answers}


def encode(rows, tokenizer, max_length=384, stride=128):
    columns = {name: [one[name] for one in rows] for name in rows[0]}
    encoded = encode_questions(columns, tokenizer, max_length, stride)
    assert len({len(values) for values in encoded.values()}) == 1
    return [dict(zip(encoded, values, strict=True)) for values in zip(*encoded.values(), strict=True)]


def text_at(window, context, first, last):
    return context[window["offset_mapping"][first][0] : window["offset_mapping"][last][1]]


def answer_of(window, context):
    return text_at(window, context, window["start_positions"], window["end_positions"])


def words_of(window, context):
    return [context[span[0] : span[1]] for span in window["offset_mapping"] if span is not None]


def peaked(windows, length, at=("start_positions", "end_positions")):
    """Return logits that are 10 at the positions and 0 elsewhere."""
    logits = np.zeros((2, len(windows), length), dtype=np.float32)
    for side, name in enumerate(at):
        for number, window in enumerate(windows):
            logits[side, number, window[name]] = 10
    return logits


def answers_of(examples, windows, logits, **kwargs):
    return answers_from_logits(examples, windows, *logits, **kwargs)


def test_windows_by_hand():
    # three special tokens, two of the question: four of the context a window, one of them shared
    windows = encode([row("three four"), row(name="none")], make_tokenizer("bert"), max_length=9, stride=1)
    cut = [["one", "two", "three", "four"], ["four", "five", "six", "seven"], ["seven", "eight"]]
    assert [words_of(window, CONTEXT) for window in windows] == cut * 2
    assert [window["example_id"] for window in windows] == ["q"] * 3 + ["none"] * 3
    first = windows[0]
    assert first["input_ids"] == [2, 0, 0, 3, 0, 0, 0, 0, 3] and first["attention_mask"] == [1] * 9
    assert first["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert [tuple(span) if span else None for span in first["offset_mapping"]] == [
        None, None, None, None, (0, 3), (4, 7), (8, 13), (14, 18), None,
    ]  # fmt: skip
    # the second window holds only a part of the answer
    positions = [(window["start_positions"], window["end_positions"]) for window in windows]
    assert positions == [(6, 7), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0)]
    assert len(windows[2]["input_ids"]) == 7  # not padded


@pytest.mark.parametrize("kind", TEMPLATES)
def test_every_kind_of_tokenizer(kind):
    tokenizer = make_tokenizer(kind)
    special = TEMPLATES[kind][1]
    windows = encode([row("four")], tokenizer, max_length=special + 2 + 4, stride=1)
    assert ("token_type_ids" in windows[0]) == TEMPLATES[kind][3]
    cls = [len(window["input_ids"]) - 1 if kind == "xlnet" else 0 for window in windows]
    assert [window["cls_index"] for window in windows] == cls
    holds = [answer_of(window, CONTEXT) for window in windows[:2]]  # a window each side of the shared token
    assert holds == ["four", "four"] and len(windows) == 3
    assert windows[2]["start_positions"] == windows[2]["end_positions"] == cls[2]
    # what is peaked at these positions is answered, and at the CLS token it is not
    length = max(len(window["input_ids"]) for window in windows)
    assert answers_of([row()], windows, peaked(windows, length))[0]["prediction_text"] == "four"
    nothing = peaked(windows, length, at=("cls_index", "cls_index"))
    assert answers_of([row()], windows, nothing)[0]["prediction_text"] == ""


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("max_length", "stride"), [(7, 0), (8, 1), (12, 5), (13, 2), (100, 20)])
def test_windows_cover_the_context(max_length, stride, side):
    tokenizer = make_tokenizer("bert")
    tokenizer.truncation_side = side
    contexts = [" ".join(f"w{i}" for i in range(size)) for size in (0, 1, 9, 23)]
    rows = [row(question=" q", context=context, name=str(i)) for i, context in enumerate(contexts)]
    windows = encode(rows, tokenizer, max_length, stride)
    for number, context in enumerate(contexts):
        cut = [words_of(window, context) for window in windows if window["example_id"] == str(number)]
        cut = cut if side == "right" else cut[::-1]
        assert all(len(words) <= max_length - 4 for words in cut)
        shared = [min(stride, len(a)) for a in cut[:-1]]
        assert all(a[len(a) - k :] == b[:k] for a, b, k in zip(cut[:-1], cut[1:], shared, strict=True))
        joined = cut[0] + [word for words, k in zip(cut[1:], shared, strict=True) for word in words[k:]]
        assert joined == context.split()


def test_long_questions_are_cut():
    question = "  " + " ".join(f"w{i}" for i in range(500))
    # 12 - 3 special tokens - 2 of stride leave 7, of which the question may have 3
    windows = encode([row("six", question=question)], make_tokenizer("bert"), max_length=12, stride=2)
    assert all(len(window["input_ids"]) <= 12 for window in windows)
    assert all(window["input_ids"][:5] == [2, 0, 0, 0, 3] and window["offset_mapping"][5] for window in windows)
    assert {word for window in windows for word in words_of(window, CONTEXT)} == set(CONTEXT.split())
    assert "six" in [answer_of(window, CONTEXT) for window in windows if window["start_positions"]]
    assert encode([row(question="")], make_tokenizer("bert"))[0]["input_ids"][:2] == [2, 3]


def test_answers_at_odds_with_the_tokens():
    tokenizer = make_tokenizer("bert")
    context = " Normans , who settled  in 1066 . "
    for answer, covered in [
        ("Norman", "Normans"),
        (" Normans", "Normans"),
        ("066 . ", "1066 ."),
        ("settled  in", None),
    ]:
        (window,) = encode([row(answer, context=context)], tokenizer)
        assert answer_of(window, context) == (covered or answer)
    (blank,) = encode([row("  ", context=context)], tokenizer)
    assert (blank["start_positions"], blank["end_positions"]) == (0, 0)
    several = row("settled", context=context)
    several["answers"] = {"text": ["settled", "1066"], "answer_start": [15, 27]}
    (window,) = encode([several], tokenizer)
    assert answer_of(window, context) == "settled"


def test_a_cls_token_in_the_text_is_text():
    windows = encode([row(question="[CLS] ?", context="see [CLS] here")], make_tokenizer("xlnet"))
    assert windows[0]["input_ids"] == [2, 0, 3, 0, 2, 0, 3, 2] and windows[0]["cls_index"] == 7


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_length": 12, "stride": 8}, "stride=8 must be from 0 to 7 with max_length=12: 3 special tokens"),
        ({"max_length": 12, "stride": -1}, "stride=-1 must be from 0 to 7"),
        ({"max_length": 4, "stride": 0}, "max_length=4 has no room .* Use at least 5"),
        ({"max_length": 101}, "max_length=101 is more than the model takes. Use at most 100"),
    ],
)
def test_windows_that_cannot_be(kwargs, message):
    tokenizer = make_tokenizer("bert")
    tokenizer.model_max_length = 100
    with pytest.raises(ValueError, match=message):
        encode([row()], tokenizer, **kwargs)
    assert encode([row()], tokenizer, max_length=5, stride=0)[0]["input_ids"] == [2, 0, 3, 0, 3]


def test_slow_tokenizers_are_refused():
    with pytest.raises(ValueError, match=r"SimpleNamespace does not tell the characters .* Use a fast tokenizer"):
        encode([row()], SimpleNamespace(is_fast=False))


def window_of(context, name="q", words=None):
    """Return a window of CLS, these words of the context and SEP."""
    spans = [(context.index(word), context.index(word) + len(word)) for word in words or context.split()]
    return {"example_id": name, "offset_mapping": [None, *spans, None], "cls_index": 0}


def test_answer_and_probabilities_by_hand():
    example, window = row(context="red green blue"), window_of("red green blue")
    start, end = np.zeros((2, 1, 5))
    start[0], end[0] = [1, math.log(6), 0, 0, 90], [1, 0, math.log(2), 0, 90]  # the SEP token at the end is no answer
    (answer,) = answers_from_logits([example], [window], start, end, n_best=2)
    # the best spans weigh 6 * 2 ("red green") and 6 * 1 ("red" and "red green blue", the shorter first), none e * e
    total = 12 + 6 + math.exp(2)
    assert [entry["text"] for entry in answer["n_best"]] == ["red green", "", "red"]
    assert [entry["probability"] for entry in answer["n_best"]] == pytest.approx(
        [12 / total, math.exp(2) / total, 6 / total]
    )
    assert [entry["score"] for entry in answer["n_best"]] == pytest.approx([math.log(12), 2, math.log(6)])
    assert (answer["id"], answer["prediction_text"]) == ("q", "red green")
    assert answer["no_answer_probability"] == pytest.approx(math.exp(2) / total)


def test_no_answer_needs_every_window_and_more_than_the_threshold():
    example = row(context="red green")
    windows = [window_of("red green", words=["red"]), window_of("red green", words=["green"])]
    start = np.array([[4.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    end = np.array([[4.0, 1.0, 0.0], [2.0, 0.0, 0.0]])
    # "red" scores 2, no answer 8 and 3: the lower counts, and beats "red" by 1
    texts = {
        threshold: answers_from_logits([example], windows, start, end, null_score_diff_threshold=threshold)[0]
        for threshold in (0.0, 0.99, 1.0, 2.0)
    }
    assert {threshold: answer["prediction_text"] for threshold, answer in texts.items()} == {
        0.0: "", 0.99: "", 1.0: "red", 2.0: "red",
    }  # fmt: skip
    assert texts[0.0]["no_answer_probability"] == pytest.approx(math.e / (math.e + 1 + math.exp(-2)))
    assert texts[0.0]["n_best"][0] == {"text": "", "score": 3.0, "probability": texts[0.0]["no_answer_probability"]}


def test_long_and_backward_answers_are_left_out():
    example, window = row(), window_of(CONTEXT)
    logits = np.zeros((2, 1, 10))
    logits[0, 0, 2], logits[1, 0, 6] = 5, 5  # "two" to "six": five words
    assert (
        answers_of([example], [window], logits, max_answer_length=5)[0]["prediction_text"] == "two three four five six"
    )
    short = answers_of([example], [window], logits, max_answer_length=4, n_best=50)[0]
    assert short["prediction_text"] == "two" and max(len(entry["text"].split()) for entry in short["n_best"]) == 4
    (backward,) = answers_of([example], [window], logits[::-1], n_best=100)
    spans = {entry["text"] for entry in backward["n_best"]}
    assert len(spans) == 1 + 8 * 9 // 2 and "two three four five six" in spans  # every span once, and none
    assert max(entry["score"] for entry in backward["n_best"]) == 5


def test_what_lies_beyond_a_window_is_ignored():
    examples = [row(name="a", context="red green"), row(name="b", context="blue")]
    windows = [window_of("red green", "a"), window_of("blue", "b")]
    own = np.random.default_rng(0).normal(size=(2, 2, 4))
    padded = {}
    for filler in (-100, 1000):
        wide = np.full((2, 2, 9), float(filler))
        wide[:, 0, :4], wide[:, 1, :3] = own[:, 0], own[:, 1, :3]
        padded[filler] = answers_of(examples, windows, wide)
    assert padded[-100] == padded[1000] and [len(answer["n_best"]) for answer in padded[1000]] == [4, 2]


def test_a_span_in_two_windows_counts_once():
    example = row(context="red green blue")
    windows = [window_of(example["context"], words=words) for words in (["red", "green"], ["green", "blue"])]
    logits = np.zeros((2, 2, 4))
    logits[:, 0, 2], logits[:, 1, 1] = 1, 2  # "green": 2 in the first, 4 in the second
    for order in ([0, 1], [1, 0]):
        (answer,) = answers_of([example], [windows[i] for i in order], logits[:, order])
        assert [entry["score"] for entry in answer["n_best"] if entry["text"] == "green"] == [4]
        texts = sorted(entry["text"] for entry in answer["n_best"])
        assert texts == ["", "blue", "green", "green blue", "red", "red green"]


def test_best_spans_against_brute_force():
    rng = np.random.default_rng(3)
    contexts = {name: " ".join(f"{name}{i}" for i in range(9)) for name in "ab"}
    examples = [row(name=name, context=context) for name, context in contexts.items()]
    parts = {"a": [(0, 6), (4, 9)], "b": [(0, 9)]}
    windows = [
        window_of(contexts[name], name, contexts[name].split()[low:high]) for name in "ba" for low, high in parts[name]
    ]
    windows[0]["offset_mapping"][3:3] = [(5, 6), (6, 6)]  # a token for a blank, and one for nothing: no ends of answers
    logits = rng.normal(size=(2, 3, 14))
    answers = answers_of(examples, windows, logits, n_best=7, max_answer_length=3)
    for example, answer in zip(examples, answers, strict=True):
        spans, null = {}, math.inf
        for number, window in enumerate(windows):
            if window["example_id"] != example["id"]:
                continue
            offsets = window["offset_mapping"]
            null = min(null, logits[0, number, 0] + logits[1, number, 0])
            for first in range(len(offsets)):
                for last in range(first, min(first + 3, len(offsets))):
                    ends = [offsets[i] and example["context"][slice(*offsets[i])].strip() for i in (first, last)]
                    if all(ends):
                        text = text_at(window, example["context"], first, last)
                        score = logits[0, number, first] + logits[1, number, last]
                        spans[text] = max(score, spans.get(text, -math.inf))
        best = sorted(spans.items(), key=lambda item: -item[1])[:7]
        listed = sorted([*best, ("", null)], key=lambda item: -item[1])
        assert [entry["text"] for entry in answer["n_best"]] == [text for text, _ in listed]
        assert [entry["score"] for entry in answer["n_best"]] == pytest.approx([score for _, score in listed])
        weights = np.exp([score for _, score in listed])
        assert [entry["probability"] for entry in answer["n_best"]] == pytest.approx(weights / weights.sum())
        assert answer["prediction_text"] == ("" if null > best[0][1] else best[0][0])


def test_logits_that_are_no_numbers_win_nothing():
    example, window = row(context="red green"), window_of("red green")
    (diverged,) = answers_of([example], [window], np.full((2, 1, 4), np.nan))
    assert (diverged["prediction_text"], diverged["no_answer_probability"]) == ("", 1.0)
    logits = np.zeros((2, 1, 4))
    logits[:, 0, 1], logits[:, 0, 2] = np.inf, 1
    (partly,) = answers_of([example], [window], logits)
    assert partly["prediction_text"] == "green" and [entry["text"] for entry in partly["n_best"]] == ["green", ""]


def test_a_context_without_tokens_has_no_answer():
    (window,) = encode([row(context="  ")], make_tokenizer("bert"))
    (answer,) = answers_of([row(context="  ")], [window], np.ones((2, 1, 5)))
    assert (answer["prediction_text"], answer["no_answer_probability"]) == ("", 1.0)
    assert answer["n_best"] == [{"text": "", "score": 2.0, "probability": 1.0}]


@pytest.mark.parametrize(
    ("start", "end", "kwargs", "message"),
    [
        ((1, 10), (1, 9), {}, r"shape \(1, 10\) and end_logits \(1, 9\)"),
        ((2, 10), (2, 10), {}, "1 windows as in features"),
        ((1, 9), (1, 9), {}, "at least the 10 tokens of the longest"),
        ((10,), (10,), {}, r"must be \(windows, length\)"),
        ((1, 10), (1, 10), {"n_best": 0}, "n_best=0 must be at least 1"),
        ((1, 10), (1, 10), {"max_answer_length": 0}, "max_answer_length=0 must be at least 1"),
    ],
)
def test_logits_that_do_not_fit(start, end, kwargs, message):
    with pytest.raises(ValueError, match=message):
        answers_from_logits([row()], [window_of(CONTEXT)], np.zeros(start), np.zeros(end), **kwargs)


def test_examples_that_do_not_fit():
    logits = np.zeros((2, 1, 10))
    with pytest.raises(
        ValueError, match=r"features\[0\] belongs to the question 'x', which is not among the 1 examples"
    ):
        answers_of([row()], [window_of(CONTEXT, "x")], logits)
    with pytest.raises(ValueError, match="1 of 2 examples have no features, 'other' say"):
        answers_of([row(), row(name="other")], [window_of(CONTEXT)], logits)


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
