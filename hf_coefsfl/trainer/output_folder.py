"""The output folder of a run: who may write into it, and what a new run removes first."""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .checkpoints import LEDGER_NAME, PROBE_NAME, SEAL_NAME, STATE_NAME, checkpoints_in, clear, rounds_of
from .identity import IDENTITY_NAME, read_identity
from .model_card import CARD_NAME, PLOT_NAME

LOCK_NAME = ".lock"
ARGS_NAME = "training_args.json"
SUMMARY_NAME = "summary.json"  # of a finished run
GENERATIONS_NAME = "generations.jsonl"  # some answers of a language model
# What only a run writes. Weights of the whole model are not among it: the base model may lie in the same folder.
_WRITTEN = (
    IDENTITY_NAME, SUMMARY_NAME, TRAINER_STATE_NAME, SAFETENSORS_WEIGHTS_NAME, "adapter_config.json",
    "client/adapter_model.safetensors", "client/adapter_config.json", "server/adapter_model.safetensors",
    "server/adapter_config.json", LEDGER_NAME, ARGS_NAME, PROBE_NAME, "staleness.png", STATE_NAME,
    "generations*.jsonl",
)  # fmt: skip
_SIGNS = (IDENTITY_NAME, SUMMARY_NAME, TRAINER_STATE_NAME, LEDGER_NAME)  # that a run was here
CARD_TAG = "split-federated-learning"  # in the header of every card
_ALL_WEIGHTS = (
    SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, "model-*-of-*.safetensors", "client/*.safetensors",
    "server/*.safetensors",
)  # fmt: skip


class RunRefused(ValueError):
    """A run may not begin in a folder, or may not go on from a checkpoint. The message says why, and what to do."""


def results_in(folder: Path) -> str | None:
    """Return what a folder holds of a run that would be lost or mixed up with another, or None."""
    if not folder.is_dir():
        return None
    checkpoints = [path.name for path in _checkpoints(folder) if (path / SEAL_NAME).exists()]
    if checkpoints:
        return checkpoints[-1]
    names = [SUMMARY_NAME, SAFETENSORS_WEIGHTS_NAME]
    if _trained_all_weights(folder):
        names += [SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME]
    return next((name for name in names if (folder / name).exists()), None)


def check_writable(args: TrainingArguments) -> None:
    """Refuse an output folder, or a place to make it in, that cannot be written to. Nothing is written."""
    folder = Path(args.output_dir or "").absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "read-only" if there.is_dir() else "not a folder"
        raise RunRefused(f"output_dir={args.output_dir!r} cannot be written to: {there} is {reason}. Give another one.")


def check_free(args: TrainingArguments) -> None:
    """Refuse an output folder that holds a run, unless it may be overwritten."""
    folder = Path(args.output_dir or "")
    found = results_in(folder)
    if found is not None and not getattr(args, "overwrite_output_dir", False):
        raise RunRefused(
            f"{folder} holds a run already ({_describe(folder, found)}). Give another output_dir, set "
            "resume_from_checkpoint to go on with that run, or overwrite_output_dir to delete it and start anew."
        )


def remove_run(folder: Path) -> None:
    """Remove what an older run left in a folder, its checkpoints first; other files stay."""
    if not folder.is_dir() or not (_checkpoints(folder) or any((folder / name).exists() for name in _SIGNS)):
        return
    patterns = [*_WRITTEN, *(_ALL_WEIGHTS if _trained_all_weights(folder) else ())]
    for path in _checkpoints(folder):
        clear(path)
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        path.unlink()
    card = folder / CARD_NAME
    if card.is_file() and CARD_TAG in card.read_text(encoding="utf-8", errors="replace"):
        card.unlink()
        (folder / PLOT_NAME).unlink(missing_ok=True)


class FolderLock:
    """A lock on an output folder. The operating system releases it when the process ends, however it ends."""

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self._lock: FileLock | None = None

    def acquire(self) -> None:
        """Take the lock once more, or raise a ValueError if another process has it."""
        if self._lock is None or not self._lock.is_locked:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.folder / LOCK_NAME, blocking=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise RunRefused(
                f"Another process writes into {self.folder} at this moment. Wait until it has ended, or give another "
                "output_dir."
            ) from None

    def release(self) -> None:
        """Give it back as often as it was taken."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder that this package wrote, in whole or in part, the newest last."""
    named = (SEAL_NAME, LEDGER_NAME)
    return [path for path in checkpoints_in(folder) if any((path / name).exists() for name in named)]


def later_checkpoints(folder: Path, done: int) -> list[Path]:
    """Return the checkpoints of a folder of more rounds than are done, the newest last."""
    return [path for path in _checkpoints(folder) if rounds_of(path) > done]


def _trained_all_weights(folder: Path) -> bool:
    record = read_identity(folder)
    return record is not None and bool(record["decides"].get("full_finetuning"))


def _describe(folder: Path, found: str) -> str:
    record = read_identity(folder)
    if record is None:
        return found
    return f"{found}; {record['decides'].get('method')}, {record.get('num_rounds')} rounds"
