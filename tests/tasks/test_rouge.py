"""ROUGE by hand, and against a search through all subsequences."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_coefsfl.tasks.metrics import load_metric
from hf_coefsfl.tasks.metrics.rouge.rouge import common_length


def test_by_hand() -> None:
    found = load_metric("rouge").compute(
        predictions=["The cat sat, on a mat!", "mat mat"], references=["the cat lay on the mat", "a dog"]
    )
    # the, cat, on and mat of 6 and 6 words; "the cat" of 5 and 5 pairs; in this order 4; the second text has nothing
    assert found == pytest.approx({"rouge1": (8 / 12) / 2, "rouge2": (2 / 10) / 2, "rougeL": (8 / 12) / 2})


def test_the_order_counts_for_the_longest_common_subsequence_only() -> None:
    found = load_metric("rouge").compute(predictions=["b a"], references=["A b"])
    assert found == pytest.approx({"rouge1": 1.0, "rouge2": 0.0, "rougeL": 0.5})


def test_texts_without_words_score_nothing() -> None:
    assert set(load_metric("rouge").compute(predictions=["...", ""], references=["", "a"]).values()) == {0.0}
    with pytest.raises(ValueError, match="Got no texts"):
        load_metric("rouge").compute(predictions=[], references=[])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=7), st.lists(st.sampled_from("abc"), max_size=7))
def test_longest_common_subsequence_against_all_of_them(found: list[str], wanted: list[str]) -> None:
    def parts(words: list[str]) -> set[tuple[str, ...]]:
        return {part for n in range(len(words) + 1) for part in combinations(words, n)}

    assert common_length(found, wanted) == max(map(len, parts(found) & parts(wanted)))
