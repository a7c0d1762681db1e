"""The tasks: what is fine-tuned on which data, and how it is measured."""

from .base import FineTuningTask, Prepared, TaskArguments
from .causal_lm import CausalLM
from .classification import MNLI, Newsgroups
from .images import CIFAR100, Food101, TinyImageNet
from .question_answering import SQuADv2

TASKS: dict[str, type[FineTuningTask]] = {
    task.name: task for task in (MNLI, Newsgroups, SQuADv2, CIFAR100, Food101, TinyImageNet, CausalLM)
}

__all__ = ["TASKS", "FineTuningTask", "Prepared", "TaskArguments"]
