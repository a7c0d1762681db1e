"""How this process was started: processes that should be there and are not."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from ..config import SplitFedConfig

logger = logging.getLogger(__name__)
_ON_CPUS = "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes {} script.py"


def check_processes(args: SplitFedConfig) -> None:
    """Refuse processes that do not know of each other, and warn of fewer than `accelerate launch` was asked for."""
    running, started = args.world_size, int(os.environ.get("WORLD_SIZE", 1))
    if "LOCAL_RANK" in os.environ and started > running:
        raise ValueError(
            f"{started} processes were started (WORLD_SIZE), but this one runs alone: each would train all clients and "
            f"write to {args.output_dir}. Without GPUs set use_cpu=True, or launch with "
            f"`{_ON_CPUS.format(started)}`."
        )
    asked = asked_of_launcher()
    if args.process_index == 0 and asked is not None and asked > running:
        _warn_of_missing(asked, running)


@functools.cache
def _warn_of_missing(asked: int, running: int) -> None:
    logger.warning(
        "`accelerate launch` was asked for %d processes, but %d is running, which trains all clients. With --cpu (or "
        "use_cpu in its config file) it starts one only; several on CPUs are started by `%s`.",
        asked,
        running,
        _ON_CPUS.format(asked),
    )


@functools.cache
def asked_of_launcher() -> int | None:
    """Return how many processes the `accelerate launch` above this process was asked for; None if that is not known.

    It hands the number on to nobody, so its own command line and config file are read.
    """
    try:
        import psutil  # type: ignore[import-untyped]  # of accelerate's own dependencies

        launcher = psutil.Process().parent()
        arguments = None if launcher is None else launch_arguments(launcher.cmdline())
        return None if launcher is None or arguments is None else _num_processes(arguments, Path(launcher.cwd()))
    except (Exception, SystemExit) as error:  # another system, a process without rights, an unknown option, ...
        logger.debug("The command line of the launcher cannot be read: %s", error)
        return None


def launch_arguments(command: Sequence[str]) -> list[str] | None:
    """Return what follows `accelerate launch` in a command line; None if it is another command."""
    for i, word in enumerate(command[:4]):  # behind python and its -m, if they are there
        name, rest = Path(word).stem, list(command[i + 1 :])
        if name == "accelerate-launch" or word == "accelerate.commands.launch":
            return rest
        if (name == "accelerate" or word == "accelerate.commands.accelerate_cli") and rest[:1] == ["launch"]:
            return rest[1:]
    return None


def _num_processes(arguments: Sequence[str], folder: Path) -> int | None:
    """Return the number from the option, else from the config file that a launcher in `folder` reads."""
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    known, _ = launch_command_parser().parse_known_args(arguments)
    if known.num_processes is not None:
        return int(known.num_processes)
    if known.config_file is None and (known.cpu or not os.path.isfile(default_config_file)):
        return None  # as many as there are GPUs
    config = load_config_from_file(None if known.config_file is None else str(folder / known.config_file))
    return int(config.num_processes)
