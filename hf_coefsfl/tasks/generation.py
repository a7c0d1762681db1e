"""Evaluation by generating: a language model answers the prompts of a set, and its answers are scored."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from tqdm import tqdm
from transformers import GenerationConfig

from .._io import write_atomically
from ..federation.data_checks import DataError
from ..trainer.output_folder import GENERATIONS_NAME
from .metrics import IGNORED, load_metric

SCORES = {"exact": "EM", "f1": "F1"}  # metric and its title in tables; in percent
ROUGE = {"rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}  # the same, if they are asked for
_SHOWN = 5  # answers of a set that are kept
# What only sampling reads is set too: else the values of a chat model's own settings are warned of.
_GREEDY = {"do_sample": False, "num_beams": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 50, "use_cache": True}


@dataclass
class GeneratedAnswers:
    """Exact match and F1 of generated answers, and ROUGE on demand, as a `further_metrics` of the trainer.

    Some answers go to the output folder, each with its prompt and the answer that was expected.

    Args:
        tokenizer: of the model.
        max_new_tokens: of an answer.
        rouge: whether to add ROUGE, for answers longer than a few words.
    """

    tokenizer: Any
    max_new_tokens: int
    rouge: bool = False

    def __call__(self, trainer: Any, rows: Any, prefix: str) -> dict[str, float]:
        """Return the scores of tokenised rows: what has no label is the prompt, the rest the expected answer."""
        starts = [answer_start(row["labels"]) for row in rows]
        prompts = [row["input_ids"][:start] for row, start in zip(rows, starts, strict=True)]
        answers = [row["input_ids"][start:] for row, start in zip(rows, starts, strict=True)]
        expected = [text.strip() for text in self.tokenizer.batch_decode(answers, skip_special_tokens=True)]
        progress = not trainer.args.disable_tqdm and trainer.is_local_process_zero()
        generated = generate(
            trainer.model,
            self.tokenizer,
            prompts,
            max_new_tokens=self.max_new_tokens,
            batch_size=trainer.args.eval_batch_size,
            accelerator=trainer.accelerator,
            progress=progress,
        )
        if trainer.args.should_save:
            shown = self.tokenizer.batch_decode(prompts[:_SHOWN])
            self._write(Path(trainer.args.output_dir), prefix, zip(shown, expected, generated, strict=False))
        return self._score(generated, expected)

    @staticmethod
    def _write(folder: Path, prefix: str, samples: Any) -> None:
        names = ("prompt", "expected", "generated")
        lines = [json.dumps(dict(zip(names, sample, strict=True)), ensure_ascii=False) + "\n" for sample in samples]
        part = prefix.removeprefix("eval").replace("_", "-", 1)  # of several sets, each has its file
        path = folder / GENERATIONS_NAME
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path.with_stem(path.stem + part), "".join(lines))

    @cached_property
    def _metric(self) -> Any:
        return load_metric("squad_v2")

    def _score(self, generated: Sequence[str], expected: Sequence[str]) -> dict[str, float]:
        found = self._metric.compute(
            predictions=[
                {"id": str(i), "prediction_text": text, "no_answer_probability": 0.0}
                for i, text in enumerate(generated)
            ],
            references=[
                {"id": str(i), "answers": {"text": [text], "answer_start": [0]}} for i, text in enumerate(expected)
            ],
        )
        scores = {name: float(found[name]) for name in SCORES}
        if self.rouge:
            shared = load_metric("rouge").compute(predictions=generated, references=expected)
            scores |= {name: 100 * float(shared[name]) for name in ROUGE}
        return scores


def answer_start(labels: Sequence[int]) -> int:
    """Return the index of the first token that has a label."""
    return next(i for i, label in enumerate(labels) if label != IGNORED)


def check_prompts(sets: Mapping[str, Dataset], least: int, max_new_tokens: int, positions: int | None) -> None:
    """Refuse rows that cannot be answered: without a prompt of `least` tokens, or longer than the model's positions."""
    for name, rows in sets.items():
        for row, labels in enumerate(rows["labels"]):
            length = answer_start(labels)
            if length < least:
                raise DataError(
                    f"Row {row} of {name} has no prompt, so there is nothing to answer. Leave --max_new_tokens out, or "
                    "give data with prompts or messages."
                )
            if positions is not None and length + max_new_tokens > positions:
                raise DataError(
                    f"The prompt of {name}, row {row}, has {length} tokens. With max_new_tokens={max_new_tokens} that "
                    f"is more than the model's {positions} positions. Lower --max_new_tokens or --max_length."
                )


@torch.no_grad()
def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    accelerator: Accelerator,
    progress: bool = False,
) -> list[str]:
    """Return the model's greedy answers to tokenised prompts, without special tokens.

    Prompts of like length share a batch, padded on the left. Processes share the batches, which do not depend on the
    number of processes.
    """
    own = model.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, eos_token_id=sorted(stops), pad_token_id=tokenizer.pad_token_id, **_GREEDY
    )
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))  # a lack of memory shows at once
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    found: list[tuple[int, str]] = []
    mine = batches[accelerator.process_index :: accelerator.num_processes]
    for batch in tqdm(mine, desc="Generating", disable=not progress, leave=False):
        padded = tokenizer.pad(
            {"input_ids": [list(prompts[i]) for i in batch]}, padding_side="left", return_tensors="pt"
        ).to(accelerator.device)
        with accelerator.autocast():
            tokens = model.generate(**padded, generation_config=config)
        new = tokens[:, padded["input_ids"].shape[1] :]
        found += zip(batch, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True)
    texts: dict[int, str] = dict(gather_object(found))
    return [texts[i].strip() for i in range(len(prompts))]
