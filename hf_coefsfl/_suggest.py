"""The known name that a mistyped one was probably meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_COUNTS = ("num_train_epochs", "num_epochs", "epochs", "max_steps")  # what other trainers count


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Return " Did you mean ...?" with the known names nearest to the given one, or "" if none is near.

    ```python
    >>> did_you_mean("trian", ["train", "split"])
    ' Did you mean train?'

    ```
    """
    by_spelling = {_plain(name): name for name in known}
    if _plain(str(given)).strip("_") in _COUNTS and any(name.strip("_") == "num_rounds" for name in by_spelling):
        return " A run counts rounds: num_rounds sets them, local_epochs the epochs of a client in a round."
    near = difflib.get_close_matches(_plain(str(given)), by_spelling, n=2, cutoff=0.7)
    return f" Did you mean {' or '.join(by_spelling[name] for name in near)}?" if near else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
