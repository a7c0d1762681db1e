"""The ServerApp: a `SplitFedTrainer` whose rounds are run by clients on other machines."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import Tensor
from transformers.utils import logging as transformers_logging

from ..federation.sampling import num_sampled
from ..tasks.run import check_folder, complete, make_trainer
from ..trainer.trainer import SplitFedTrainer
from .client_node import fingerprint
from .deployment import Deployment
from .memory import return_freed_memory
from .options import LABELS_ARE_TEXT, DeploymentOptions, read_run_config
from .roster import Roster
from .transport import Courier, look_often

logger = logging.getLogger(__name__)
server_app = ServerApp()


class DeployedTrainer(SplitFedTrainer):
    """A `SplitFedTrainer` without training data: clients have it, and train their half themselves."""

    simulated = False

    def connect(self, courier: Courier, options: DeploymentOptions, max_tokens: int | None = None) -> None:
        """Wait for the clients, whose samples have at most `max_tokens`; from here on the trainer can train."""
        roster = Roster(courier, fingerprint(self.split.client), self.args.num_clients, options.max_samples)
        if not roster.wait_for(options.min_clients, options.start_timeout):
            raise ValueError(
                f"{len(roster.online())} of at least {options.min_clients} clients came within "
                f"{options.start_timeout:g} s. Look at the logs of the SuperNodes, start more of them, or lower "
                "min_clients."
            )
        roster.close()
        if len(roster.online()) < options.min_clients:
            raise ValueError(
                f"{len(roster)} clients came, and only {len(roster.online())} of them have a number below that. "
                "Number the clients from 0 (partition-id), or set num_clients."
            )
        asked = math.ceil(num_sampled(len(roster), self.args.participation) * (1 + options.over_sampling))
        if asked < options.min_clients:
            raise ValueError(
                f"A round would ask {asked} of {len(roster)} clients (participation={self.args.participation:g}), and "
                f"min_clients={options.min_clients} must be left: no round could change anything. Raise the one or "
                "lower the other."
            )
        self.clients = roster
        self.rounds = Deployment(
            self.split,
            self.loss_spec,
            roster,
            courier,
            self.args,
            options,
            self.accelerator,
            self._labels(),
            max_tokens,
        )

    def _labels(self) -> dict[str, Tensor]:
        """Return the labels of a batch of one sample of the evaluation data."""
        data: Any = self.eval_dataset
        data = next(iter(data.values())) if isinstance(data, dict) else data
        batch = self.data_collator([data[0]])
        return {name: batch[name] for name in self.label_names if name in batch}


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Train with the clients of the grid, evaluate, save and describe the adapter."""
    look_often()
    serve(grid, context.run_config)


def serve(grid: Grid, run_config: Mapping[str, Any]) -> DeployedTrainer:
    """Run the server of a deployed run; return its trainer."""
    return_freed_memory()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("hf_coefsfl").setLevel(logging.INFO)
    transformers_logging.set_verbosity_warning()
    options = read_run_config(run_config)
    config = options.config
    if options.task.labels_are_text:
        if not options.deployment.labels_reveal_text:
            raise ValueError(
                f"task={options.task.name!r} is not deployed unasked: {LABELS_ARE_TEXT} If all clients agree to that, "
                "set labels_reveal_text = true in the run config."
            )
        logger.warning(LABELS_ARE_TEXT)
    check_folder(config)
    job = options.task(options.arguments)
    trainer, evaluated = make_trainer(job, config, DeployedTrainer, train=False)
    trainer.check(config.resume_from_checkpoint)  # before clients are waited for
    trainer.connect(Courier(grid), options.deployment, getattr(options.arguments, "max_length", None))
    logger.info("%d clients; results go to %s.", len(trainer.clients or ()), Path(str(config.output_dir)).absolute())
    complete(trainer, job, evaluated)
    return trainer
