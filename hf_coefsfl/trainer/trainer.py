"""`SplitFedTrainer`: a `Trainer` whose training step is one communication round."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import PeftConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, Trainer, set_seed
from transformers.utils import is_in_notebook

from .._bfloat16 import check_bfloat16
from ..analysis.flops import RoundFlops
from ..analysis.plots import can_plot, plot_partition
from ..analysis.staleness import StalenessProbe, check_probe, plot_probe, save_probe, summarize_probe
from ..config import SplitFedConfig
from ..federation.clients import Federation
from ..federation.data_checks import DataError, RowCheck
from ..federation.ledger import SUMMED, Ledger, summarize
from ..federation.sampling import num_sampled
from ..federation.server import Clients, ServerRounds
from ..federation.simulation import Simulation
from ..protocol.loss import LossSpec
from ..split import split_model
from ..split.lora import default_lora, save_halves, trainable_sides
from ..split.precision import train_in_float32
from ..split.quantized import check_trained
from .checkpoints import LEDGER_NAME, PROBE_NAME, STATE_NAME, is_checkpoint
from .compilation import compile_blocks
from .evaluation import EvaluatingTrainer
from .hub import SharingTrainer, check_token
from .launching import check_processes, set_timeout
from .model_card import write_card
from .placement import check_one_device, check_quantised, check_recomputation
from .resuming import ResumingTrainer
from .weights import adopt_class_names, note_base_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)


class SplitFedTrainer(ResumingTrainer, EvaluatingTrainer, SharingTrainer):
    """Fine-tune a model that is split between clients and a server.

    The model is cut at block `args.cut`; a LoRA adapter (or every weight) is trained on both sides
    by `args.method`. Step t of the Trainer is communication round t, so everything that counts
    steps counts rounds.

    Args:
        model: a `PreTrainedModel` with a task head, or a `PeftModel` around one.
        args: the configuration.
        train_dataset: one dataset, which `args.partition` spreads over the clients, or a list or dict of one
            dataset for each client.
        eval_dataset: as for `Trainer`; evaluated by the unsplit model.
        data_collator: as for `Trainer`.
        processing_class: as for `Trainer`.
        compute_metrics: as for `Trainer`.
        peft_config: the adapter. Default: LoRA of rank 4 and alpha 8 on every attention and MLP projection, with the
            head as `args.head` says.
        callbacks: as for `Trainer`.
        preprocess_logits_for_metrics: as for `Trainer`.
    """

    simulated = True  # whether the clients are objects here, with parts of `train_dataset`

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        args: SplitFedConfig,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Any = None,
        processing_class: Any = None,
        compute_metrics: Any = None,
        peft_config: PeftConfig | None = None,
        callbacks: list[Any] | None = None,
        preprocess_logits_for_metrics: Any = None,
    ):
        if not isinstance(args, SplitFedConfig):
            raise ValueError(f"args must be a SplitFedConfig, got {type(args).__name__}.")
        if not isinstance(model, (PreTrainedModel, PeftModel)):
            raise ValueError(f"model must be a PreTrainedModel or a PeftModel, got {type(model).__name__}.")
        if type(self).compute_loss is not Trainer.compute_loss:
            raise ValueError(
                f"{type(self).__name__} overrides compute_loss, which training would not call: the loss is the model's "
                "own, computed in the server half. Put it into the model's forward."
            )
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        args.make_method().check_loss(LossSpec.of(base, []))  # before the model is touched
        check_one_device(base)
        check_quantised(base, args)
        if args.staleness_probe:
            check_probe(args.make_method())
        if args.push_to_hub and args.process_index == 0:
            check_token(args.hub_token)
        self.federation = Federation.of(train_dataset, args) if train_dataset is not None else None
        if self.federation is not None:
            adopt_class_names(base, self.federation.datasets[0])
        model = self._with_adapter(model, args, peft_config)
        note_base_path(model)
        check_recomputation(model, args)
        if widened := train_in_float32(model):
            logger.info("%d trained tensors are bfloat16. They are kept and trained in float32.", widened)
        if args.device.type == "cpu" and any(p.dtype == torch.bfloat16 for p in model.parameters()):
            check_bfloat16("A model with bfloat16 weights")
        check_processes(args)
        set_timeout(args)
        args._n_gpu = min(args.n_gpu, 1)  # one device a process: clients are spread, not batches
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self.args: SplitFedConfig = args
        if args.gradient_checkpointing:  # before the split: the halves are clones of the modules
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs)
        self.split = split_model(model, args.cut, args.blocks)
        compile_blocks(self.split, args, self.accelerator)
        self._halves = nn.ModuleList([self.split.client, self.split.server])
        self.client_parameters, self.server_parameters = trainable_sides(self.split)
        self.loss_spec = LossSpec.of(base, self.label_names)
        self.row_check = RowCheck.of(base, self.loss_spec)
        self.clients: Clients | None = self.federation
        self.ledger = Ledger()
        self.best_round: int | None = None  # of the weights, if they are not the last round's
        self._reports: list[dict[str, float]] = []  # of the rounds since the last log
        self.probe = StalenessProbe(args.staleness_probe, args.warmup_rounds)
        self.flops = RoundFlops(args.count_flops)
        self._check_sides()
        self.rounds: ServerRounds | None = self._make_rounds()
        self.check_evaluation_data()

    # ---- Set-up ----

    @staticmethod
    def _with_adapter(
        model: PreTrainedModel | PeftModel, args: SplitFedConfig, peft_config: PeftConfig | None
    ) -> PreTrainedModel | PeftModel:
        layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
        if any(layer.merged for layer in layers):
            raise ValueError(
                "model is a PeftModel whose adapter is merged into its weights: the adapter would not be trained. Call "
                "model.unmerge_adapter() to go on with it, or pass model.merge_and_unload() to train a new one."
            )
        if isinstance(model, PeftModel):
            if peft_config is not None:
                raise ValueError("model is a PeftModel already and peft_config is given. Pass the one or the other.")
            if not layers and isinstance(model.base_model, BaseTuner):
                raise ValueError(
                    "model is a PeftModel without adapter layers: merge_and_unload() or unload() has removed them. "
                    "Pass what that returned, a plain model, and a new adapter is trained."
                )
            return model
        if layers:
            raise ValueError(
                "model holds PEFT layers already, for instance of an earlier trainer: PEFT changes a model in place. "
                "Load it anew, or give each trainer a copy.deepcopy of it."
            )
        if args.full_finetuning:
            if peft_config is not None:
                raise ValueError(
                    "full_finetuning=True trains every weight, yet peft_config is given. Drop one of them."
                )
            return model
        config = peft_config or default_lora(model, head=args.head, blocks=args.blocks)
        check_trained(model, getattr(config, "modules_to_save", None) or ())
        set_seed(args.seed)  # LoRA starts from random numbers
        return get_peft_model(model, config)

    def _check_sides(self) -> None:
        for side, parameters in (("below", self.client_parameters), ("above", self.server_parameters)):
            if not parameters:
                raise ValueError(
                    f"Nothing is trained {side} the cut at block {self.args.cut} of {self.split.num_blocks}. Give both "
                    "sides trainable parameters (LoRA on all blocks does), move the cut, or load your adapter with "
                    "is_trainable=True."
                )
            half = [name for name, parameter in parameters.items() if parameter.dtype == torch.float16]
            if half:
                raise ValueError(
                    f"{len(half)} trained weights are float16 ({half[0]} ...), in which AdamW is unstable. Load the "
                    "model with dtype=torch.float32, and set bf16=True for faster arithmetic if the device has it."
                )
        shared = self.split.shared_trainable()
        if shared:
            raise ValueError(
                f"Both halves need to train {', '.join(shared)}, but a weight can live on one side only. Freeze it, "
                "untie it (config.tie_word_embeddings=False), or train a LoRA adapter instead."
            )

    def _make_rounds(self) -> Simulation | None:
        """Drop the columns the model does not take, as `Trainer` does, and look at a sample of each dataset."""
        if self.federation is None:
            return None
        collate = self.data_collator
        if hasattr(self.federation.datasets[0], "column_names"):
            self.federation = self.federation.map_datasets(lambda d: self._remove_unused_columns(d, "training"))
        else:
            collate = self._get_collator_with_removed_columns(self.data_collator, "training")
        try:
            self.row_check.clients(self.federation, collate)
        except DataError as error:
            if self.args.on_client_failure == "raise":
                raise
            logger.warning("%s Clients with such rows will fail.", error)
        # Clients that share a dataset, or its columns, share what is looked at.
        for client in self.federation.examples():
            self._check_sample(collate(self.federation.rows(client, [0])))
        observers = self.probe, self.flops
        return Simulation(self.split, self.row_check, self.federation, collate, self.args, self.accelerator, observers)

    def _check_sample(self, batch: Any) -> None:
        missing = [name for name in self.label_names if name not in batch]
        if missing:
            raise ValueError(
                f"The training batches have no {', '.join(missing)}, only {', '.join(batch)}: the loss needs labels. "
                f"Rename the dataset's label column to {missing[0]!r}, have the collator make it, or set label_names."
            )
        needed = getattr(self.model, "main_input_name", None)
        if needed is not None and needed not in batch and "inputs_embeds" not in batch:
            raise ValueError(
                f"The training batches have no {needed!r}, only {', '.join(batch)}: the model needs it. Preprocess the "
                f"dataset into a {needed!r} column, or have the collator make it."
            )

    # ---- What Trainer asks for ----

    def get_train_dataloader(self) -> DataLoader:
        """Return the loader of the rounds; each item is a round's index, the same in every process."""
        if self.rounds is None:
            raise ValueError("Training needs a train_dataset.")
        # batch_size=None would break the Trainer's skipping of finished rounds on resume.
        rounds = cast("Dataset[int]", range(self.args.num_rounds))
        return DataLoader(rounds, batch_size=1, collate_fn=lambda batch: {"round": batch[0]})

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the carrier of the learning rate, for schedulers and logs; local updates have their own AdamW."""
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(0))], lr=self.args.learning_rate)
        return self.optimizer

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: DataLoader | None = None) -> nn.Module:
        # Anything but self.model keeps Trainer from wrapping it for data parallelism.
        return self._halves if training else super()._wrap_model(model, training, dataloader)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the mean number of samples a round trains on, for the samples per second."""
        if not self.clients:
            return 0
        sampled = num_sampled(len(self.clients), args.participation)
        return round(sum(self.clients.sizes) / len(self.clients) * sampled * args.local_epochs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Return 0: a round's inputs are clients, not tokens."""
        return 0

    def _clip_grad_norm(self, model: nn.Module) -> None:
        return None  # clipping happens in the local updates

    def _get_grad_norm(self, model: nn.Module, grad_norm: float | None = None) -> float:
        assert self.rounds is not None
        return self.rounds.update_norm

    # ---- One round ----

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Run one communication round: local training of the sampled clients, then federated averaging."""
        assert self.rounds is not None and self.clients is not None
        round_index = self.state.global_step  # not the loader's, which ignore_data_skip would start over
        # A notebook has Trainer's table, and would keep an empty line of every round's bar.
        progress = not self.args.disable_tqdm and self.is_local_process_zero() and not is_in_notebook()
        reports = self.rounds.run_round(round_index, self._get_learning_rate(), progress)
        self.ledger.add(round_index, {self.clients.name(client): report for client, report in reports.items()})
        summary = summarize(reports)
        probed = self.probe.of_round(round_index)
        trained = [report for report in reports.values() if report.meter.transfers]  # the others gave nothing
        counted = self.flops.summary(sum(report.num_samples for report in trained))
        self._reports.append(summary | (summarize_probe(probed) if probed else {}) | counted)
        if self.args.should_save:
            folder = Path(self.args.output_dir or "")
            self.ledger.save(folder / LEDGER_NAME)
            if probed:
                save_probe(self.probe.points, folder / PROBE_NAME)
                if can_plot():
                    plot_probe(self.probe.points, (folder / PROBE_NAME).with_suffix(".png"))
        self.end_if_lost()
        return torch.tensor(summary.get("server_loss", math.nan), device=self.args.device)  # NaN: Trainer's mean

    # ---- Logs and files ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what the rounds since the last log reported: sums of bytes, transfers, seconds; means of the rest."""
        if "loss" in logs and self._reports:
            for name in dict.fromkeys(name for report in self._reports for name in report):
                values = [report[name] for report in self._reports if name in report]
                logs[name] = sum(values) if name in SUMMED else sum(values) / len(values)
            logs["loss"] = logs.get("server_loss", logs["loss"])  # not rounded by a mean over the processes
            self._reports.clear()
        super().log(logs, start_time)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir or "")
        super()._save(str(folder), state_dict=state_dict)
        (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle; the JSON beside it says the same
        self._save_arguments(folder)
        self.ledger.save(folder / LEDGER_NAME)
        if self.rounds is not None:
            state = self.rounds.state_dict()
            (folder / STATE_NAME).unlink(missing_ok=True)
            if state:
                save_file({name: t.detach().contiguous().cpu() for name, t in state.items()}, folder / STATE_NAME)
            if self.probe.points:
                save_probe(self.probe.points, folder / PROBE_NAME)
        # Trainer takes adapter folders inside a checkpoint for further adapters and would load those.
        if not is_checkpoint(folder):
            save_halves(self.split, folder)
            write_card(self, folder)  # over PEFT's

    def plot_partition(self, path: str | os.PathLike[str] | None = None, column: str | None = None) -> Figure:
        """Draw the clients' samples by class, save the picture if a path is given, and return it."""
        if self.federation is None:
            raise ValueError("There is no train_dataset to draw.")
        column = column or self.args.partition_column
        partition, labels, names = Federation.of(self.train_dataset, self.args).labels(column)
        return plot_partition(partition, labels, path, names)
