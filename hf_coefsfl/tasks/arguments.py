"""The options of the tasks. This module loads no PyTorch: the command line reads it before a command runs."""

from __future__ import annotations

from dataclasses import dataclass, field

DTYPES = ("float32", "bfloat16")


@dataclass
class TaskArguments:
    """Options of every task."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "Model: a Hub id or a local folder."})
    model_revision: str | None = field(
        default=None, metadata={"help": "Branch, tag or commit of the model on the Hub."}
    )
    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Dataset: a Hub id, or a local folder or file (parquet, json, csv, an image folder, or what "
            "save_to_disk wrote)."
        },
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the dataset on the Hub."})
    columns: list[str] | None = field(default=None, metadata={"help": "Columns of the dataset, as role=column."})
    train_split: str = field(default="train", metadata={"help": "Split to train on."})
    eval_split: list[str] | None = field(
        default=None,
        metadata={"help": "Splits to evaluate on."},
    )
    max_train_samples: int | None = field(
        default=None, metadata={"help": "Train on so many samples, drawn at random but the same in every run."}
    )
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Evaluate on so many samples of each split, the same in every run."}
    )
    metrics: list[str] | None = field(
        default=None, metadata={"help": "Metrics by name: of the package, of `evaluate`, or folders of metric modules."}
    )
    lora_rank: int = field(default=4, metadata={"help": "Rank of the LoRA adapter."})
    lora_alpha: int = field(default=8, metadata={"help": "Scale of the LoRA adapter."})
    dtype: str = field(
        default="float32",
        metadata={"help": f"Numbers of the frozen weights: {' or '.join(DTYPES)}. What is trained is float32."},
    )
    load_in_8bit: bool = field(
        default=False, metadata={"help": "Keep the linear layers of the blocks in int8 (needs bitsandbytes)."}
    )
    load_in_4bit: bool = field(
        default=False, metadata={"help": "Keep the linear layers of the blocks in 4-bit nf4 (needs bitsandbytes)."}
    )

    def __post_init__(self) -> None:
        """Refuse numbers that a model cannot be loaded in."""
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not allowed. Choose one of: {', '.join(DTYPES)}.")
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit and load_in_4bit do not go together. Choose one of them.")


@dataclass
class TextArguments(TaskArguments):
    """Options of the tasks on text."""

    max_length: int = field(default=256, metadata={"help": "Tokens of a sample; longer ones are truncated."})


@dataclass
class QuestionArguments(TextArguments):
    """Options of question answering."""

    max_length: int = field(default=384, metadata={"help": "Tokens of a window over question and context."})
    stride: int = field(default=128, metadata={"help": "Tokens that neighbouring windows of a context share."})
    n_best: int = field(default=20, metadata={"help": "Spans to keep for each question."})
    max_answer_length: int = field(default=30, metadata={"help": "Tokens of the longest answer."})
    null_score_diff_threshold: float = field(
        default=0.0, metadata={"help": "By how much 'no answer' must beat the best answer to be given."}
    )


@dataclass
class CompletionArguments(TextArguments):
    """Options of language modelling."""

    max_length: int = field(default=512, metadata={"help": "Tokens of prompt and completion; longer ones are cut."})
    max_new_tokens: int = field(
        default=0,
        metadata={
            "help": "Also have the model answer the prompts in each evaluation, greedily and with at most so many "
            "tokens, and score exact match and F1. 0: do not."
        },
    )


@dataclass
class ImageArguments(TaskArguments):
    """Options of the tasks on images."""

    augment: bool = field(
        default=False, metadata={"help": "Flip and shift training images at random, anew in each round."}
    )
