"""How the loss depends on the server's output: the weights and curvature bounds that compensation needs.

Everything here follows from the labels and the kind of task, so client and server each compute it
for themselves and none of it crosses the cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from transformers.utils import find_labels

from .tensors import over

IGNORED = -100
# The losses of transformers, by what a label is of.
LANGUAGE_MODELS = ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM")
SPANS = "ForQuestionAnswering"
ONE_LABEL_A_SAMPLE = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
)
_CLASSES = (*ONE_LABEL_A_SAMPLE, "ForTokenClassification")


@dataclass(frozen=True)
class OutputBlock:
    """One output of the model that enters the loss as a mean over its terms.

    A term is one softmax cross-entropy (a sample, or a labelled token of it), one squared error, or
    one sigmoid cross-entropy. `weight` is w, what the mean multiplies each term with.
    """

    name: str  # the field of the model's output: logits, start_logits, end_logits
    kind: str  # softmax | squared_error | sigmoid
    mask: Tensor  # (b, *positions), True where an output enters the loss
    weight: Tensor  # w, a scalar tensor

    @property
    def bound(self) -> float:
        """M: the largest curvature of one term w.r.t. its outputs."""
        return {"softmax": 0.5, "squared_error": 2.0, "sigmoid": 0.25}[self.kind]

    def residual_diameter(self) -> Tensor:
        """(b,): how far two residuals of a sample can be apart; inf if they are unbounded."""
        terms = self.mask.reshape(len(self.mask), -1).sum(1).float()
        if self.kind == "softmax":
            return (2 * terms).sqrt()  # two probability vectors are at most √2 apart
        if self.kind == "sigmoid":
            return terms.sqrt()
        return torch.full_like(terms, torch.inf)

    def curvature(self, logits: Tensor) -> Tensor:
        """(b,): m, an upper bound on the curvature of a sample's terms at `logits`."""
        logits = logits.detach().float()
        if self.kind == "softmax":
            terms = 1 - logits.softmax(-1).square().sum(-1)
        elif self.kind == "sigmoid":
            p = logits.sigmoid()
            terms = p * (1 - p)
        else:
            terms = torch.full(self.mask.shape, self.bound, device=logits.device)
        terms = terms.reshape(self.mask.shape).masked_fill(~self.mask, 0.0)
        return terms.reshape(len(terms), -1).amax(1).clamp(max=self.bound)

    def hessian_product(self, logits: Tensor, tangent: Tensor) -> Tensor:
        """Return Λ x: the Hessian of the mean loss w.r.t. this output, times a tangent of the same shape."""
        logits = logits.detach()
        if self.kind == "softmax":
            p = logits.softmax(-1)
            product = p * tangent - p * (p * tangent).sum(-1, keepdim=True)
        elif self.kind == "sigmoid":
            p = logits.sigmoid()
            product = p * (1 - p) * tangent
        else:
            product = 2 * tangent
        return product * over(self.mask, logits) * self.weight.to(logits.dtype)


