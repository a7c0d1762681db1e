"""Causal language modelling, with the loss on completions only."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from datasets import Dataset
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, EvalPrediction

from .._suggest import did_you_mean
from .arguments import CompletionArguments
from .base import Prepared
from .classification import TextTask
from .metrics import IGNORED

logger = logging.getLogger(__name__)
_METRICS = ("perplexity", "token_accuracy")  # computed from sums of logits, which no module could keep


class CausalLM(TextTask):
    """Completions of prompts. Data without a prompt column has its loss on every token."""

    pipeline_tag = "text-generation"
    auto_model = AutoModelForCausalLM
    default_metrics = ("perplexity",)
    higher_is_better = False
    needed_texts = ("completion",)
    truncates = True
    arguments: CompletionArguments

    def _check_metrics(self) -> None:
        unknown = [name for name in self.reported if name not in _METRICS]
        if unknown:
            raise ValueError(
                f"The metric {unknown[0]!r} does not score next tokens.{did_you_mean(unknown[0], _METRICS)} "
                f"Choose from {', '.join(_METRICS)}."
            )

    @property
    def reported(self) -> dict[str, str]:
        """The metrics that tables show, and their titles there."""
        return {name: name.replace("_", " ") for name in self.arguments.metrics or self.default_metrics}

    def scale(self, metric: str) -> float:
        """Return what tables multiply a metric by."""
        return 100.0 if metric == "token_accuracy" else 1.0

    def build(self, train: Dataset, evals: dict[str, Dataset], processor: Any) -> Prepared:
        """Tokenise prompt and completion as one sequence that ends with the end-of-text token."""
        keep, length = self.keep, self.arguments.max_length  # `encode` must not hold the task: its hash names the cache

        def encode(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
            prompts = rows.get("prompt") or [""] * len(rows["completion"])
            kept = [keep] if keep in rows else []
            found: dict[str, list[Any]] = {name: [] for name in ("input_ids", "attention_mask", "labels", *kept)}
            for i, (prompt, completion) in enumerate(zip(prompts, rows["completion"], strict=True)):
                ids, labels = encode_completion(processor, prompt, completion, length)
                if any(label != IGNORED for label in labels[1:]):  # else nothing is left to learn
                    found["input_ids"].append(ids)
                    found["attention_mask"].append([1] * len(ids))
                    found["labels"].append(labels)
                    for name in kept:
                        found[name].append(rows[name][i])
            return found

        def encoded(rows: Dataset) -> Dataset:
            found = rows.map(encode, batched=True, remove_columns=rows.column_names, desc="Tokenising")
            if len(found) < len(rows):
                lost = len(rows) - len(found)
                logger.warning("%d of %d samples have no completion within max_length=%d.", lost, len(rows), length)
            return found

        return Prepared(
            model=self.load_model(),
            processing_class=processor,
            train_dataset=encoded(train),
            eval_dataset={name: encoded(rows) for name, rows in evals.items()},
            data_collator=DataCollatorForSeq2Seq(processor, label_pad_token_id=IGNORED),
            compute_metrics=perplexity,
            preprocess_logits_for_metrics=token_sums,
            metric_names=_METRICS,
        )


def encode_completion(tokenizer: Any, prompt: str, completion: str, max_length: int) -> tuple[list[int], list[int]]:
    """Return the tokens of a sample and its labels: the tokens themselves, -100 on those of the prompt.

    The two parts are tokenised apart, so that no token spans both.
    """
    start = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    head = start + tokenizer(prompt, add_special_tokens=False)["input_ids"] if prompt else start
    tail = tokenizer(completion, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    ids = (head + tail)[:max_length]
    return ids, ([IGNORED] * len(head) + tail)[:max_length]


def token_sums(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return for each sample (sum of the tokens' losses, tokens, tokens predicted right): [b, 3]."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    scores, targets = logits[:, :-1].float(), labels[:, 1:]
    losses = cross_entropy(scores.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    counted = targets != IGNORED
    right = (scores.argmax(-1) == targets) & counted
    return torch.stack([losses.sum(1), counted.sum(1).float(), right.sum(1).float()], dim=1)


def perplexity(prediction: EvalPrediction) -> dict[str, float]:
    """Return the perplexity and the accuracy over all counted tokens of the set."""
    loss, tokens, right = (float(total) for total in torch.as_tensor(prediction.predictions).double().sum(0))
    return {"perplexity": math.exp(min(loss / tokens, 700.0)), "token_accuracy": right / tokens}
