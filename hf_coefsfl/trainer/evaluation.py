"""Evaluation by many processes, bit-identical to one process, of data that was looked at before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate.utils import find_batch_size, recursively_apply
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer

from ..federation.data_checks import DataError, RowCheck, unreadable_row


class EvaluatingTrainer(Trainer):
    """A `Trainer` whose evaluation loss and predictions do not depend on the number of processes.

    Accelerate gives every process the same number of batches of the same size. It fills the last ones with rows from
    the beginning. `Trainer` drops these rows from the predictions, but not from the mean loss of their batch. It also
    divides a loss by the mean number of labels over the processes, not by the number of labels in the batch.
    """

    row_check: RowCheck
    # What else is measured after each evaluation, given the trainer, the dataset and the prefix of the metrics' names.
    further_metrics: Callable[[Trainer, Any, str], dict[str, float]] | None = None
    _evaluated = 0  # batches of this process in this evaluation

    def check_evaluation_data(self) -> None:
        """Raise a `DataError` for an unfit row of `eval_dataset`, as far as its columns can be read by themselves."""
        data: Any = self.eval_dataset
        named = data if isinstance(data, Mapping) else {"": data}
        for name, dataset in named.items():
            if not isinstance(dataset, Dataset):
                collate = self._get_collator_with_removed_columns(self.data_collator, "evaluation")
            else:
                dataset, collate = self._remove_unused_columns(dataset, "evaluation"), self.data_collator
            owner = f"eval_dataset[{name!r}]" if name else "eval_dataset"
            self.row_check.dataset(dataset, lambda row: owner, lambda row: collate([dataset[row]]))  # noqa: B023

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate, and measure what the task measures otherwise."""
        output = self._named_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if self.further_metrics is not None:
            found = self.further_metrics(self, dataloader.dataset, metric_key_prefix)
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in found.items()})
        return output

    def _named_loop(self, dataloader: DataLoader[Any], *args: Any) -> Any:
        """Run the loop of `Trainer`; name the row that could not be read, if there is one."""
        self._evaluated = 0
        try:
            return super().evaluation_loop(dataloader, *args)
        except DataError:
            raise
        except Exception as error:
            data: Any = dataloader.dataset
            size = self.args.eval_batch_size
            indexed = hasattr(data, "__len__") and not isinstance(data, IterableDataset)
            rows = range(self._first_row(), len(data)) if indexed else ()
            # Accelerate reads a batch ahead, and each worker two.
            ahead = size * self.accelerator.num_processes * (2 + 2 * self.args.dataloader_num_workers)
            told = unreadable_row(rows[:ahead], lambda row: dataloader.collate_fn([data[row]]), "the evaluation data")
            if told is None:
                raise
            raise told from error

    def _first_row(self) -> int:
        """Return the number of the first row of this process's next batch."""
        before = self._evaluated * self.accelerator.num_processes + self.accelerator.process_index
        return before * self.args.eval_batch_size

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Evaluate a batch without its repeated rows."""
        fault = self.row_check.labels(inputs)
        if fault is not None:
            raise fault.error("the evaluation data", self._first_row() + fault.row)
        self._evaluated += 1
        rows = find_batch_size(inputs)
        own = self._own_rows(rows) if rows is not None else None
        if rows is None or own in (None, 0, rows):  # a batch of repeated rows only is dropped later
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        inputs = _each(lambda t: t[:own], inputs, rows)
        loss, *outputs = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        filled = [
            _each(lambda t: torch.cat([t, t[-1:].repeat(rows - own, *[1] * (t.ndim - 1))]), o, own) for o in outputs
        ]
        return loss, filled[0], filled[1]

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> None:
        return None  # the loss of a batch is the model's own mean

    def _own_rows(self, rows: int) -> int | None:
        """Return how many rows of this process's current batch are not repetitions; None if that is not known."""
        state = self.accelerator.gradient_state
        if self.accelerator.num_processes == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return None
        return min(max(state.remainder - rows * self.accelerator.process_index, 0), rows)


def _each(function: Callable[[Tensor], Tensor], tensors: Any, rows: int) -> Any:
    """Apply a function to the tensors of `rows` rows, wherever they are nested."""
    return recursively_apply(lambda t: function(t) if t.ndim and len(t) == rows else t, tensors)
