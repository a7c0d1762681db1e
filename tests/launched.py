"""A run for `test_distributed.py` to launch: trains, then the main process saves what came out."""

import json
import sys
from pathlib import Path

import torch
from federated import rounds, trainer, weights
from safetensors.torch import save_file

torch.set_num_threads(1)
folder, method = Path(sys.argv[1]), sys.argv[2]
run = trainer(
    folder, method=method, num_rounds=3, num_clients=7, participation=0.5, eval_strategy="steps", eval_steps=1
)
run.train()
if run.is_world_process_zero():
    save_file(weights(run), folder / "weights.safetensors")
    evals = [entry["eval_accuracy"] for entry in run.state.log_history if "eval_accuracy" in entry]
    ledger = json.loads((folder / "communication.json").read_text())
    result = {"world": run.args.world_size, "rounds": rounds(run), "evals": evals, "ledger": ledger}
    (folder / "result.json").write_text(json.dumps(result))
