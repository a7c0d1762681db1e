"""What a run says when Ctrl-C or the disk stops it: how far it came, and the command that goes on."""

from __future__ import annotations

import logging
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePath

import psutil
from transformers import ProgressCallback

from .._io import disk_fault
from ..trainer.checkpoints import last_complete
from ..trainer.trainer import SplitFedTrainer

STATUS = 130  # of a process that SIGINT ended
_RESUME = ("--resume_from_checkpoint", "last")
_LAUNCHERS = ("accelerate", "torchrun")  # scripts
_LAUNCHER_MODULES = ("accelerate.commands.launch", "torch.distributed.run")


@contextmanager
def interruptible(trainer: SplitFedTrainer, prog: str, argv: Sequence[str] | None) -> Iterator[None]:
    """Answer Ctrl-C, and a disk that takes no more, with one line of the main process and without a traceback.

    The status is 130 or 1.

    Args:
        trainer: trains inside.
        prog: the command up to its options.
        argv: the options; None: those of the process.
    """
    command = resuming_command(
        prog, argv, trainer.args.overwrite_output_dir
    )  # now, as the launcher may be gone by then
    try:
        yield
    except KeyboardInterrupt:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # launchers pass on a second one
        _tell(trainer, command)
        if not _is_launched():
            signal.signal(signal.SIGINT, before)
        sys.exit(STATUS)
    except Exception as error:
        why = disk_fault(error)
        if why is None:
            raise
        _tell(trainer, command, why)
        sys.exit(1)


def _tell(trainer: SplitFedTrainer, command: str, why: str | None = None) -> None:
    bar = getattr(trainer.pop_callback(ProgressCallback), "training_bar", None)
    if bar is not None:
        bar.close()  # else it is drawn once more, below the line
    if trainer.is_world_process_zero():
        print(f"\n{_told(trainer, command, why)}", file=sys.stderr, flush=True)


def _told(trainer: SplitFedTrainer, command: str, why: str | None) -> str:
    done, rounds, folder = trainer.state.global_step, trainer.args.num_rounds, str(trainer.args.output_dir)
    logging.disable()  # an unfinished checkpoint is no news here
    checkpoint = last_complete(folder)
    logging.disable(logging.NOTSET)
    where = f"in round {done + 1} of {rounds}" if done < rounds else f"after round {rounds} of {rounds}"
    if why is not None:
        where = f"after {done} of {rounds} rounds because {why}"
    if checkpoint is None:
        return f"Stopped {where}, before the first checkpoint. To begin again: {command}"
    return f"Stopped {where}. The last checkpoint is {checkpoint}. To go on: {command}"


def resuming_command(prog: str, argv: Sequence[str] | None, overwrites: bool = False) -> str:
    """Return the command that goes on with this run, which may have overwritten another; with the launcher, if any."""
    given = list(sys.argv[1:] if argv is None else argv)
    own = prog.split() if argv is not None else ["python", sys.argv[0]]
    words = _without_tokens(_launched_by() or [*own, *given])
    if overwrites:
        words += ["--overwrite_output_dir", "false"]
    if tuple(words[-2:]) != _RESUME:
        words += _RESUME
    return shlex.join(words)


def _without_tokens(words: Sequence[str]) -> list[str]:
    """Return a command line without the values of tokens, which must not get into logs."""
    kept: list[str] = []
    for word, before in zip(words, ["", *words[:-1]], strict=True):
        secret = [re.fullmatch(r"--\w*[-_]token", text) for text in (before, word.partition("=")[0])]
        kept += ["..." if secret[0] else f"{word.partition('=')[0]}=..." if secret[1] and "=" in word else word]
    return kept


def _is_launched() -> bool:
    return any(name in os.environ for name in ("LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"))


def _launched_by() -> list[str] | None:
    """Return the command line of the launcher that started this process, or None."""
    if not _is_launched():
        return None
    try:
        parent = psutil.Process().parent()
        words = parent.cmdline() if parent is not None else []
    except psutil.Error:
        return None
    if len(words) > 1 and PurePath(words[1]).name in _LAUNCHERS:
        return [PurePath(words[1]).name, *words[2:]]
    if len(words) > 2 and words[1] == "-m" and words[2] in _LAUNCHER_MODULES:
        return ["python", *words[1:]]
    return None
