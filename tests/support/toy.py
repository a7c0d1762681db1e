"""Hand-sized halves, so that a method can be checked against brute force without a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import ModelOutput

from hf_coefsfl.protocol.client_side import ClientSide
from hf_coefsfl.protocol.context import RoundContext
from hf_coefsfl.protocol.loss import LossSpec
from hf_coefsfl.protocol.messages import SmashedData
from hf_coefsfl.protocol.server_side import ServerSide

CLASSIFICATION = LossSpec("ForSequenceClassification", num_labels=3, label_names=("labels",))
REGRESSION = LossSpec("ForSequenceClassification", 2, ("labels",), problem_type="regression")
MULTI_LABEL = LossSpec("ForSequenceClassification", 3, ("labels",), problem_type="multi_label_classification")
TOKENS = LossSpec("ForTokenClassification", 3, ("labels",))
CAUSAL = LossSpec("ForCausalLM", 3, ("labels",), shifts_labels=True)
SPANS = LossSpec("ForQuestionAnswering", 2, ("start_positions", "end_positions"))


class ToyClient(nn.Module):
    """x (b, T, 3) -> s (b, T, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def context(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}

    def forward(self, x: Tensor, crossing: dict[str, Tensor] | None = None) -> SmashedData:
        return SmashedData(self.layer(x).tanh(), crossing or {})


class ToyServer(nn.Module):
    """s (b, T, 4) -> the outputs and the loss of a task, computed as transformers does."""

    def __init__(self, task: LossSpec, affine: bool = False):
        super().__init__()
        self.task, self.affine = task, affine
        self.hidden = nn.Linear(4, 5)
        self.head = nn.Linear(5, task.num_labels)

    def outputs(self, s: Tensor) -> dict[str, Tensor]:
        hidden = self.hidden(s)
        logits = self.head(hidden if self.affine else hidden.tanh())
        if self.task.loss_type == "ForQuestionAnswering":
            return {"start_logits": logits[..., 0], "end_logits": logits[..., 1]}
        return {"logits": logits.mean(1) if self.task.loss_type == "ForSequenceClassification" else logits}

    def loss(self, outputs: dict[str, Tensor], labels: dict[str, Tensor]) -> Tensor:
        ce = nn.functional.cross_entropy
        if "start_logits" in outputs:
            length = outputs["start_logits"].shape[1]
            parts = [
                ce(outputs[f"{side}_logits"], labels[f"{side}_positions"].clamp(0, length), ignore_index=length)
                for side in ("start", "end")
            ]
            return (parts[0] + parts[1]) / 2
        logits, target = outputs["logits"], labels["labels"]
        if self.task.problem_type == "regression":
            return nn.functional.mse_loss(logits, target)
        if self.task.problem_type == "multi_label_classification":
            return nn.functional.binary_cross_entropy_with_logits(logits, target)
        if self.task.shifts_labels:
            logits, target = logits[:, :-1], target[:, 1:]
        return ce(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))

    def forward(self, smashed: SmashedData, **labels: Tensor) -> ModelOutput:
        outputs = self.outputs(smashed.activations)
        return ModelOutput(loss=self.loss(outputs, {**smashed.labels, **labels}), **outputs)


def toy_labels(task: LossSpec, batch: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Labels of a task, some of them ignored."""
    if task.loss_type == "ForQuestionAnswering":
        positions = torch.randint(length, (2, batch), generator=generator)
        positions[1, 0] = length + 3  # beyond the window: ignored by the loss
        return {"start_positions": positions[0], "end_positions": positions[1]}
    if task.loss_type in ("ForTokenClassification", "ForCausalLM"):
        target = torch.randint(task.num_labels, (batch, length), generator=generator)
        target[0, -2:] = -100
        return {"labels": target}
    if task.problem_type == "regression":
        return {"labels": torch.randn(batch, task.num_labels, generator=generator)}
    if task.problem_type == "multi_label_classification":
        return {"labels": torch.randint(2, (batch, task.num_labels), generator=generator).float()}
    return {"labels": torch.randint(task.num_labels, (batch,), generator=generator)}


def toy_batch(task: LossSpec, batch: int = 4, length: int = 3, seed: int = 0) -> dict[str, Tensor]:
    """One collated batch."""
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(batch, length, 3, generator=generator), **toy_labels(task, batch, length, generator)}


def toy_sides(
    task: LossSpec, num_batches: int = 3, *, affine: bool = False, seed: int = 0, lr: float = 0.1, **setting: object
) -> tuple[ClientSide, ServerSide]:
    """Both sides with equal weights for equal seeds."""
    torch.manual_seed(seed)
    client, server = ToyClient(), ToyServer(task, affine)
    shared = RoundContext(seed=seed, round_index=0, client=0, **setting)  # type: ignore[arg-type]
    batches = [toy_batch(task, seed=seed + 10 + i) for i in range(num_batches)]
    return (
        ClientSide(client, batches, torch.optim.AdamW(client.parameters(), lr=lr), shared, task),
        ServerSide(server, torch.optim.AdamW(server.parameters(), lr=lr), shared, task),
    )
