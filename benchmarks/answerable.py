"""Writes the short questions with an answer of a dataset in SQuAD's format, for small runs of `squad_v2`.

    python benchmarks/answerable.py

reads ../shared/data/squad_v2_half_dev and writes train.jsonl and validation.jsonl into outputs/squad_answerable. With
the questions that have no answer, a model learns first to answer none of them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--squad", default="../shared/data/squad_v2_half_dev", help="dataset in SQuAD's format")
    parser.add_argument("--model", default="../shared/models/granite-30m-roberta", help="whose tokens are counted")
    parser.add_argument("--output", type=Path, default=Path("outputs/squad_answerable"), help="where the questions go")
    parser.add_argument("--max_length", type=int, default=160, help="most tokens of a question with its context")
    arguments = parser.parse_args()
    tokenizer: Any = AutoTokenizer.from_pretrained(arguments.model)
    arguments.output.mkdir(parents=True, exist_ok=True)
    for split, rows in load_dataset(arguments.squad).items():
        answered: list[Any] = [row for row in rows if row["answers"]["text"]]
        pairs = [row["question"] for row in answered], [row["context"] for row in answered]
        lengths = [len(ids) for ids in tokenizer(*pairs, verbose=False)["input_ids"]]
        short = [row for row, length in zip(answered, lengths, strict=True) if length <= arguments.max_length]
        file = arguments.output / f"{split}.jsonl"
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in short), encoding="utf-8")
        print(f"{file}: {len(short)} questions, of {len(answered)} with an answer among {len(rows)}")


if __name__ == "__main__":
    main()
