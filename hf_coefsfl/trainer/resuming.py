"""Starting, resuming and finishing a run: the output folder is one run's, and a checkpoint goes on as the same run."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from accelerate.utils import broadcast_object_list
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from .._io import write_atomically
from ..analysis.staleness import StalenessProbe, load_probe
from ..config import SplitFedConfig
from ..federation.ledger import Ledger
from ..federation.server import ServerRounds
from .checkpoints import (
    LEDGER_NAME,
    PROBE_NAME,
    STATE_NAME,
    checkpoints_in,
    clear,
    fault,
    last_complete,
    rotate,
    rounds_of,
    seal,
)
from .identity import Record, compare, identity_of, read_identity, schedule_changes, write_identity
from .launching import at_work
from .output_folder import (
    ARGS_NAME,
    SUMMARY_NAME,
    FolderLock,
    RunRefused,
    check_free,
    later_checkpoints,
    remove_run,
)

if TYPE_CHECKING:
    from .trainer import SplitFedTrainer

logger = logging.getLogger(__name__)
LAST = "last"  # resume from the newest complete checkpoint of the output folder, or begin if there is none


class RoundsLost(RunRefused):
    """Rounds go by in which too few clients are left."""


class ResumingTrainer(Trainer):
    """The part of `SplitFedTrainer` that writes checkpoints and decides whether a run may begin or go on."""

    args: SplitFedConfig
    ledger: Ledger
    probe: StalenessProbe
    rounds: ServerRounds | None
    best_round: int | None
    already_finished = False  # the last call of `train` found nothing left to train
    _reports: list[dict[str, float]]
    _resumed: str | None = None  # the checkpoint that this run goes on from
    _identity: Record | None = None  # of the run that this trainer has begun
    _lock: FolderLock | None = None

    # ---- Beginning, going on, and being done ----

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train for `args.num_rounds` rounds.

        `resume_from_checkpoint` is a checkpoint, True for the last complete one of the output folder, or "last" for the
        same if there is one. A checkpoint of a run with other settings is refused. Without it the ledger starts anew,
        and an output folder that holds another run is refused unless `args.overwrite_output_dir` is set.
        """
        if self.rounds is None:
            raise ValueError("Training needs a train_dataset.")
        with at_work(), self.holding_folder():
            checkpoint = self._resumed = self._in_main_process(lambda: self._begin(resume_from_checkpoint))
            told = self.args.make_method().defaults_of_run(self.args.per_device_train_batch_size)
            if told and self.is_world_process_zero():
                logger.info(told)
            self.ledger, self._reports, self.probe.points, self.best_round = Ledger(), [], [], None
            if checkpoint is None:
                self.rounds.set_up_method()
            self.already_finished = checkpoint is not None and _rounds_done(checkpoint) == self.args.num_rounds
            if self.already_finished:
                return self._finished(checkpoint)
            try:
                return super().train(checkpoint, *args, **kwargs)
            finally:
                self.rounds.close()

    @contextmanager
    def holding_folder(self) -> Iterator[None]:
        """Keep other processes from training into the output folder; all processes of a launch are one run."""
        self._lock = lock = self._lock or FolderLock(self.args.output_dir or "")
        self._in_main_process(lock.acquire)
        try:
            yield
        finally:
            if self.args.process_index == 0:
                lock.release()

    def _in_main_process(self, action: Any) -> Any:
        """Return what an action returns in the main process, or raise what it raises there, in every process."""
        outcome: list[Any] = [None, None]
        if self.args.process_index == 0:
            try:
                outcome[0] = action()
            except Exception as error:
                broadcast_object_list([None, str(error)])
                raise
        broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise RunRefused(outcome[1])
        return outcome[0]

    def check(self, resume_from_checkpoint: str | bool | None = None) -> None:
        """Raise what `train` would raise if the run may not begin or go on. Nothing is written."""
        self._in_main_process(lambda: bool(self._admitted(resume_from_checkpoint, tell=False)))

    def _begin(self, wanted: str | bool | None) -> str | None:
        """Return the checkpoint to go on from, if the run may, and put the output folder into order."""
        folder = Path(self.args.output_dir or "")
        checkpoint, identity = self._admitted(wanted)
        self._identity = identity
        if checkpoint is None or not _lies_in(checkpoint, folder):
            remove_run(folder)
        elif _rounds_done(checkpoint) == self.args.num_rounds:
            return checkpoint  # a finished run stays as it is
        else:
            (folder / SUMMARY_NAME).unlink(missing_ok=True)  # of fewer rounds
            for later in later_checkpoints(folder, _rounds_done(checkpoint)):  # which "last" would take for this run's
                clear(later)
        write_identity(identity, folder)
        return checkpoint

    def _admitted(self, wanted: str | bool | None, tell: bool = True) -> tuple[str | None, Record]:
        """Return the checkpoint to go on from and the identity of the run, or refuse it; tell what else differs."""
        folder = Path(self.args.output_dir or "")
        checkpoint = self._checkpoint(wanted, folder)
        identity = identity_of(cast("SplitFedTrainer", self))
        if checkpoint is not None:
            self._check_resume(checkpoint, identity, tell)
        if self._identity is not None:  # it is this trainer's own run that begins again or goes on
            return checkpoint, identity
        if checkpoint is not None and _lies_in(checkpoint, folder):
            if self.args.overwrite_output_dir:
                raise RunRefused(
                    f"overwrite_output_dir would delete {checkpoint}, which resume_from_checkpoint={wanted!r} needs. "
                    "Leave one of them out."
                )
            later = later_checkpoints(folder, _rounds_done(checkpoint))
            if later and _rounds_done(checkpoint) == self.args.num_rounds:
                raise RunRefused(
                    f"{folder} holds a run that came as far as {later[-1].name}, and {checkpoint} is at round "
                    f"{self.args.num_rounds} of {self.args.num_rounds}. Set num_rounds to more, or give another "
                    "output_dir."
                )
            return checkpoint, identity
        before = None if (folder / SUMMARY_NAME).exists() else read_identity(folder)
        same = before is not None and before.get("num_rounds") == identity["num_rounds"]
        if wanted != LAST or before is None or not same or compare(before, identity).refused:
            check_free(self.args)  # else it was this run that left no checkpoint, and begins again, to the same result
        return checkpoint, identity

    def _checkpoint(self, wanted: str | bool | None, folder: Path) -> str | None:
        if not wanted:
            return None
        if wanted is True or wanted == LAST:
            found = last_complete(folder)
            if found is None and wanted is True:
                raise RunRefused(f"There is no complete checkpoint in {folder} to resume from.")
            return found
        wrong = fault(Path(wanted))
        if wrong is not None:
            raise RunRefused(f"The checkpoint {wanted} cannot be resumed from: {wrong}.")
        return wanted

    def _check_resume(self, checkpoint: str, identity: Record, tell: bool) -> None:
        """Refuse a checkpoint of a run with another result, and tell what else is different."""
        before, done, wanted = read_identity(Path(checkpoint)), _rounds_done(checkpoint), self.args.num_rounds
        if done > wanted:
            raise RunRefused(
                f"{checkpoint} is at round {done} already, and num_rounds={wanted}. Resume from an earlier checkpoint, "
                f"or set num_rounds to {done} or more."
            )
        found = None if before is None else compare(before, identity)
        if found is not None and found.refused:
            lines = "".join(f"\n  {line}" for line in found.refused)
            raise RunRefused(
                f"{checkpoint} is of a run with other settings, which would change the result:{lines}\nSet them as "
                "they were to go on with that run, or give another output_dir for a new one."
            )
        if not tell:
            return
        if before is None or found is None:
            logger.warning(
                "%s does not say which settings it was made with (by an earlier version): they are not compared.",
                checkpoint,
            )
            return
        if found.told:
            logger.warning("Resuming from %s with differences: %s.", checkpoint, "; ".join(found.told))
        rounds = before.get("num_rounds", wanted)
        if rounds == wanted:
            return
        logger.warning("The run goes on to round %d instead of %d.", wanted, rounds)
        if schedule_changes(self.args, rounds, done):
            logger.warning(
                "lr_scheduler_type=%r depends on the number of rounds: the learning rate follows the schedule of %d "
                "rounds from round %d on, while the rounds before followed that of %d. The result is not that of a run "
                "of %d rounds from the start.",
                str(getattr(self.args.lr_scheduler_type, "value", self.args.lr_scheduler_type)),
                wanted, done + 1, rounds, wanted,
            )  # fmt: skip

    def _finished(self, checkpoint: str) -> TrainOutput:
        """Return the result of a run that has no round left, with its weights, logs and ledger in this trainer."""
        self._load_from_checkpoint(checkpoint)
        folder, done = Path(self.args.output_dir or ""), _rounds_done(checkpoint)
        states = [_state(path) for path in (folder, Path(checkpoint)) if (path / TRAINER_STATE_NAME).exists()]
        self.state = next(state for state in states if state.global_step == done)  # the folder's has more logs
        self.state.init_training_references(self, done, 1, None)
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None:
            self.state.best_model_checkpoint = str(Path(checkpoint).with_name(Path(best).name))
            self._load_best_model()
        if self.is_world_process_zero():
            logger.warning("%s is already at round %d of %d: nothing is left to train.", checkpoint, done, done)
        losses = [entry["loss"] for entry in self.state.log_history if "loss" in entry]
        ended = [entry for entry in self.state.log_history if "train_loss" in entry]
        metrics = dict(ended[-1]) if ended else {"train_loss": sum(losses) / max(len(losses), 1)}
        return TrainOutput(done, metrics["train_loss"], metrics)

    def _init_training_state(self, max_steps: int, *args: Any) -> tuple[int, int]:
        """Take `eval_steps`, `save_steps` and `logging_steps` from the arguments, not from the checkpoint."""
        found = super()._init_training_state(max_steps, *args)
        self.state.compute_steps(self.args, max_steps)
        best = self.state.best_model_checkpoint
        if self._resumed is not None and self.state.best_global_step and not (best and Path(best).is_dir()):
            # The folder was moved, or is named from elsewhere.
            beside = Path(self._resumed).with_name(f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
            self.state.best_model_checkpoint = str(beside) if beside.is_dir() else best
        return found

    # ---- Checkpoints ----

    def _save_arguments(self, folder: Path) -> None:
        write_atomically(folder / ARGS_NAME, json.dumps(self.args.to_dict(), indent=2, default=str) + "\n")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint and seal it; only then are older ones deleted."""
        args, output_dir = self.args, self._get_output_dir(trial=trial)
        folder = Path(output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if args.should_save:
            clear(folder)
        self.accelerator.wait_for_everyone()
        limit, args.save_total_limit = args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            args.save_total_limit = limit
        self.accelerator.wait_for_everyone()  # each process has left its random state there
        if args.should_save:
            self._save_arguments(folder)
            if self._identity is not None:
                write_identity(self._identity, folder)
            seal(folder)
            # Whether clients can train from the newest checkpoint is not known yet; if none can, the run needs another.
            proven = self._proven_checkpoint() if args.on_client_failure == "skip" else None
            rotate(output_dir, limit, (self.state.best_model_checkpoint, proven))

    def _proven_checkpoint(self) -> str | None:
        """Return the newest checkpoint of the output folder whose next round had enough clients left."""
        assert self.rounds is not None
        left, least = self.ledger.clients_left(dropped=False), self.rounds.least_clients()
        found = checkpoints_in(Path(self.args.output_dir or ""))
        proven = [path for path in found if left.get(rounds_of(path) + 1, 0) >= least]
        return str(proven[-1]) if proven else None

    def end_if_lost(self) -> None:
        """Raise an error if the last `args.max_lost_rounds` rounds in a row had too few clients left."""
        assert self.rounds is not None
        left, least = self.ledger.clients_left(dropped=True), self.rounds.least_clients()
        most, bound = self.args.max_lost_rounds, self.args.client_bound
        last = sorted(left)[-most:]
        if not most or len(last) < most or any(left[number] >= least for number in last):
            return
        proven = self._proven_checkpoint()
        again = "start anew" if proven is None else f"resume from {proven}, from which clients could still train,"
        few = "no client was" if least == 1 else f"fewer than {least} clients were"
        changed = f"with {f'a client_bound below {bound:g}' if bound else 'client_bound=5'} or another aggregation"
        if cast("SplitFedTrainer", self).federation is None:  # a simulation has the clients that its data has
            changed = f"without that client, {changed}"
        raise RoundsLost(
            f"Rounds {last[0]} to {last[-1]}: {few} left in {most} rounds in a row. The log and {LEDGER_NAME} say why "
            f"they failed. If a client has spoilt the weights, {again} {changed}. max_lost_rounds=0 lets a run go on "
            "all the same."
        )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if isinstance(self.model, PeftModel):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._load_weights(resume_from_checkpoint)
        self.ledger = Ledger.load(Path(resume_from_checkpoint) / LEDGER_NAME)
        if self.rounds is not None:
            probe, state = (Path(resume_from_checkpoint) / name for name in (PROBE_NAME, STATE_NAME))
            self.probe.points = load_probe(probe) if probe.exists() else []
            self.rounds.set_up_method()
            if state.exists():
                kept = load_file(state)  # to the CPU: safetensors does not know the device "cpu:0" of many processes
                self.rounds.load_state_dict({name: t.to(self.args.device) for name, t in kept.items()})
            elif self.rounds.state_dict():
                raise ValueError(
                    f"{resume_from_checkpoint} holds no {STATE_NAME}, which method={self.args.method!r} needs: it is "
                    "incomplete or of another method. Resume with the method it was made with."
                )

    def _load_best_model(self) -> None:
        if isinstance(self.model, PeftModel):
            super()._load_best_model()
        else:
            self._load_weights(str(self.state.best_model_checkpoint))
        if Path(str(self.state.best_model_checkpoint)).is_dir():  # else nothing was loaded
            self.best_round = int(str(self.state.best_model_checkpoint).rpartition("-")[2])

    def _load_weights(self, folder: str) -> None:
        """Load an unsplit model. `from_pretrained` knows the names that `save_pretrained` writes; Trainer does not."""
        assert isinstance(self.model, PreTrainedModel)
        self.model.load_state_dict(type(self.model).from_pretrained(folder, dtype=self.model.dtype).state_dict())


def _state(folder: Path) -> TrainerState:
    return TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))


def _lies_in(checkpoint: str, folder: Path) -> bool:
    return Path(checkpoint).resolve().parent == folder.resolve()


def _rounds_done(checkpoint: str) -> int:
    return _state(Path(checkpoint)).global_step
