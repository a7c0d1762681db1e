"""Models without trained weights, to be costed: the paper's backbones by name, and those that a config describes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import find_labels

from ..protocol.loss import LossSpec
from ..split.placeholders import example_inputs

_VIT_TINY = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
_ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}

TASKS = {
    "image-classification": transformers.AutoModelForImageClassification,
    "sequence-classification": transformers.AutoModelForSequenceClassification,
    "token-classification": transformers.AutoModelForTokenClassification,
    "question-answering": transformers.AutoModelForQuestionAnswering,
    "causal-lm": transformers.AutoModelForCausalLM,
}
SEQUENCE_LENGTH = 128  # tokens, unless the user says otherwise


@dataclass(frozen=True)
class Backbone:
    """One of the paper's models: its architecture, and the cut that the paper trains it with."""

    model_type: str
    task: str
    cut: int
    sizes: dict[str, Any] = field(default_factory=dict)

    def config(self) -> PreTrainedConfig:
        """Return its config, made here and not downloaded."""
        return AutoConfig.for_model(self.model_type, **self.sizes)


BACKBONES = {
    "vit-tiny": Backbone("vit", "image-classification", 4, _VIT_TINY),
    "vit-base": Backbone("vit", "image-classification", 4),
    "distilroberta": Backbone("roberta", "sequence-classification", 2, _ROBERTA | {"num_hidden_layers": 6}),
    "roberta": Backbone("roberta", "sequence-classification", 4, _ROBERTA),
}
# Architectures of large language models, as their config.json gives them.
LARGE_BACKBONES = {
    "llama-3-8b": Backbone("llama", "causal-lm", 2, {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }),
    "qwen2.5-7b": Backbone("qwen2", "causal-lm", 2, {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    }),
}  # fmt: skip
NAMED = BACKBONES | LARGE_BACKBONES


def default_cut(name: str) -> int:
    """Return the paper's cut of a backbone; 2, as `SplitFedConfig` has it, for any other model."""
    return NAMED[name].cut if name in NAMED else 2


def build_model(
    name: str, num_labels: int | None = None, task: str | None = None, dtype: str = "float32"
) -> PreTrainedModel:
    """Return a model with random weights: a backbone by name, or by the config of a folder or of a Hub id.

    The cost of a round depends on shapes only, so weights are neither read nor downloaded. Attention is
    the eager one if the model has it: fused kernels hide their operations from a counter.
    """
    config = NAMED[name].config() if name in NAMED else _read_config(name)
    if num_labels is not None:
        config.num_labels = num_labels
    text = config.get_text_config()
    if getattr(text, "vocab_size", None) and getattr(text, "pad_token_id", None) is None:
        text.pad_token_id = 0  # classifiers that pool at the last token refuse batches without one
    if task is None and name in NAMED:
        task = NAMED[name].task
    auto: Any = TASKS[task] if task is not None else _own_class(config, name)
    build = auto.from_config if hasattr(auto, "from_config") else auto._from_config
    try:
        model: PreTrainedModel = build(config, attn_implementation="eager", dtype=getattr(torch, dtype))
    except (ValueError, ImportError) as error:
        if "eager" not in str(error) and "attn_implementation" not in str(error):
            raise ValueError(f"{name} cannot be built for {task or 'its own task'}: {error}") from error
        model = build(config, dtype=getattr(torch, dtype))
    return model


def _read_config(name: str) -> PreTrainedConfig:
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"The folder {name} holds no config.json. Give a folder that save_pretrained wrote.")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name)
    except Exception as error:  # the Hub, the network, the cache and the file each have their own
        where = "The config.json of the folder" if folder.is_dir() else "No backbone or folder has this name, and as a"
        what = "cannot be read" if folder.is_dir() else "Hub id its config cannot be had"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"Unknown model {name!r}. {where} {what} ({reason}). Backbones that need no Hub: {', '.join(NAMED)}."
        ) from error
    return config


def _own_class(config: PreTrainedConfig, name: str) -> Any:
    """Return the class that the config names, if it has a loss, or the classifier for this kind of model."""
    for architecture in config.architectures or []:
        cls = getattr(transformers, architecture, None)
        if cls is not None and find_labels(cls):
            return cls
    for task in ("image-classification", "sequence-classification"):
        auto: Any = TASKS[task]
        if type(config) in auto._model_mapping:
            return auto
    raise ValueError(f"{name} does not say what it is trained for. Name a task: {', '.join(TASKS)}.")


class Samples:
    """Batches of made-up samples for a model, all equal and without padding."""

    def __init__(self, model: PreTrainedModel, sequence_length: int | None = None):
        if sequence_length is not None and sequence_length < 1:
            raise ValueError(f"The sequence length must be at least 1, got {sequence_length}.")
        self.loss_spec = LossSpec.of(model, find_labels(type(model)))
        self._is_text = model.main_input_name == "input_ids"
        self._length = (sequence_length or SEQUENCE_LENGTH) if self._is_text else None
        self._sample = {name: self._lengthened(t[:1]) for name, t in example_inputs(model).items()}

    def batch(self, size: int) -> dict[str, Tensor]:
        """Return `size` samples with labels."""
        inputs = {name: t.repeat(size, *[1] * (t.dim() - 1)) for name, t in self._sample.items()}
        return inputs | {name: self._labels(name, inputs) for name in self.loss_spec.label_names if name not in inputs}

    def batches(self, sizes: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return a batch of each size."""
        return [self.batch(size) for size in sizes]

    def _lengthened(self, t: Tensor) -> Tensor:
        if self._length is None:
            return t
        return t.repeat(1, -(-self._length // t.shape[1]))[:, : self._length]

    def _labels(self, name: str, inputs: dict[str, Tensor]) -> Tensor:
        # Class 0 for all samples: a method that waits until it has seen all classes keeps waiting.
        first = next(iter(inputs.values()))
        if self.loss_spec.loss_type in ("ForTokenClassification", "ForCausalLM", "ForMaskedLM"):
            return torch.zeros(first.shape[:2], dtype=torch.long)
        real = self.loss_spec.problem_type in ("regression", "multi_label_classification")
        if real or (self.loss_spec.num_labels == 1 and name == "labels"):
            return torch.zeros(len(first), self.loss_spec.num_labels)
        return torch.zeros(len(first), dtype=torch.long)
