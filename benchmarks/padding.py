"""Counts what padding would add to the exchange: tokens of the samples, of padded batches, and of max_length.

python benchmarks/padding.py codecs

It reads the training texts of a spec's tasks as their runs do. The factors are to the tokens that are sent without
padding: with the samples of each batch as long as its longest, in random batches, and with all as long as max_length,
which is the paper's accounting. Images have none.
"""

from __future__ import annotations

import argparse
from dataclasses import fields

import numpy as np

from hf_coefsfl.analysis.tables import format_table
from hf_coefsfl.compare import expand, load_spec
from hf_coefsfl.tasks import TASKS

ORDERS = 20  # random orders of the samples, of which the mean counts


def row(title: str, lengths: np.ndarray, batch_size: int, max_length: int) -> dict[str, object]:
    """Return the tokens and factors of one task."""
    generator = np.random.default_rng(0)
    whole = len(lengths) // batch_size * batch_size
    longest = [generator.permutation(lengths)[:whole].reshape(-1, batch_size).max(1).mean() for _ in range(ORDERS)]
    mean, padded = float(lengths.mean()), float(np.mean(longest))
    return {
        "task": title, "samples": len(lengths), "tokens": mean, "longest of a batch": padded, "max_length": max_length,
        "factor, batch": padded / mean, "factor, max_length": max_length / mean,
    }  # fmt: skip


def main() -> None:
    """Print a row for each task with texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spec", help="a comparison's file, or the name of one of recipes/")
    arguments = parser.parse_args()
    rows = []
    for title, run in {cell.spec.title: cell.first()[0] for cell in expand(load_spec(arguments.spec))}.items():
        task = TASKS[run.task]
        names = {field.name for field in fields(task.arguments_class)}
        arguments = task.arguments_class(**{name: value for name, value in run.options.items() if name in names})
        data = task(arguments).prepare(seed=0).train_dataset
        if "input_ids" in data.column_names:
            lengths = np.array([len(tokens) for tokens in data["input_ids"]])
            rows.append(
                row(title or run.task, lengths, run.options["per_device_train_batch_size"], arguments.max_length)
            )
    numbers = {"tokens": ".1f", "longest of a batch": ".1f", "factor, batch": ".2f", "factor, max_length": ".2f"}
    print(format_table(rows, {name: numbers.get(name, "") for name in rows[0]}, markdown=True))


if __name__ == "__main__":
    main()
