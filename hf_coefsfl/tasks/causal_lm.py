"""Causal language modelling, with the loss on completions, or on the last answers of conversations."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, EvalPrediction

from .._suggest import did_you_mean
from ..federation.data_checks import DataError
from .arguments import CompletionArguments
from .base import Prepared
from .chat import as_texts, check_messages, check_template, holds_messages, last_answer
from .classification import TextTask
from .generation import ROUGE, SCORES, GeneratedAnswers, check_prompts
from .metrics import IGNORED

logger = logging.getLogger(__name__)
_METRICS = ("perplexity", "token_accuracy")  # computed from sums of logits, which no module could keep
_ROUGE = "rouge"  # of generated answers
_ANSWERS = ("completion", "messages")  # the roles of which a dataset has one


class CausalLM(TextTask):
    """Completions of prompts, or the last answers of conversations. Without prompts every token has a loss."""

    pipeline_tag = "text-generation"
    auto_model = AutoModelForCausalLM
    default_metrics = ("perplexity",)
    lower_is_better = ("perplexity",)
    needed_texts = ("completion",)
    truncates = True
    arguments: CompletionArguments

    def _check_metrics(self) -> None:
        known = (*_METRICS, _ROUGE)
        unknown = [name for name in self.arguments.metrics or () if name not in known]
        if unknown:
            raise ValueError(
                f"The metric {unknown[0]!r} does not score next tokens.{did_you_mean(unknown[0], known)} "
                f"Choose from {', '.join(known)}. --max_new_tokens adds exact match and F1 of answers."
            )
        if self.arguments.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={self.arguments.max_new_tokens} must be at least 0.")
        if self._rouge and not self.arguments.max_new_tokens:
            raise ValueError("The metric 'rouge' scores generated answers. Say how long they may be: --max_new_tokens.")

    @property
    def _rouge(self) -> bool:
        return _ROUGE in (self.arguments.metrics or ())

    @property
    def _answer_scores(self) -> dict[str, str]:
        """The metrics of generated answers, and their titles in tables."""
        return (SCORES | (ROUGE if self._rouge else {})) if self.arguments.max_new_tokens else {}

    @property
    def reported(self) -> dict[str, str]:
        """The metrics that tables show, and their titles there."""
        named = [name for name in self.arguments.metrics or () if name != _ROUGE] or self.default_metrics
        return {name: name.replace("_", " ") for name in named} | self._answer_scores

    def scale(self, metric: str) -> float:
        """Return what tables multiply a metric by."""
        return 100.0 if metric == "token_accuracy" else 1.0

    # ---- Columns ----

    def roles_in(self, columns: Sequence[str], given: Collection[str]) -> dict[str, str]:
        """Return prompt and completion, or messages if there are no completions."""
        there = [role for role in _ANSWERS if role in self.roles and {self.roles[role], role} & {*columns}]
        named = [role for role in _ANSWERS if role in given]
        if not named and not there:
            raise ValueError(
                f"The dataset has neither completions nor messages, only the columns {', '.join(columns)}. Say which "
                f"it is with --columns completion=... or messages=...{did_you_mean('completion', columns)}"
            )
        chosen = (named or there)[0]
        return {role: column for role, column in self.roles.items() if (role == "messages") == (chosen == "messages")}

    @property
    def text_roles(self) -> tuple[str, ...]:
        """All of them: a prompt may be missing."""
        return tuple(self.roles)

    def check_column(self, rows: Dataset, role: str, where: str) -> None:
        """Refuse what is neither texts nor messages, and prompts that are not of the completions' kind."""
        messages = role == "messages" or holds_messages(rows, role)
        if role == "prompt" and messages != holds_messages(rows, "completion"):
            raise DataError(f"The prompt and the completion of {where} must both be texts, or both lists of messages.")
        if messages:
            check_messages(rows, role, where)
        else:
            super().check_column(rows, role, where)

    # ---- Preparing ----

    def build(self, train: Dataset, evals: dict[str, Dataset], processor: Any) -> Prepared:
        """Tokenise what comes before an answer and the answer as one sequence, up to the end of the answer."""
        keep, length = self.keep, self.arguments.max_length  # `encode` must not hold the task: its hash names the cache
        sets = (train, *evals.values())
        if any("messages" in rows.column_names or holds_messages(rows, "completion") for rows in sets):
            check_template(processor, self.model_id)

        def encode(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
            kept = [keep] if keep in rows else []
            found: dict[str, list[Any]] = {name: [] for name in ("input_ids", "attention_mask", "labels", *kept)}
            for i, (prompt, answer) in enumerate(_pairs(rows)):
                if isinstance(answer, str):
                    ids, labels = encode_completion(processor, prompt, answer, length)
                else:
                    ids, labels = encode_parts(processor, *as_texts(processor, prompt, answer), length)
                if any(label != IGNORED for label in labels[1:]):  # else nothing is left to learn
                    found["input_ids"].append(ids)
                    found["attention_mask"].append([1] * len(ids))
                    found["labels"].append(labels)
                    for name in kept:
                        found[name].append(rows[name][i])
            return found

        def encoded(rows: Dataset, where: str) -> Dataset:
            found = rows.map(encode, batched=True, remove_columns=rows.column_names, desc="Tokenising")
            lost = len(rows) - len(found)
            if lost and not len(found):
                raise DataError(
                    f"No row of {where} has an answer within max_length={length} tokens. Give a larger --max_length, "
                    "or see whether the columns are the right ones."
                )
            if lost:
                logger.warning("%d of %d samples have no answer within max_length=%d.", lost, len(rows), length)
            return found

        model, eval_sets = self.load_model(), {name: encoded(rows, name) for name, rows in evals.items()}
        answers = None
        if self.arguments.max_new_tokens:
            answers = GeneratedAnswers(processor, self.arguments.max_new_tokens, self._rouge)
            positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
            least = 1 + (processor.bos_token_id is not None)
            check_prompts(eval_sets, least, self.arguments.max_new_tokens, positions)
        return Prepared(
            model=model,
            processing_class=processor,
            train_dataset=encoded(train, "the training set"),
            eval_dataset=eval_sets,
            data_collator=DataCollatorForSeq2Seq(processor, label_pad_token_id=IGNORED),
            compute_metrics=perplexity,
            preprocess_logits_for_metrics=token_sums,
            metric_names=(*_METRICS, *self._answer_scores),
            further_metrics=answers,
        )


def _pairs(rows: Mapping[str, list[Any]]) -> list[tuple[Any, Any]]:
    """Return what comes before the answer of each row, and the answer: texts or lists of messages."""
    if "messages" in rows:
        return [last_answer(messages) for messages in rows["messages"]]
    return list(zip(rows.get("prompt") or [""] * len(rows["completion"]), rows["completion"], strict=True))


def encode_completion(tokenizer: Any, prompt: str, completion: str, max_length: int) -> tuple[list[int], list[int]]:
    """Return the tokens of a sample between those of start and end, and its labels: see `encode_parts`."""
    start, end = ([] if token is None else [token] for token in (tokenizer.bos_token_id, tokenizer.eos_token_id))
    return encode_parts(tokenizer, prompt or "", completion, max_length, start, end)


def encode_parts(
    tokenizer: Any, prompt: str, answer: str, max_length: int, start: Sequence[int] = (), end: Sequence[int] = ()
) -> tuple[list[int], list[int]]:
    """Return the tokens of two texts and their labels: the tokens themselves, -100 on those of the prompt.

    The two parts are tokenised apart, so that no token spans both.
    """
    head, tail = (tokenizer(text, add_special_tokens=False)["input_ids"] if text else [] for text in (prompt, answer))
    head, tail = [*start, *head], [*tail, *end]
    return (head + tail)[:max_length], ([IGNORED] * len(head) + tail)[:max_length]


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
