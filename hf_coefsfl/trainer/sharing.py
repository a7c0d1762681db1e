"""What a trainer shares on the Hub: its files, its halves, and a card that describes them."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from huggingface_hub import CommitInfo
from transformers import Trainer
from transformers.utils import PushInProgress

from .hub import Upload, UploadError, make_repo
from .model_card import CardArguments, write_card

if TYPE_CHECKING:
    from .trainer import SplitFedTrainer

logger = logging.getLogger(__name__)


class SharingTrainer(Trainer):
    """A `Trainer` with our card and uploads; what there is to share, `SplitFedTrainer` says."""

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
        """Make the repo on the Hub, or say what it lacks."""
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

        As for `Trainer`, with `kwargs` for `create_model_card`; a `revision` that is missing is made. An upload that
        fails, also when repeated, raises an `UploadError` that says how to go on: the files are saved.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)  # first: whatever the Hub does, nothing is lost
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
