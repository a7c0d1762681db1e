"""Question answering: windows of a context that hold the answers."""

from types import SimpleNamespace

import pytest

from tests.support.questions import CONTEXT, TEMPLATES, answer_of, answers_of, encode, make_tokenizer, peaked, row


def words_of(window, context):
    return [context[span[0] : span[1]] for span in window["offset_mapping"] if span is not None]


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
