"""The `coefsfl` command line: one module for each subcommand, with `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

import torch
from transformers.utils import logging

from .. import __version__
from . import compare_command, cost_command, methods_command, split_command, train_command

COMMANDS = {
    "compare": compare_command,
    "cost": cost_command,
    "methods": methods_command,
    "split": split_command,
    "train": train_command,
}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and leave with status 2."""
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: error: {line} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command with all its subcommands."""
    parser = _Parser(prog="coefsfl", description="Split federated fine-tuning of Hugging Face models.")
    parser.add_argument("--version", action="version", version=f"coefsfl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").splitlines()[0].partition(": ")[2]
        command = commands.add_parser(
            name,
            help=summary,
            description=summary[:1].upper() + summary[1:],
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run, refuse=command.error)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. What it was asked for goes to stdout, everything else to stderr."""
    arguments = make_parser().parse_args(argv)
    if not getattr(COMMANDS[arguments.command], "TRAINS", False):
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)  # what is counted here is small, and threads only wait for each other
    try:
        answer = arguments.run(arguments)
        if answer is not None:
            print(answer, flush=True)
    except ValueError as error:
        arguments.refuse(str(error))
    except BrokenPipeError:  # the reader (head, say) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
