"""Split federated fine-tuning from end to end, on a CPU in one or two minutes, with nothing to download.

    accelerate launch recipes/quickstart.py

A tiny vision transformer is first pretrained for a few seconds on public images of the digits 0 to 4. Then 20 clients
and a server fine-tune it on private images of all ten digits. Each client holds its images and the first of the three
blocks (the paper's share: 4 of 12). The server holds the other blocks and the head. Five methods start from the same
weights and see the same clients and batches:

    vanilla   asks the server for a fresh gradient at every batch: many transfers
    reuse     asks once per round and reuses that gradient, which grows stale with every local update
    coef_d    reuses it too and corrects its staleness with the squared gradient, at no extra traffic
    coef_j    corrects it with one more vector per sample, which the server sends along
    coef_w    corrects it as coef_d does, and takes it from the server while that trains (ours)
"""

import argparse
from pathlib import Path

import torch
from accelerate import PartialState
from sklearn.datasets import load_digits
from transformers import PrinterCallback, TrainerCallback, ViTConfig, ViTForImageClassification, set_seed
from transformers.utils import logging

from hf_coefsfl import METHODS, SplitFedConfig, SplitFedTrainer
from hf_coefsfl.analysis.plots import accuracy_curve, plot_lines, plot_runs
from hf_coefsfl.analysis.tables import format_table

BATCH_SIZE = 4  # small batches mean many local updates per round, which is what makes reused gradients stale


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    default = ["vanilla", "reuse", "coef_d", "coef_j", "coef_w"]
    add(
        "--output_dir",
        type=Path,
        default=Path("outputs/quickstart"),
        help="folder of the results (default: %(default)s)",
    )
    add("--methods", nargs="+", default=default, choices=sorted(METHODS), metavar="NAME", help="some of %(choices)s")
    add("--num_rounds", type=int, default=15, help="communication rounds (default: %(default)s)")
    add("--seed", type=int, default=0, help="for the split of the data and all training (default: %(default)s)")
    return parser.parse_args()


def load_data(seed: int) -> tuple[list[dict], list[dict], list[dict]]:
    """Return scikit-learn's 1797 digits of 8 x 8 pixels as a public, a private and a test part."""
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1  # 0..16 to -1..1
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(seed)).tolist()
    samples = [{"pixel_values": pixels[i], "labels": int(labels[i])} for i in order]
    return [s for s in samples[:500] if s["labels"] < 5], samples[500:-400], samples[-400:]


def pretrain(public: list[dict], seed: int, steps: int = 200) -> ViTForImageClassification:
    """Return a small ViT trained on the public digits, with a new head for all ten."""
    set_seed(seed)
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
        image_size=8, patch_size=2, num_channels=1, num_labels=10,
    )  # fmt: skip
    model = ViTForImageClassification(config)
    images = torch.stack([sample["pixel_values"] for sample in public])
    labels = torch.tensor([sample["labels"] for sample in public])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        batch = torch.randint(len(images), (64,))
        loss = model(images[batch], labels=labels[batch]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.classifier.reset_parameters()
    return model


def over_transfers(log_history: list[dict]) -> list[tuple[float, float]]:
    """Return (transfers so far, accuracy in percent) for each evaluation of a run."""
    points, transfers = {}, 0
    for entry in log_history:
        transfers += entry.get("transfers", 0)
        if "eval_accuracy" in entry:
            points[transfers] = 100 * entry["eval_accuracy"]
    return list(points.items())


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


class PrintAccuracy(TrainerCallback):
    """One short line per evaluation instead of the full logs."""

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        if state.is_world_process_zero:
            print(f"  round {state.global_step:2d}: accuracy {metrics['eval_accuracy']:.1%}", flush=True)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # matrices of this size are too small to share between cores
    logging.disable_progress_bar()
    # One of the processes of `accelerate launch`, or the only one without a launcher.
    process = PartialState(cpu=not torch.accelerator.is_available())
    base_dir = args.output_dir / "base"

    public, private, test = load_data(args.seed)
    process.print(f"Pretraining on {len(public)} public images of the digits 0 to 4 ...", flush=True)
    base = pretrain(public, args.seed)
    if process.is_main_process:
        base.save_pretrained(base_dir)
    process.wait_for_everyone()

    rows, curves, transfers = [], {}, {}
    for method in args.methods:
        process.print(f"{METHODS[method].title}: {args.num_rounds} rounds ...", flush=True)
        config = SplitFedConfig(
            output_dir=str(args.output_dir / method),
            overwrite_output_dir=True,  # of an earlier quickstart
            method=method,
            cut=1,
            num_clients=20,
            participation=0.2,
            num_rounds=args.num_rounds,
            partition="dirichlet",
            dirichlet_alpha=3.0,
            min_client_samples=BATCH_SIZE,
            per_device_train_batch_size=BATCH_SIZE,
            per_device_eval_batch_size=len(test),
            learning_rate=3e-3,
            eval_strategy="steps",
            eval_steps=3,
            eval_on_start=True,
            save_strategy="no",
            dataloader_pin_memory=False,
            disable_tqdm=True,
            seed=args.seed,
        )
        trainer = SplitFedTrainer(
            model=ViTForImageClassification.from_pretrained(base_dir),  # the same start for every method
            args=config,
            train_dataset=private,
            eval_dataset=test,
            compute_metrics=accuracy,
            callbacks=[PrintAccuracy()],
        )
        trainer.remove_callback(PrinterCallback)
        seconds = trainer.train().metrics["train_runtime"]
        trainer.save_model()
        curves[method] = accuracy_curve(trainer.state.log_history)
        transfers[method] = over_transfers(trainer.state.log_history)
        final = curves[method][-1][-1]
        traffic = {"MiB": trainer.ledger.mib, "transfers": trainer.ledger.total.transfers}
        rows.append({"method": method, "accuracy": final, **traffic, "seconds": seconds})

    if process.is_main_process:
        plot_runs(curves, args.output_dir / "accuracy.png", metric="accuracy on the test images")
        panels = {"accuracy on the test images, %": transfers}
        title = f"{args.num_rounds} rounds of each method"
        plot_lines(panels, args.output_dir / "transfers.png", xlabel="transfers over the cut, all clients", title=title)
        trainer.plot_partition(args.output_dir / "partition.png")
        columns = {"method": "", "accuracy": ".1%", "MiB": ".1f", "transfers": "", "seconds": ".1f"}
        print("\n" + format_table(rows, columns))
        print("\nMiB and transfers are what a network would carry; seconds are this machine's, without a network.")
        print(f"Accuracy over transfers:           {args.output_dir / 'transfers.png'}")
        print(f"Accuracy over rounds and over MiB: {args.output_dir / 'accuracy.png'}")
        print(f"Which client holds which digits:   {args.output_dir / 'partition.png'}")
        print(f"Adapters, a folder per method:     {args.output_dir / '<method>'} (on the model in {base_dir})")


if __name__ == "__main__":
    main()