@dataclass(frozen=True)
class LossSpec:
    """What a model is trained for, as far as the shape of its loss goes."""

    loss_type: str
    num_labels: int
    label_names: tuple[str, ...]
    shifts_labels: bool = False
    problem_type: str | None = None
    clients: int = 1  # whose samples lie below each other in a batch, each with a mean of its own

    @classmethod
    def of(cls, model: Any, label_names: list[str]) -> LossSpec:
        """Read the task off a transformers model (not wrapped by PEFT)."""
        config = model.config
        loss_type = getattr(model, "loss_type", None)
        if loss_type is None:  # a name like GPT2LMHeadModel, or a loss that transformers does not list
            loss_type = "ForCausalLM" if "LMHead" in type(model).__name__ else type(model).__name__
        if not find_labels(type(model)):
            raise ValueError(
                f"{type(model).__name__} has no head that computes a loss. Load the model with a head for the task, "
                "e.g. AutoModelForSequenceClassification.from_pretrained(...)."
            )
        encoder_decoder = getattr(config, "is_encoder_decoder", False)
        return cls(
            loss_type=loss_type,
            num_labels=getattr(config, "num_labels", 0),
            label_names=tuple(label_names),
            shifts_labels=loss_type in ("ForCausalLM", "ForConditionalGeneration") and not encoder_decoder,
            problem_type=getattr(config, "problem_type", None),
        )

    def separate(self, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return (inputs, labels) of a collated batch."""
        labels = {name: batch[name] for name in self.label_names if name in batch}
        return {name: t for name, t in batch.items() if name not in labels}, labels

    @property
    def is_mean_over_samples(self) -> bool:
        """Whether each sample weighs the same in the loss of a batch; not if a label of it is left out."""
        return self.loss_type in ONE_LABEL_A_SAMPLE

    @property
    def labels_are_text(self) -> bool:
        """Whether the labels are tokens of a text, which whoever gets them can read."""
        return self.loss_type in LANGUAGE_MODELS

    @property
    def has_known_curvature(self) -> bool:
        """Whether `output_blocks` knows this loss."""
        return self.loss_type in (*LANGUAGE_MODELS, *_CLASSES, SPANS)

    def check_curvature(self, method: str = "Curvature") -> None:
        """Refuse a loss whose curvature is not known."""
        if not self.has_known_curvature:
            raise ValueError(
                f"The curvature of a {self.loss_type} loss is not known. {method} works for classification of "
                "sequences, tokens, images and audio, extractive question answering and language modelling; use "
                "another method for this model."
            )

    def has_labels(self, batch: dict[str, Any]) -> bool:
        """Tell whether any label of a batch enters the loss; the mean over none would be NaN."""
        if self.loss_type == SPANS or "labels" not in batch or not self.has_known_curvature:
            return True
        target = batch["labels"]
        if self.shifts_labels:
            target = target[:, 1:]
        return bool((target != IGNORED).any())

    def output_blocks(self, labels: dict[str, Tensor], length: int | None = None) -> list[OutputBlock]:
        """Return the outputs that enter the loss for these labels.

        `length` is the number of token positions of the activations; QA needs it, because the
        loss ignores answer positions beyond the end.
        """
        self.check_curvature()
        if self.loss_type == SPANS:
            return [self._span(f"{side}_logits", labels[f"{side}_positions"], length) for side in ("start", "end")]
        target = labels["labels"]
        if self.loss_type in (*LANGUAGE_MODELS, "ForTokenClassification"):
            if self.shifts_labels:  # position t predicts label t + 1
                target = torch.nn.functional.pad(target[:, 1:], (0, 1), value=IGNORED)
            mask = target != IGNORED
            return [OutputBlock("logits", "softmax", mask, self._weight(mask.sum()))]
        return [self._classification(target)]

    def sample_losses(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each sample (b,), if it has one label: the loss of a batch is their mean."""
        kind, logits = self._kind(target), logits.detach().float()
        if kind.startswith("single_label"):
            return cross_entropy(logits.reshape(-1, self.num_labels), target.reshape(-1), reduction="none")
        loss = mse_loss if kind == "regression" else binary_cross_entropy_with_logits
        return loss(logits.flatten(1), target.reshape(len(target), -1).float(), reduction="none").mean(1)

    def _kind(self, target: Tensor) -> str:
        if self.problem_type is not None:
            return self.problem_type
        integer = not target.is_floating_point()  # the rule by which transformers chooses the loss
        return "regression" if self.num_labels == 1 else "single_label" if integer else "multi_label"

    def _classification(self, target: Tensor) -> OutputBlock:
        kind = self._kind(target)
        if kind.startswith("single_label"):
            mask = target.reshape(-1) != IGNORED
            return OutputBlock("logits", "softmax", mask, self._weight(mask.sum()))
        mask = torch.ones(len(target), self.num_labels, dtype=torch.bool, device=target.device)
        return OutputBlock(
            "logits", "squared_error" if kind == "regression" else "sigmoid", mask, self._weight(mask.sum())
        )

    def _span(self, name: str, positions: Tensor, length: int | None) -> OutputBlock:
        positions = positions.reshape(-1)
        mask = torch.ones_like(positions, dtype=torch.bool) if length is None else positions < length
        return OutputBlock(name, "softmax", mask, self._weight(2 * mask.sum()))

    def _weight(self, count: Tensor) -> Tensor:
        return self.clients / count.clamp(min=1).float()
