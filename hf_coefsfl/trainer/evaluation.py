"""Evaluation by many processes, bit-identical to one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import find_batch_size, recursively_apply
from torch import Tensor, nn
from transformers import Trainer


class EvaluatingTrainer(Trainer):
    """A `Trainer` whose evaluation loss and predictions do not depend on the number of processes.

    Accelerate gives every process the same number of batches of the same size. It fills the last ones with rows from
    the beginning. `Trainer` drops these rows from the predictions, but not from the mean loss of their batch. It also
    divides a loss by the mean number of labels over the processes, not by the number of labels in the batch.
    """

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Evaluate a batch without its repeated rows."""
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
