"""`coefsfl train`: fine-tune a model on one of the tasks, evaluate it, save and describe the adapter."""

from __future__ import annotations

import argparse

from ..methods import DEFAULT_METHOD
from ..tasks import TASKS
from ..tasks.run import run as run_recipe

EPILOG = f"""\
examples:
  coefsfl train mnli --help
  coefsfl train cifar100 --method {DEFAULT_METHOD} --num_rounds 100 --partition dirichlet --dirichlet_alpha 0.1
  coefsfl train newsgroups options.yaml --dataset_name my_posts --columns text=body label=group

On several devices: accelerate launch -m hf_coefsfl train mnli ...
"""
TRAINS = True  # so its progress and warnings are shown, and all cores are used


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("task", choices=TASKS, help="one of %(choices)s", metavar="task")
    parser.add_argument(
        "options", nargs=argparse.REMAINDER, help="options of the task; --help after the task lists them"
    )


def run(arguments: argparse.Namespace) -> None:
    """Run the recipe of a task."""
    task = arguments.task
    run_recipe(task, description=TASKS[task].__doc__ or "", argv=arguments.options, prog=f"coefsfl train {task}")
