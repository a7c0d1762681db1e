"""`coefsfl split`: write the half of the model that clients of a deployed run hold, with its tokenizer or processor."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..tasks import TASKS
from .train_command import add_task

EPILOG = """\
examples:
  coefsfl split mnli --output_dir halves
  coefsfl split mnli --config options.yaml --cut 2 --dataset_name pairs/ --model_name_or_path mine/ --output_dir halves

Writes <output_dir>/client, to be given to every client: the embeddings, the first blocks and their adapter, and never
a weight of the server. The options are those of `coefsfl train`, and must be the run's.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_task(parser)


def run(arguments: argparse.Namespace) -> str:
    """Split the model of a task and save the client's half."""
    from ..split.lora import trainable_sides  # PyTorch, after the names were checked
    from ..tasks.options import parse_options
    from ..tasks.run import make_trainer

    task = TASKS[arguments.task]
    prog = f"coefsfl split {task.name}"
    _, options, config = parse_options(task, description=task.summary, argv=arguments.options, prog=prog)
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
