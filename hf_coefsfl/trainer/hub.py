"""Upload the files of a run to the Hugging Face Hub."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar, cast

from huggingface_hub import CommitInfo, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import filter_repo_objects
from transformers import Trainer
from transformers.utils import PushInProgress

from ..split.sources import describe
from .model_card import CardArguments, public_name, write_card
from .weights import Weights

if TYPE_CHECKING:
    from .trainer import SplitFedTrainer

T = TypeVar("T")
logger = logging.getLogger(__name__)
_API = HfApi(library_name="hf_coefsfl")  # one for all: its background jobs run one after the other
# Patterns of files that are never uploaded; `*` matches slashes too.
NOT_UPLOADED = (
    "checkpoint-*",
    "run.json",  # checksums of the clients' data
    "generations*.jsonl",  # rows of the evaluation data
    "_*",
    ".*",  # .env and the like
    "*/.*",
    *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.joblib"),  # pickles run code when they are read
    "*method_state.safetensors",  # which may hold smashed data of the clients
    "*.tfevents.*",  # TensorBoard's are named after the machine
    "*.partial",
)
_PAUSES = (5, 30)  # seconds before another attempt, on top of what huggingface_hub repeats by itself


class UploadError(RuntimeError):
    """An upload failed. The message says why, where the files are and how to repeat it."""


@dataclass(frozen=True)
class Upload:
    """A folder on its way to a repo of the Hub."""

    folder: Path
    repo_id: str
    message: str
    revision: str | None = None
    private: bool = False
    token: str | None = field(default=None, repr=False)
    base: tuple[str, str] = ("", "")  # the path of the base model here, and what is said of it there

    @classmethod
    def of(
        cls, trainer: SplitFedTrainer, message: str, revision: str | None = None, token: str | None = None
    ) -> Upload:
        """Return the upload of a trainer's output folder to the repo that its arguments name."""
        args = trainer.args
        folder, base = Path(args.output_dir or ""), Weights.of(trainer).base
        return cls(
            folder,
            trainer.hub_model_id or args.hub_model_id or folder.absolute().name,
            message,
            revision or args.hub_revision,
            bool(args.hub_private_repo),
            token or args.hub_token,
            (base, trainer.card_arguments.finetuned_from or public_name(base)),
        )

    @property
    def command(self) -> str:
        """The shell command that repeats the upload."""
        words = ["hf", "upload", self.repo_id, str(self.folder), ".", "--repo-type", "model"]
        words += ["--revision", self.revision] * (self.revision is not None)  # type: ignore[list-item]
        words += ["--private"] * self.private
        for pattern in NOT_UPLOADED:
            words += ["--exclude", pattern]
        return shlex.join(words)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn every error into an `UploadError`: by then the files are on the disk."""
        try:
            yield
        except Exception as error:
            raise UploadError(
                f"The upload to {self.repo_id} failed: {describe(error, self.token)}\nAll files are in "
                f"{self.folder}. To upload them later (hf auth login, or HF_TOKEN, gives it the token):\n"
                f"  {self.command}"
            ) from None

    def run(self) -> CommitInfo:
        """Upload the folder as it is now."""
        with self.explained():
            copied = self._copied(_link)
        with copied:
            return self._upload(copied.name)

    def _upload(self, copied: str) -> CommitInfo:
        """Upload a copy of the folder in one commit; a missing branch is created."""

        def attempt() -> CommitInfo:
            if self.revision not in (None, "main") and not str(self.revision).startswith("refs/"):
                _API.create_branch(self.repo_id, branch=str(self.revision), token=self.token, exist_ok=True)
            return _API.upload_folder(
                repo_id=self.repo_id,
                folder_path=copied,
                commit_message=self.message,
                revision=self.revision,
                token=self.token,
                ignore_patterns=list(NOT_UPLOADED),
            )

        with self.explained():
            return retried(attempt, self.token)

    def _copied(self, copy: Callable[[Path, Path], Any]) -> TemporaryDirectory[str]:
        """Return a copy of what is uploaded, in which the base model has a name instead of a path of this machine."""
        copied = TemporaryDirectory(dir=self.folder, prefix="_upload-")
        here, there = (json.dumps(name) for name in self.base)
        for path in _uploaded_files(self.folder):
            source, target = self.folder / path, Path(copied.name) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            text = source.read_text(encoding="utf-8") if here != there and source.suffix == ".json" else ""
            if here in text:
                target.write_text(text.replace(here, there), encoding="utf-8")
            else:
                copy(source, target)
        return copied

    def in_background(self) -> Future[CommitInfo]:
        """Upload a copy of the folder as it is now, while training continues. A failure is also logged."""
        copied = self._copied(shutil.copyfile)

        def job() -> CommitInfo:
            with copied:
                try:
                    return self._upload(copied.name)
                except UploadError as error:
                    logger.error("%s", error)
                    raise

        return _API.run_as_future(job)


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, which takes no room; copy it if the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _uploaded_files(folder: Path) -> list[str]:
    """Return the paths below the folder that are uploaded; excluded folders are not searched."""
    tops = filter_repo_objects(sorted(path.name for path in folder.iterdir()), ignore_patterns=list(NOT_UPLOADED))
    files = [file for top in tops for file in (folder / top, *(folder / top).rglob("*")) if file.is_file()]
    names = [file.relative_to(folder).as_posix() for file in files]
    return list(filter_repo_objects(names, ignore_patterns=list(NOT_UPLOADED)))


def check_token(token: str | None) -> None:
    """Raise a ValueError if there is no token."""
    if token is None and get_token() is None:
        raise ValueError(
            "Pushing to the Hub needs a token and there is none. Log in with `hf auth login`, set HF_TOKEN, or pass "
            "hub_token; or leave push_to_hub out."
        )


def make_repo(create: Callable[[], None], token: str | None) -> None:
    """Create the repo with `create`; a failure is a ValueError with the reason."""
    check_token(token)
    try:
        retried(create, token)
    except (HTTPError, ConnectionError) as error:
        raise ValueError(
            f"The repo on the Hub could not be made: {describe(error, token)} Check hub_model_id and the rights of the "
            "token (`hf auth whoami` says whose it is), or leave push_to_hub out and upload later."
        ) from error


def retried(action: Callable[[], T], token: str | None = None) -> T:
    """Run `action`; after a temporary failure run it again, up to twice."""
    for pause in _PAUSES:
        try:
            return action()
        except Exception as error:
            if not _may_pass(error):
                raise
            logger.warning("The Hub failed: %s Next attempt in %d s.", describe(error, token), pause)
            time.sleep(pause)
    return action()


def _may_pass(error: Exception) -> bool:
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code == 429 or error.response.status_code >= 500
    if isinstance(error, OfflineModeIsEnabled):
        return False
    # A gateway that is down answers in HTML instead of JSON.
    return isinstance(error, (HTTPError, ConnectionError, TimeoutError, json.JSONDecodeError))


class SharingTrainer(Trainer):
    """The part of `SplitFedTrainer` that writes the model card and uploads to the Hub."""

    _tag_names = ["split-federated-learning", "coef-sfl"]
    hub_model_id: str | None  # type: ignore[assignment]
    push_in_progress: PushInProgress | None  # type: ignore[assignment]
    card_arguments = CardArguments()  # what only the user knows about the model

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Write the model card, `README.md`, and its plot; what is given here is kept for later cards.

        `dataset` names the data, `dataset_tags` its ids on the Hub. `finetuned_from` is the id of the base model, which
        a model that was loaded from a folder does not know; `tasks` is by default that of the model's class.
        """
        self.card_arguments = self.card_arguments.updated(
            language=language, license=license, tags=tags, model_name=model_name, finetuned_from=finetuned_from,
            tasks=tasks, dataset_tags=dataset_tags, dataset=dataset, dataset_args=dataset_args,
        )  # fmt: skip
        if self.is_world_process_zero():
            write_card(cast("SplitFedTrainer", self), Path(self.args.output_dir or ""))

    def init_hf_repo(self, token: str | None = None) -> None:
        """Create the repo on the Hub."""
        if self.is_world_process_zero():
            make_repo(partial(super().init_hf_repo, token), token or self.args.hub_token)

    def push_to_hub(  # type: ignore[override]  # Trainer's returns a Future or None as well
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> CommitInfo | Future[CommitInfo] | None:
        """Save everything in `output_dir`, then upload it in one commit: weights, halves, card, ledger; never a pickle.

        As for `Trainer`, with `kwargs` for `create_model_card`; a missing `revision` is created. An upload that
        fails, also when repeated, raises an `UploadError` that says how to continue: the files are saved.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)  # first, so that an error of the Hub loses nothing
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        upload = Upload.of(cast("SplitFedTrainer", self), commit_message or "End of training", revision, token)
        if self.hub_model_id is None:
            with upload.explained():
                self.init_hf_repo(token)
            upload = replace(upload, repo_id=self.hub_model_id or upload.repo_id)
        self.card_arguments = replace(self.card_arguments, revision=upload.revision)
        self.create_model_card(**kwargs)
        return upload.run() if blocking else upload.in_background()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, its halves and its card; with `push_to_hub=True` upload them, or log why that failed."""
        try:
            super().save_model(output_dir, _internal_call)
        except UploadError as error:
            logger.error("%s", error)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload what `push_to_hub` would, in the background, unless an earlier upload still runs."""
        if not self.is_world_process_zero() or self.args.hub_strategy == "end":
            return
        pushes: Any = [] if self.push_in_progress is None else self.push_in_progress.jobs
        running = [job for job in pushes if not job.done()]
        if running and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.card_arguments = replace(self.card_arguments, revision=self.args.hub_revision)
        self._save(self.args.output_dir)
        job = Upload.of(
            cast("SplitFedTrainer", self), f"Training in progress, round {self.state.global_step}"
        ).in_background()
        self.push_in_progress = PushInProgress(cast(Any, [*running, job]))
