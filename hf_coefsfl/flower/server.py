"""The ServerApp: a `SplitFedTrainer` whose rounds are run by clients on other machines."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from transformers.utils import logging as transformers_logging

from ..recipe import checkpoint_of, complete, make_trainer
from ..trainer import SplitFedTrainer
from .client_node import fingerprint
from .courier import Courier
from .deployment import Deployment
from .memory import return_freed_memory
from .options import DeploymentOptions, read_run_config
from .roster import Roster

logger = logging.getLogger(__name__)
server_app = ServerApp()


class DeployedTrainer(SplitFedTrainer):
    """A `SplitFedTrainer` without training data: clients have it, and train their half themselves."""

    def connect(self, courier: Courier, options: DeploymentOptions) -> None:
        """Wait for the clients; from here on the trainer can train."""
        roster = Roster(courier, fingerprint(self.split.client), self.args.num_clients)
        if not roster.wait_for(options.min_clients, options.start_timeout):
            raise ValueError(
                f"{len(roster.online())} of at least {options.min_clients} clients came within "
                f"{options.start_timeout:g} s. Look at the logs of the SuperNodes, start more of them, or lower "
                "min_clients."
            )
        self.clients = roster
        self.simulation = Deployment(self.split, self.task, roster, courier, self.args, options, self.accelerator)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Train with the clients of the grid, evaluate, save and describe the adapter."""
    serve(grid, context.run_config)


def serve(grid: Grid, run_config: Mapping[str, Any]) -> DeployedTrainer:
    """Run the server of a deployed run; return its trainer."""
    return_freed_memory()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("hf_coefsfl").setLevel(logging.INFO)
    transformers_logging.set_verbosity_warning()
    options = read_run_config(run_config)
    config = options.config
    checkpoint = checkpoint_of(config)
    job = options.task(options.arguments)
    trainer, evaluated = make_trainer(job, config, DeployedTrainer, train=False)
    trainer.connect(Courier(grid), options.deployment)
    logger.info("%d clients; results go to %s.", len(trainer.clients or ()), Path(str(config.output_dir)).absolute())
    complete(trainer, job, evaluated, checkpoint)
    return trainer
