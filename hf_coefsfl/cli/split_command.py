"""`coefsfl split`: write the half of the model that clients of a deployed run hold, with its tokenizer or processor."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..split.lora import trainable_sides
from ..tasks import TASKS
from ..tasks.options import parse_options
from ..tasks.run import make_trainer

EPILOG = """\
examples:
  coefsfl split mnli --output_dir halves
  coefsfl split mnli options.yaml --cut 2 --dataset_name pairs/ --model_name_or_path my_model/ --output_dir halves

Writes <output_dir>/client, to be given to every client: the embeddings, the first blocks and their adapter, and never
a weight of the server. The options are those of `coefsfl train`, and must be the run's.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("task", choices=TASKS, help="one of %(choices)s", metavar="task")
    parser.add_argument(
        "options", nargs=argparse.REMAINDER, help="options of the task; --help after the task lists them"
    )


def run(arguments: argparse.Namespace) -> str:
    """Split the model of a task and save the client's half."""
    task = TASKS[arguments.task]
    prog = f"coefsfl split {task.name}"
    _, options, config = parse_options(task, description=task.__doc__ or "", argv=arguments.options, prog=prog)
    trainer, _ = make_trainer(task(options), config, train=False)
    folder = Path(str(config.output_dir)) / "client"
    split = trainer.split
    split.client.save_pretrained(folder)
    trainer.processing_class.save_pretrained(folder)
    trained = sum(p.numel() for p in trainable_sides(split)[0].values())
    return (
        f"{folder}: blocks 1 to {split.cut} of {split.num_blocks}, {split.client.num_parameters():,} parameters of "
        f"which {trained:,} are trained, {split.client.nbytes() / 2**20:.1f} MiB"
    )
