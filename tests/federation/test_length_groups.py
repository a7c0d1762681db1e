"""Batches of samples of like length (`train_sampling_strategy="group_by_length"`)."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from transformers import DataCollatorWithPadding

from hf_coefsfl.federation.columns import row_lengths
from hf_coefsfl.federation.sampling import shuffled_batches
from tests.support.federated import images, same, tiny_bert, trainer, weights
from tests.support.words import words_tokenizer

GROUPED = {"train_sampling_strategy": "group_by_length"}


def short_and_long(size: int = 48) -> Dataset:
    """Texts without padding, of 3 to 8 tokens."""
    rng = np.random.default_rng(0)
    widths = rng.integers(3, 9, size)
    rows = [{"input_ids": rng.integers(5, 20, n).tolist(), "labels": int(n % 3)} for n in widths]
    return Dataset.from_list([row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows])


@given(st.integers(0, 2**31), st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 7))
def test_no_batch_reaches_into_the_lengths_of_another(seed: int, lengths: list[int], size: int) -> None:
    batches = shuffled_batches(seed, 1, 2, len(lengths), size, lengths=lengths)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    spans = sorted((min(lengths[i] for i in batch), max(lengths[i] for i in batch)) for batch in batches)
    assert all(low[1] <= high[0] for low, high in pairwise(spans))
    assert sorted(map(len, batches)) == sorted(map(len, shuffled_batches(seed, 1, 2, len(lengths), size)))


def test_order_and_ties_are_drawn_anew_in_each_round() -> None:
    lengths = [3] * 8 + [9] * 8
    rounds = [shuffled_batches(0, t, 0, 16, 4, lengths=lengths) for t in range(20)]
    assert {tuple(lengths[batch[0]] for batch in batches) for batches in rounds} > {(3, 3, 9, 9), (9, 9, 3, 3)}
    assert len({frozenset(map(frozenset, batches)) for batches in rounds}) > 10
    assert rounds[3] == shuffled_batches(0, 3, 0, 16, 4, lengths=lengths)


def run(folder: Path, **options: Any) -> Any:
    fixed = {"num_rounds": 2, "warmup_rounds": 0, "num_clients": 3, "participation": 1.0, "method": "reuse"}
    collate = DataCollatorWithPadding(words_tokenizer())
    built = trainer(folder, model=tiny_bert(), data=short_and_long(), data_collator=collate, **(fixed | options))
    built.train()
    return built


def test_grouping_saves_padding_and_changes_no_label(tmp_path: Path) -> None:
    plain, grouped = run(tmp_path / "plain"), run(tmp_path / "grouped", **GROUPED)
    again = run(tmp_path / "again", **GROUPED, dataloader_num_workers=1)
    assert same(weights(grouped), weights(again)) and not same(weights(grouped), weights(plain))
    padded, rows = [], []
    for built in (plain, grouped):
        batches = [b for client in range(3) for b in built.rounds.data.batches(1, client)]
        padded.append(sum(int((b["attention_mask"] == 0).sum()) for b in batches))
        rows.append(sorted(tuple(ids[ids != 0].tolist()) for b in batches for ids in b["input_ids"]))
    assert padded[1] < padded[0] / 2 and rows[0] == rows[1]


def test_what_does_not_fill_a_batch_is_drawn_anew_in_each_round() -> None:
    lengths = list(range(9, 0, -1))
    rounds = [shuffled_batches(0, t, 0, 9, 4, drop_last=True, lengths=lengths) for t in range(30)]
    assert all([len(batch) for batch in batches] == [4, 4] for batches in rounds)
    left = {i for batches in rounds for i in {*range(9)} - {i for batch in batches for i in batch}}
    assert len(left) > 5  # not only the shortest


def test_lengths_of_chosen_rows_and_of_lists() -> None:
    data = short_and_long(5)
    widths = [len(data[i]["input_ids"]) for i in range(5)]
    assert row_lengths(data.select([1, 3])).tolist() == [widths[1], widths[3]]
    assert row_lengths([dict(row) for row in data]).tolist() == widths


def test_what_has_no_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs a list of tokens in each row, in a column 'input_ids'.* pixel_values"):
        trainer(tmp_path, data=images(), **GROUPED)
    with pytest.raises(ValueError, match=r"in a column 'input_ids'"):
        row_lengths([{"input_ids": "12"}, {"input_ids": "13"}])
    with pytest.raises(ValueError, match=r"length_column_name='n' does not work .* number of tokens in input_ids"):
        trainer(tmp_path, **GROUPED, length_column_name="n")
    with pytest.raises(ValueError, match=r"train_sampling_strategy='sequential' is not allowed.* group_by_length"):
        trainer(tmp_path, train_sampling_strategy="sequential")
