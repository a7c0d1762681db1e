"""The command-line parser of every command and recipe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from ._suggest import did_you_mean


class OptionParser(argparse.ArgumentParser):
    """A parser that takes options with underscores or hyphens, and whose errors are one line.

    The help shows underscores. Options are not abbreviated.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def _spell_both_ways(self) -> None:
        for action in self._actions:
            names = [underscored(name) for name in action.option_strings]
            action.option_strings = list(dict.fromkeys(names))  # what help and errors show
            for name in names:
                self._option_string_actions[name] = action
                if name.startswith("--"):
                    self._option_string_actions["--" + name[2:].replace("_", "-")] = action

    def format_help(self) -> str:
        """Return the help, which shows one spelling."""
        self._spell_both_ways()
        return super().format_help()

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        """Parse as argparse does, with every option in both spellings."""
        self._spell_both_ways()
        return super().parse_known_args(args, namespace)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse a command line; what is left over is an error that names the nearest option."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            shown = [name for action in self._actions for name in action.option_strings]
            near = did_you_mean(unknown[0].partition("=")[0], shown) if unknown[0].startswith("-") else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}.{near}")
        return found

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line and leave with status 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (see {self.prog} --help)\n")


def underscored(option: str) -> str:
    """Return an option as the help shows it."""
    return "--" + option[2:].replace("-", "_") if option.startswith("--") else option
