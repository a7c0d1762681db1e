"""Extractive question answering: questions into windows of tokens, and logits of windows into answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Offsets = Sequence[Sequence[int] | None]


def encode_questions(
    examples: Mapping[str, list[Any]], tokenizer: Any, max_length: int = 384, stride: int = 128
) -> dict[str, list[Any]]:
    """Cut questions with their contexts into overlapping windows, for `Dataset.map(batched=True, remove_columns=...)`.

    A window is the question and as much of the context as fits. Nothing is padded. Pad on the right when making
    batches, whatever the tokenizer's habit is: positions count from the start of the window. A question is cut at
    half of what `max_length` leaves beside special tokens and stride, so that every window brings new context.

    Args:
        examples: the columns id, question, context and answers, a dict of text and answer_start (both empty if the
            question has no answer).
        tokenizer: a fast one, which knows the characters of a token.
        max_length: tokens of the longest window.
        stride: context tokens that neighbouring windows share.

    Returns:
        The inputs of the model, and for each window:

        - start_positions, end_positions: first and last token of the first answer, or `cls_index` twice if the
          window does not hold the whole answer or there is none.
        - example_id: the id of the question.
        - offset_mapping: first character and end of each token in the context, None for tokens outside of it.
        - cls_index: the token that stands for "no answer": the CLS token, or the first if there is none.
    """
    room = _check_room(tokenizer, max_length, stride)
    windows = tokenizer(
        _shortened([question.lstrip() for question in examples["question"]], tokenizer, room // 2),
        list(examples["context"]),
        truncation="only_second",
        max_length=max_length,
        stride=stride,
        padding=False,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    encoded: dict[str, list[Any]] = {name: windows[name] for name in tokenizer.model_input_names if name in windows}
    names = ("start_positions", "end_positions", "example_id", "offset_mapping", "cls_index")
    encoded |= {name: [] for name in names}
    for window, row in enumerate(windows["overflow_to_sample_mapping"]):
        parts = windows.sequence_ids(window)  # 0 in the question, 1 in the context, None for special tokens
        raw = windows["offset_mapping"][window]
        offsets = [span if part == 1 else None for span, part in zip(raw, parts, strict=True)]
        cls_index = _find_cls(windows["input_ids"][window], parts, tokenizer.cls_token_id)
        start, end = _find_answer(examples["answers"][row], offsets) or (cls_index, cls_index)
        for name, value in zip(names, (start, end, examples["id"][row], offsets, cls_index), strict=True):
            encoded[name].append(value)
    return encoded


def _check_room(tokenizer: Any, max_length: int, stride: int) -> int:
    """Return how many tokens of a window are left for the question and new context."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} does not tell the characters of its tokens, which answers are cut out by. "
            "Use a fast tokenizer, as AutoTokenizer loads."
        )
    if max_length > tokenizer.model_max_length:
        raise ValueError(
            f"max_length={max_length} is more than the model takes. Use at most {tokenizer.model_max_length}."
        )
    special = tokenizer.num_special_tokens_to_add(pair=True)
    largest = max_length - special - 2  # a token of the question and a new one of the context
    if largest < 0:
        raise ValueError(
            f"max_length={max_length} has no room for a question and a context. Use at least {special + 2}."
        )
    if not 0 <= stride <= largest:
        raise ValueError(
            f"stride={stride} must be from 0 to {largest} with max_length={max_length}: {special} special tokens, the "
            "question and new context need room too."
        )
    return max_length - special - stride


