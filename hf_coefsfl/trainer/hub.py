"""The Hugging Face Hub: uploading what a run leaves."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

from huggingface_hub import CommitInfo, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import filter_repo_objects

from ..split.sources import describe

if TYPE_CHECKING:
    from .trainer import SplitFedTrainer

T = TypeVar("T")
logger = logging.getLogger(__name__)
_API = HfApi(library_name="hf_coefsfl")  # one for all: its background jobs run one after the other
# What stays at home whatever else is in the folder; `*` matches slashes too.
NOT_UPLOADED = (
    "checkpoint-*",
    "_*",
    ".*",  # .env and the like
    "*/.*",
    *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.joblib"),  # pickles run code when they are read
    "*method_state.safetensors",  # FSL-SAGE's holds smashed data of the clients
    "*.tfevents.*",  # TensorBoard's are named after the machine
    "*.partial",
)
_PAUSES = (5, 30)  # seconds before another attempt, on top of what huggingface_hub repeats by itself


class UploadError(RuntimeError):
    """An upload failed for good. The message says why, where the files are and how to repeat it."""


@dataclass(frozen=True)
class Upload:
    """A folder on its way to a repo of the Hub."""

    folder: Path
    repo_id: str
    message: str
    revision: str | None = None
    private: bool = False
    token: str | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls, trainer: SplitFedTrainer, message: str, revision: str | None = None, token: str | None = None
    ) -> Upload:
        """Return the upload of a trainer's output folder, to where its arguments say."""
        args = trainer.args
        folder = Path(args.output_dir or "")
        return cls(
            folder,
            trainer.hub_model_id or args.hub_model_id or folder.absolute().name,
            message,
            revision or args.hub_revision,
            bool(args.hub_private_repo),
            token or args.hub_token,
        )

    @property
    def command(self) -> str:
        """What repeats the upload in a shell."""
        words = ["hf", "upload", self.repo_id, str(self.folder), ".", "--repo-type", "model"]
        words += ["--revision", self.revision] * (self.revision is not None)  # type: ignore[list-item]
        words += ["--private"] * self.private
        for pattern in NOT_UPLOADED:
            words += ["--exclude", pattern]
        return shlex.join(words)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn whatever goes wrong into an `UploadError`: by then the files are on the disk."""
        try:
            yield
        except Exception as error:
            raise UploadError(
                f"The upload to {self.repo_id} failed: {describe(error, self.token)}\nAll files are in "
                f"{self.folder}. To upload them later (hf auth login, or HF_TOKEN, gives it the token):\n"
                f"  {self.command}"
            ) from None

    def run(self, source: Path | None = None) -> CommitInfo:
        """Upload the folder, or a copy of it, in one commit; a branch that is missing is made."""

        def attempt() -> CommitInfo:
            if self.revision not in (None, "main") and not str(self.revision).startswith("refs/"):
                _API.create_branch(self.repo_id, branch=str(self.revision), token=self.token, exist_ok=True)
            return _API.upload_folder(
                repo_id=self.repo_id,
                folder_path=str(source or self.folder),
                commit_message=self.message,
                revision=self.revision,
                token=self.token,
                ignore_patterns=list(NOT_UPLOADED),
            )

        with self.explained():
            return retried(attempt, self.token)

    def in_background(self) -> Future[CommitInfo]:
        """Upload a copy of the folder as it is now, while training goes on. A failure is logged as well."""
        copied = TemporaryDirectory(dir=self.folder, prefix="_upload-")
        for path in _uploaded_files(self.folder):
            target = Path(copied.name) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.folder / path, target)

        def job() -> CommitInfo:
            with copied:
                try:
                    return self.run(Path(copied.name))
                except UploadError as error:
                    logger.error("%s", error)
                    raise

        return _API.run_as_future(job)


def _uploaded_files(folder: Path) -> list[str]:
    """Return the paths below the folder that are uploaded; what is left out is not even looked into."""
    tops = filter_repo_objects(sorted(path.name for path in folder.iterdir()), ignore_patterns=list(NOT_UPLOADED))
    files = [file for top in tops for file in (folder / top, *(folder / top).rglob("*")) if file.is_file()]
    names = [file.relative_to(folder).as_posix() for file in files]
    return list(filter_repo_objects(names, ignore_patterns=list(NOT_UPLOADED)))


def check_token(token: str | None) -> None:
    """Refuse to start without a token."""
    if token is None and get_token() is None:
        raise ValueError(
            "Pushing to the Hub needs a token and there is none. Log in with `hf auth login`, set HF_TOKEN, or pass "
            "hub_token; or leave push_to_hub out."
        )


def make_repo(create: Callable[[], None], token: str | None) -> None:
    """Make the repo by `create`, or say why it cannot be pushed to."""
    check_token(token)
    try:
        retried(create, token)
    except (HTTPError, ConnectionError) as error:
        raise ValueError(
            f"The repo on the Hub could not be made: {describe(error, token)} Check hub_model_id and the rights of the "
            "token (`hf auth whoami` says whose it is), or leave push_to_hub out and upload later."
        ) from error


def retried(action: Callable[[], T], token: str | None = None) -> T:
    """Run `action`, again after each pause where it failed for a reason that may pass."""
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
    # A gateway that is down answers in HTML where JSON is read.
    return isinstance(error, (HTTPError, ConnectionError, TimeoutError, json.JSONDecodeError))
