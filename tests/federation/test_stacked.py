"""Clients that are stacked in one batch come to what they come to one after the other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ConvBertConfig, ConvBertForSequenceClassification

from tests.support.federated import images, same, tiny_vit, weights
from tests.support.stacked import STACKABLE, assert_equal, make, noted_groups, of_clients

GROUPS = {5: [3, 2] * 2, 2: [2, 1, 2] * 2}  # by how many are stacked: clients of each size, in two rounds


def compare(folder: Path, groups: dict[int, list[int]], tolerance: float = 1e-3, **changes: Any) -> None:
    """Compare runs that stack so many clients with one that stacks none."""
    alone = make(folder, 1, **changes)
    start = weights(alone)
    alone.train()
    for stacked, expected in groups.items():
        with noted_groups() as found:
            ours = make(folder, stacked, **changes)
            assert same(weights(ours), start)
            ours.train()
        assert found == [size for size in expected if size > 1]
        assert_equal(ours, alone, start, tolerance)


def test_the_methods_that_can_be_stacked() -> None:
    assert STACKABLE == ["coef_d", "coef_j", "coef_p", "coef_w", "oracle", "reuse", "vanilla"]


@pytest.mark.parametrize("method", STACKABLE)
@pytest.mark.parametrize(("kind", "clip", "stacked"), [("vit", 0.0, 5), ("bert", 0.05, 2)])
def test_equals_one_by_one(tmp_path: Path, method: str, kind: str, clip: float, stacked: int) -> None:
    """Of clients with unequal numbers of samples; texts of several lengths."""
    compare(tmp_path, {stacked: GROUPS[stacked]}, method=method, kind=kind, max_grad_norm=clip)


OPTIONS: dict[str, tuple[float, dict[str, Any]]] = {
    "clipped images": (1e-3, {"max_grad_norm": 0.05}),
    "texts": (1e-3, {"kind": "bert"}),
    "warm-up": (1e-3, {"warmup_rounds": 1}),
    "bf16": (0.2, {"bf16": True}),
    "bfloat16": (0.05, {"exchange_dtype": "bfloat16"}),
    "int8": (0.05, {"exchange_dtype": "int8", "kind": "bert"}),
    "adapters": (0.05, {"adapter_codec": "int8"}),
    "in a file": (1e-3, {"exchange_memory_limit": 0, "kind": "bert"}),
    "sgd": (1e-3, {"optim": "sgd", "learning_rate": 0.1, "weight_decay": 0.1}),
    "kept optimizer": (1e-3, {"keep_server_optimizer": True}),
    "lora head": (1e-3, {"head": "lora"}),
    "checkpointing": (1e-3, {"gradient_checkpointing": True}),
    "median": (1e-3, {"aggregation": "median"}),
    "exact": (1e-3, {"method": "coef_j", "method_kwargs": {"exact": True, "feedback_at": "final"}}),
    "two projections": (1e-3, {"method": "coef_j", "method_kwargs": {"num_projections": 2, "feedback_at": "walk"}}),
    "measured": (1e-3, {"staleness_probe": 1, "count_flops": True}),
    "workers": (1e-3, {"dataloader_num_workers": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_options(tmp_path: Path, name: str) -> None:
    tolerance, changes = OPTIONS[name]
    compare(tmp_path, {5: GROUPS[5]}, tolerance, **changes)


def test_resumes(tmp_path: Path) -> None:
    """To the same bits, and from a checkpoint of clients one after the other."""
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    whole = make(tmp_path / "whole", 5, **settings)
    whole.train()
    checkpoint = str(tmp_path / "whole" / "5" / "checkpoint-1")
    resumed = make(tmp_path / "resumed", 5, **settings)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert same(weights(resumed), weights(whole))
    alone = make(tmp_path / "alone", 1, **settings)
    alone.train(resume_from_checkpoint=checkpoint)
    assert not same(weights(alone), weights(whole)) and alone.ledger.entries == whole.ledger.entries


# ---- Who is not stacked ----


def test_a_client_that_fails_is_found(tmp_path: Path) -> None:
    """Those that were stacked with it train again one after the other: to the same bits, if all were."""
    data = of_clients("vit", (8, 8, 8))
    pixels = torch.stack(list(data[1]["pixel_values"]))
    pixels[3, 0, 0, 0] = float("nan")
    data[1] = data[1].remove_columns("pixel_values").add_column("pixel_values", pixels.tolist()).with_format("torch")
    runs = [make(tmp_path, stacked, data=data, on_client_failure="skip") for stacked in (1, 5)]
    for run in runs:
        run.train()
    alone, ours = runs
    assert "NaN or infinity on the client side" in alone.ledger.entries[1]["failure"]
    assert ours.ledger.entries == alone.ledger.entries and same(weights(ours), weights(alone))
    with pytest.raises(ValueError, match="NaN or infinity on the client side"):
        make(tmp_path / "raises", 5, data=data).train()


def test_a_label_that_is_left_out(tmp_path: Path) -> None:
    """Samples of such a batch do not weigh the same."""
    data = of_clients("vit", (8, 8, 8))
    data[1] = data[1].map(lambda row, i: {"labels": -100 if i == 2 else int(row["labels"])}, with_indices=True)
    compare(tmp_path, {5: [2, 2]}, data=data)


def test_a_client_whose_data_raises(tmp_path: Path) -> None:
    class Broken(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self, rows: Any, broken: int = -1):
            self.rows, self.broken = rows, broken

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, i: int) -> Any:
            if i == self.broken:
                raise OSError("the disk is gone")
            return {name: self.rows[i][name] for name in ("pixel_values", "labels")}

    data = [Broken(images(8, seed), 5 if seed == 1 else -1) for seed in range(3)]
    compare(tmp_path, {5: [2, 2]}, data=data, on_client_failure="skip")


def test_texts_whose_end_is_seen_are_not_padded(tmp_path: Path) -> None:
    """A convolution over the tokens reads the padding: only batches that are as long are stacked."""
    torch.manual_seed(0)
    config = ConvBertConfig(
        vocab_size=40, hidden_size=16, embedding_size=16, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout=0.0,
        head_ratio=2, num_labels=3,
    )  # fmt: skip
    data = of_clients("bert", (4, 4))
    run = make(tmp_path, 2, kind="bert", model=ConvBertForSequenceClassification(config), data=data, method="vanilla")
    assert run.rounds is not None and run.rounds.stacking.pad_id is None  # type: ignore[attr-defined]


def test_lost_clients(tmp_path: Path) -> None:
    compare(tmp_path, {5: [2, 2]}, client_dropout_rate=0.3, on_client_failure="skip")


def test_layers_are_as_they_were(tmp_path: Path) -> None:
    run = make(tmp_path, 5, model=tiny_vit(0.0))
    run.train()
    assert not any(
        "forward" in module.__dict__ for half in (run.split.client, run.split.server) for module in half.modules()
    )
