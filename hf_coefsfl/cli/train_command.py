"""`coefsfl train`: fine-tune a model on one of the tasks, evaluate it, save and describe the adapter."""

from __future__ import annotations

import argparse

from ..tasks import TASKS

EPILOG = """\
examples:
  coefsfl train text_classification --dataset_name posts.csv --columns text=body label=group --metrics accuracy f1
  coefsfl train image_classification --config options.yaml --num_rounds 20
  coefsfl train cifar100 --partition dirichlet --dirichlet_alpha 0.1
  coefsfl train mnli --help

On several devices: accelerate launch -m hf_coefsfl train mnli ...
"""
SHOWS_ALL = True  # so its progress and warnings are shown, and all cores are used


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_task(parser)


def add_task(parser: argparse.ArgumentParser) -> None:
    """Add a task and its options, which a parser of their own reads."""
    parser.add_argument("task", metavar="task", help=f"one of {', '.join(TASKS)}")
    parser.add_argument(
        "options", nargs=argparse.REMAINDER, help="options of the task; --help after the task lists them"
    )


def run(arguments: argparse.Namespace) -> None:
    """Run the recipe of a task."""
    from ..tasks.run import run as run_recipe  # PyTorch, after the names were checked

    task = TASKS[arguments.task]
    run_recipe(task.name, description=task.summary, argv=arguments.options, prog=f"coefsfl train {task.name}")
