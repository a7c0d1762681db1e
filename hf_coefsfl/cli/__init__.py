"""The `coefsfl` command line: one module for each subcommand, with `add_arguments` and `run`.

A module is imported when its command runs, so that the rest of the command line answers without PyTorch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from .. import __version__
from .._io import disk_fault
from .._parser import OptionParser
from .._suggest import did_you_mean
from .known_options import check_options, check_task, options_of_command

COMMANDS = {  # and what they do, as the first line of their modules says
    "compare": "train many settings, as a spec lists them, and report them in the paper's tables",
    "cost": "what a round costs each method in transfers, bytes, FLOPs and memory, without training",
    "env": "versions, devices and settings of this machine, for a bug report",
    "methods": "the methods, their options and what crosses the cut",
    "split": "write the half of the model that clients of a deployed run hold, with its tokenizer or processor",
    "train": "fine-tune a model on one of the tasks, evaluate it, save and describe the adapter",
}


def make_parser() -> OptionParser:
    """Return the parser of what comes before a command."""
    commands = "\n".join(f"  {name:<8} {summary}" for name, summary in COMMANDS.items())
    parser = OptionParser(
        prog="coefsfl",
        usage="coefsfl [-h] [--version] command ...",
        description="Split federated fine-tuning of Hugging Face models.",
        epilog=f"commands:\n{commands}\n\n`coefsfl COMMAND --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"coefsfl {__version__}")
    return parser


def command_parser(name: str) -> tuple[Any, OptionParser]:
    """Return the module of a command and its parser."""
    module = import_module(f".{name}_command", __name__)
    summary = COMMANDS[name]
    parser = OptionParser(
        prog=f"coefsfl {name}",
        description=summary[:1].upper() + summary[1:],
        epilog=module.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    return module, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. What it was asked for goes to stdout, everything else to stderr."""
    parser = make_parser()
    name, *given = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if name.startswith("-"):
        parser.parse_args([name])
        parser.error("the command comes first, then its options.")
    if name not in COMMANDS:
        parser.error(f"unknown command {name!r}.{did_you_mean(name, COMMANDS)} Choose from {', '.join(COMMANDS)}.")
    parser.prog = f"coefsfl {name}"
    try:
        _check_early(name, given)
        module, parser = command_parser(name)
        arguments = parser.parse_args(given)
        if not getattr(module, "SHOWS_ALL", False):
            _quieten()
        answer = module.run(arguments)
        if answer is not None:
            print(answer, flush=True)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print(f"\n{parser.prog}: stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader (head, say) has seen enough
        _drop_output()
    except Exception as error:
        why = disk_fault(error)
        if why is None:
            raise
        try:
            sys.stdout.flush()
        except OSError:  # it was the answer itself, and would be tried again at the end
            _drop_output()
        print(f"{parser.prog}: error: {why}.", file=sys.stderr)
        return 1
    return 0


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _check_early(name: str, given: Sequence[str]) -> None:
    """Refuse what can be refused before the modules of the command are imported."""
    if name in ("train", "split"):
        check_task(name, given)
    else:
        check_options(given, options_of_command(name))


def _quieten() -> None:
    """Show no warnings and progress of libraries: what is counted here is small."""
    import warnings

    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # threads would only wait for each other
