"""Question answering: answers out of logits, by hand and against brute force."""

import math

import numpy as np
import pytest

from hf_coefsfl.tasks.spans import answers_from_logits
from tests.support.questions import CONTEXT, answers_of, encode, make_tokenizer, row, text_at


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
    with pytest.raises(ValueError, match="1 of 2 examples have no features, for instance 'other'"):
        answers_of([row(), row(name="other")], [window_of(CONTEXT)], logits)