def _shortened(questions: list[str], tokenizer: Any, limit: int) -> list[str]:
    """Cut questions before the first token beyond the limit."""
    encoded = tokenizer(questions, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [
        question[: offsets[limit][0]].rstrip() if len(offsets) > limit else question
        for question, offsets in zip(questions, encoded["offset_mapping"], strict=True)
    ]


def _find_cls(tokens: list[int], parts: list[int | None], cls_id: int | None) -> int:
    # A text may spell the CLS token too: only one that the tokenizer added counts.
    found = (i for i, (token, part) in enumerate(zip(tokens, parts, strict=True)) if token == cls_id and part is None)
    return next(found, 0)


def _find_answer(answers: Mapping[str, Sequence[Any]], offsets: Offsets) -> tuple[int, int] | None:
    """Return the first and last token of the first answer, or None if the window does not hold all of it."""
    if not len(answers["text"]):
        return None
    text = answers["text"][0]
    first = answers["answer_start"][0] + len(text) - len(text.lstrip())  # tokens may leave out blanks at the ends
    end = first + len(text.strip())
    inside = [(i, span) for i, span in enumerate(offsets) if span is not None]
    if not inside or first == end or inside[0][1][0] > first or inside[-1][1][1] < end:
        return None
    touched = [i for i, span in inside if span[0] < end and span[1] > first]
    return (touched[0], touched[-1]) if touched else None


def answers_from_logits(
    examples: Iterable[Mapping[str, Any]],
    features: Iterable[Mapping[str, Any]],
    start_logits: ArrayLike,
    end_logits: ArrayLike,
    *,
    n_best: int = 20,
    max_answer_length: int = 30,
    null_score_diff_threshold: float = 0.0,
) -> list[dict[str, Any]]:
    """Return the answer to each question: the span with the highest sum of start and end logit, or none.

    Every span of up to `max_answer_length` tokens in any window of the question competes; of a span in several windows
    the highest score counts. "No answer" scores the sum of both logits at the CLS token, the lowest of all windows.

    Args:
        examples: rows with id and context, such as a `Dataset`.
        features: rows with example_id, offset_mapping and cls_index, as `encode_questions` makes them.
        start_logits: (windows, length), in the order of `features`. What is beyond a window's own length is ignored.
        end_logits: likewise.
        n_best: how many spans to keep for each question.
        max_answer_length: tokens of the longest answer.
        null_score_diff_threshold: "no answer" must beat the best span by more than this.

    Returns:
        For each example: id, prediction_text ("" for no answer), no_answer_probability, and n_best: dicts of text,
        score and probability, the best first. Probabilities are the softmax of these scores, "no answer" included.
    """
    for name, value in (("n_best", n_best), ("max_answer_length", max_answer_length)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    examples = list(examples)
    windows = list(features)
    start, end = _check_logits(start_logits, end_logits, windows)
    of_example = _group(examples, windows)
    answers = []
    for example in examples:
        null_score, best = np.inf, dict[tuple[int, int], float]()
        for window in of_example[example["id"]]:
            offsets, cls_index = windows[window]["offset_mapping"], windows[window].get("cls_index", 0)
            null_score = min(null_score, float(start[window, cls_index]) + float(end[window, cls_index]))
            usable = [span is not None and not _is_blank(example["context"], span) for span in offsets]
            length = len(offsets)
            scores, pairs = _best_spans(
                np.where(usable, start[window, :length], -np.inf),
                np.where(usable, end[window, :length], -np.inf),
                n_best,
                max_answer_length,
            )
            for score, (first, last) in zip(scores.tolist(), pairs.tolist(), strict=True):
                characters = (offsets[first][0], offsets[last][1])
                best[characters] = max(score, best.get(characters, -np.inf))
        answers.append(_answer(example, null_score, best, n_best, null_score_diff_threshold))
    return answers


def _check_logits(
    start_logits: ArrayLike, end_logits: ArrayLike, windows: list[Mapping[str, Any]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    start, end = np.asarray(start_logits, dtype=np.float64), np.asarray(end_logits, dtype=np.float64)
    longest = max((len(window["offset_mapping"]) for window in windows), default=0)
    if start.ndim != 2 or start.shape != end.shape or len(start) != len(windows) or start.shape[1] < longest:
        raise ValueError(
            f"start_logits have the shape {start.shape} and end_logits {end.shape}. Both must be (windows, length): "
            f"{len(windows)} windows as in features, and at least the {longest} tokens of the longest."
        )
    # A diverged model has logits that are not finite. They never win, so its evaluation ends in a low score.
    return np.where(np.isfinite(start), start, -np.inf), np.where(np.isfinite(end), end, -np.inf)


def _group(examples: list[Mapping[str, Any]], windows: list[Mapping[str, Any]]) -> dict[Any, list[int]]:
    """Return the numbers of each example's windows."""
    of_example: dict[Any, list[int]] = {example["id"]: [] for example in examples}
    for number, window in enumerate(windows):
        if window["example_id"] not in of_example:
            raise ValueError(
                f"features[{number}] belongs to the question {window['example_id']!r}, which is not among the "
                f"{len(examples)} examples. Give the examples that the features were made of."
            )
        of_example[window["example_id"]].append(number)
    bare = [name for name, numbers in of_example.items() if not numbers]
    if bare:
        raise ValueError(
            f"{len(bare)} of {len(examples)} examples have no features, for instance {bare[0]!r}. Give all windows "
            "that encode_questions made of them."
        )
    return of_example


def _is_blank(context: str, span: Sequence[int]) -> bool:
    return not context[span[0] : span[1]].strip()


def _best_spans(
    start: NDArray[np.float64], end: NDArray[np.float64], n_best: int, max_answer_length: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the scores of the best spans of a window, highest first, and their first and last tokens (spans, 2).

    Of equal spans the earlier one comes first, then the shorter one.
    """
    width = min(max_answer_length, len(start))
    padded = np.concatenate([end, np.full(width - 1, -np.inf)])
    # scores[i, d] is that of the span of tokens i to i + d
    scores = (start[:, None] + np.lib.stride_tricks.sliding_window_view(padded, width)).ravel()
    kept = min(n_best, len(scores))
    least = np.partition(scores, -kept)[-kept]
    above = np.flatnonzero(scores > least)
    above = above[np.argsort(-scores[above], kind="stable")]
    chosen = np.concatenate([above, np.flatnonzero(scores == least)[: kept - len(above)]])
    chosen = chosen[scores[chosen] > -np.inf]
    first, further = np.divmod(chosen, width)
    return scores[chosen], np.stack([first, first + further], axis=1)


def _answer(
    example: Mapping[str, Any],
    null_score: float,
    spans: Mapping[tuple[int, int], float],
    n_best: int,
    null_score_diff_threshold: float,
) -> dict[str, Any]:
    ranked = sorted(spans.items(), key=lambda item: (-item[1], item[0]))[:n_best]
    texts = [example["context"][first:end].strip() for (first, end), _ in ranked]
    refused = not ranked or null_score - ranked[0][1] > null_score_diff_threshold
    scores = np.array([null_score, *(score for _, score in ranked)])
    weights = np.exp(scores - scores.max()) if np.isfinite(scores.max()) else np.ones(1)  # nothing but no answer
    probabilities = weights / weights.sum()
    listed = [
        {"text": text, "score": float(score), "probability": float(probability)}
        for text, score, probability in zip(["", *texts], scores, probabilities, strict=True)
    ]
    return {
        "id": example["id"],
        "prediction_text": "" if refused else texts[0],
        "no_answer_probability": float(probabilities[0]),
        "n_best": sorted(listed, key=lambda entry: -entry["score"]),
    }
