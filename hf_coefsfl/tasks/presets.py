"""The tasks as data: five generic ones, and the paper's, which are presets of these.

This module loads no PyTorch: the command line reads it before a command runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from .arguments import CompletionArguments, ImageArguments, QuestionArguments, TaskArguments, TextArguments

if TYPE_CHECKING:
    from .base import FineTuningTask


@dataclass(frozen=True)
class Task:
    """What is fine-tuned on which data. Calling it with arguments makes the `FineTuningTask` that does it.

    A task on your data is a preset too: `dataclasses.replace(TASKS["text_classification"], name="tickets", ...)`.
    """

    name: str
    summary: str  # what the help says first
    implementation: str  # module of this package and class
    arguments: type[TaskArguments]
    model_name_or_path: str
    columns: Mapping[str, str]  # role: column of the dataset
    optional_roles: tuple[str, ...] = ()
    dataset_name: str | None = None  # None: the user must say
    dataset_config_name: str | None = None
    title: str | None = None  # as the paper writes it; None: the name of the dataset
    # Name in the metrics: split.
    eval_splits: Mapping[str, str] = field(default_factory=lambda: {"validation": "validation"})
    scores: tuple[str, ...] = ("accuracy",)  # what a run reports unless --metrics says otherwise
    score_titles: Mapping[str, str] = field(default_factory=dict)  # evaluation set: title of its score in a table
    defaults: Mapping[str, Any] = field(default_factory=dict)  # options with another default
    labels_are_text: bool = False  # whether the labels that a server gets are the text itself

    def __call__(self, arguments: TaskArguments, keep: str | None = None, model: Any = None) -> FineTuningTask:
        """Return the task with the given arguments; see `FineTuningTask`."""
        return self.kind(self, arguments, keep=keep, model=model)

    @cached_property
    def kind(self) -> type[FineTuningTask]:
        """The class that implements it."""
        module, _, name = self.implementation.partition(":")
        found: type[FineTuningTask] = getattr(import_module(module, __package__), name)
        return found

    @cached_property
    def arguments_class(self) -> type[TaskArguments]:
        """The dataclass of its options, with its own defaults."""
        fields = {f.name: f for f in dataclasses.fields(self.arguments)}
        changed: Any = [
            (name, type(value), field(default=value, metadata=fields[name].metadata))
            for name, value in self.defaults.items()
        ]
        if not changed:
            return self.arguments
        return dataclasses.make_dataclass(self.arguments.__name__, changed, bases=(self.arguments,))

    def is_own(self, dataset: str, config: str | None) -> bool:
        """Return whether a dataset is the preset's. A local copy counts if it has the name of the original."""
        if self.dataset_name is None or PurePath(dataset).name.lower() != PurePath(self.dataset_name).name.lower():
            return False
        return config in (self.dataset_config_name, None)

    def title_of(self, dataset: str | None = None, config: str | None = None) -> str:
        """Return the title of the task on a dataset: the paper's on the paper's dataset, else the dataset's name."""
        dataset = dataset or self.dataset_name or self.name
        if self.title is not None and self.is_own(dataset, config):
            return self.title
        path = Path(dataset)
        name = (path.resolve() if path.exists() else path).name
        return (PurePath(name).stem if path.is_file() else name) + (f" ({config})" if config else "")


TEXT = Task(
    name="text_classification",
    summary="Classes of texts, or of pairs of texts.",
    implementation=".classification:TextClassification",
    arguments=TextArguments,
    model_name_or_path="distilbert/distilroberta-base",
    columns={"text": "text", "text_pair": "text_pair", "label": "label"},
    optional_roles=("text_pair",),
)
WORDS = Task(
    name="token_classification",
    summary="Classes of the words of a text, such as named entities.",
    implementation=".token_classification:TokenClassification",
    arguments=TextArguments,
    model_name_or_path="distilbert/distilroberta-base",
    columns={"tokens": "tokens", "tags": "ner_tags"},
    scores=("accuracy", "f1"),
)
IMAGES = Task(
    name="image_classification",
    summary="Classes of images.",
    implementation=".images:ImageClassification",
    arguments=ImageArguments,
    model_name_or_path="WinKawaks/vit-tiny-patch16-224",
    columns={"image": "image", "label": "label"},
)
QUESTIONS = Task(
    name="question_answering",
    summary="The span of a context that answers a question, or none.",
    implementation=".question_answering:QuestionAnswering",
    arguments=QuestionArguments,
    model_name_or_path="distilbert/distilroberta-base",
    columns={"id": "id", "question": "question", "context": "context", "answers": "answers"},
    scores=("EM", "F1"),
)
COMPLETIONS = Task(
    name="causal_lm",
    summary="Completions of prompts, or answers in conversations. Data without prompts has its loss on every token.",
    implementation=".causal_lm:CausalLM",
    arguments=CompletionArguments,
    model_name_or_path="HuggingFaceTB/SmolLM2-135M",
    columns={"prompt": "prompt", "completion": "completion", "messages": "messages"},
    optional_roles=("prompt", "completion", "messages"),  # `CausalLM.roles_in` asks for what is needed
    scores=("perplexity",),
    dataset_name="trl-lib/tldr",
    labels_are_text=True,
)
GENERIC = {task.name: task for task in (TEXT, WORDS, IMAGES, QUESTIONS, COMPLETIONS)}
PRESETS = (
    replace(
        TEXT,
        name="mnli",
        title="MNLI",
        summary="MNLI: whether the premise entails the hypothesis, contradicts it, or neither.",
        dataset_name="nyu-mll/glue",
        dataset_config_name="mnli",
        columns={"premise": "premise", "hypothesis": "hypothesis", "label": "label"},
        optional_roles=(),
        eval_splits={"matched": "validation_matched", "mismatched": "validation_mismatched"},
        score_titles={"matched": "MNLI-m", "mismatched": "MNLI-mm"},
        defaults={"max_length": 128},
    ),
    replace(
        TEXT,
        name="newsgroups",
        title="20 Newsgroups",
        summary="20 Newsgroups: the topic of a post.",
        dataset_name="SetFit/20_newsgroups",
        columns={"text": "text", "label": "label"},
        optional_roles=(),
        eval_splits={"test": "test"},
    ),
    replace(
        QUESTIONS,
        name="squad_v2",
        title="SQuAD v2.0",
        summary="SQuAD v2.0: the span of the context that answers a question, or none.",
        dataset_name="rajpurkar/squad_v2",
    ),
    replace(
        IMAGES,
        name="cifar100",
        title="CIFAR-100",
        summary="CIFAR-100: the object in a small image.",
        dataset_name="uoft-cs/cifar100",
        columns={"image": "img", "label": "fine_label"},
        eval_splits={"test": "test"},
    ),
    replace(
        IMAGES,
        name="food101",
        title="Food-101",
        summary="Food-101: the dish in a photograph.",
        dataset_name="ethz/food101",
    ),
    replace(
        IMAGES,
        name="tiny_imagenet",
        title="Tiny-ImageNet",
        summary="Tiny-ImageNet: the object in a small photograph.",
        dataset_name="zh-plus/tiny-imagenet",
        eval_splits={"valid": "valid"},
    ),
)
DIGITS = replace(
    IMAGES,
    name="digits",
    title="Digits",
    summary="Digits: images of 8 x 8 pixels that come with scikit-learn, and a small model. Needs no network.",
    dataset_name="digits",
    model_name_or_path="digits-vit",
    eval_splits={"test": "test"},
)
TASKS: dict[str, Task] = GENERIC | {task.name: task for task in (*PRESETS, DIGITS)}
