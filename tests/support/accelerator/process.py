"""A process with the emulated device: `python -m tests.support.accelerator.process GROUP FOLDER [CASE ...]`.

It runs the cases of a group and leaves what was wrong with each in FOLDER/results.json; null is nothing.
"""

import gc
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from tests.support.accelerator import emulated  # noqa: F401  # also in a process that this one spawns


def told(error: Exception) -> str:
    """Return what was raised, and where in the package."""
    places = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
    return f"{type(error).__name__}: {error} ({' '.join(places[-4:])})"


def cases_of(group: str) -> dict[str, Callable[[Path], None]]:
    if group == "sites":  # which loads Flower
        from tests.support.accelerator.sites import sites

        return sites()
    if group == "counts":
        from tests.support.accelerator.counts import cases

        return cases()
    if group == "memory":
        from tests.support.accelerator.memory import cases

        return cases()
    from tests.support.accelerator.cases import GROUPS

    return GROUPS[group]()


def main(group: str, folder: Path, chosen: list[str]) -> None:
    torch.set_num_threads(1)
    results: dict[str, str | None] = {}
    cases = cases_of(group)
    gc.freeze()  # each run collects garbage, and would look at all that is loaded
    for name, case in cases.items():
        if chosen and name not in chosen:
            continue
        try:
            with mock.patch("hf_coefsfl.trainer.model_card.can_plot", return_value=False):  # as long as a round takes
                case(folder / name)
            results[name] = None
        except Exception as error:
            results[name] = told(error)
        (folder / "results.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
