"""What makes a run the same run: each setting on its own, and checksums that do not depend on how data is stored."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, load_from_disk
from peft import LoraConfig

from hf_coefsfl import SplitFedTrainer
from hf_coefsfl.trainer.fingerprints import of_datasets, of_weights, repeatable
from hf_coefsfl.trainer.identity import Record, compare, identity_of, schedule_changes
from tests.support.federated import config, images, texts, tiny_vit, trainer

# Settings that decide the result. Those of the first table are read from the arguments alone.
DECIDING: dict[str, Any] = {
    "seed": 7, "data_seed": 7, "learning_rate": 1e-3, "lr_scheduler_type": "linear", "warmup_steps": 2,
    "weight_decay": 0.1, "max_grad_norm": 1.0, "optim": "sgd", "adam_beta1": 0.8, "adam_beta2": 0.9,
    "adam_epsilon": 1e-4, "per_device_train_batch_size": 5, "dataloader_drop_last": True, "local_epochs": 2,
    "train_sampling_strategy": "group_by_length",
    "participation": 0.6, "client_dropout_rate": 0.2, "dropout": "off", "exchange_dtype": "int8", "smashed_noise": 0.1,
    "exchange_codec": {"gradients": "int4"}, "adapter_codec": "int8",
    "warmup_rounds": 2, "partition": "dirichlet", "method": "reuse", "method_kwargs": {"num_projections": 2},
}  # fmt: skip
SHOWN = {"method_kwargs": "method option num_projections", "exchange_codec": "exchange_dtype"}
TOLD: dict[str, Any] = {
    "on_client_failure": "skip", "exchange_memory_limit": "1MiB", "staleness_probe": 1, "count_flops": True,
    "gradient_checkpointing": True, "torch_compile": True, "eval_steps": 7, "aggregation": "median",
    "hostile_clients": 2, "client_bound": 5.0, "max_lost_rounds": 1, "stacked_clients": 2,
}  # fmt: skip
SILENT: dict[str, Any] = {
    "logging_steps": 5, "save_steps": 5, "save_total_limit": 3, "dataloader_num_workers": 1, "disable_tqdm": False,
    "dirichlet_alpha": 7.0, "overwrite_output_dir": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> SplitFedTrainer:
    return trainer(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def record(base: SplitFedTrainer) -> Record:
    return identity_of(base)


def with_arguments(base: SplitFedTrainer, **changes: Any) -> Record:
    changed = copy.copy(base)
    changed.args = config(str(base.args.output_dir), **changes)
    return identity_of(changed)


@pytest.mark.parametrize("name", DECIDING)
def test_what_decides_the_result_is_refused(base: SplitFedTrainer, record: Record, name: str) -> None:
    now = with_arguments(base, **{name: DECIDING[name]})
    shown = SHOWN.get(name, name)
    found = compare(record, now)
    assert any(line.startswith(f"{shown}: ") and ", now " in line for line in found.refused), found
    assert not any(line.startswith("hf_coefsfl") for line in found.told)


@pytest.mark.parametrize("name", TOLD)
def test_what_changes_rounding_or_measurements_is_told(base: SplitFedTrainer, record: Record, name: str) -> None:
    found = compare(record, with_arguments(base, **{name: TOLD[name]}))
    assert not found.refused and any(line.startswith(f"{name}: ") for line in found.told)


def test_the_rest_is_neither(base: SplitFedTrainer, record: Record) -> None:
    assert compare(record, with_arguments(base, **SILENT)) == compare(record, record)
    assert not compare(record, record).refused and not compare(record, record).told
    assert compare(record, with_arguments(base, num_rounds=9)) == compare(record, record)  # which may grow


def test_records_of_older_versions_had_the_mean_and_no_bound(base: SplitFedTrainer, record: Record) -> None:
    new = ("aggregation", "hostile_clients", "client_bound", "max_lost_rounds")
    old = record | {"told": {name: value for name, value in record["told"].items() if name not in new}}
    assert compare(old, record) == compare(record, record)
    assert compare(old, with_arguments(base, client_bound=5.0)).told == ["client_bound: 0.0, now 5.0"]


def test_equal_spellings_are_equal(base: SplitFedTrainer, record: Record) -> None:
    same = with_arguments(base, data_seed=base.args.seed, method_kwargs={"num_projections": 1})
    assert not compare(record, same).refused


BUILT: dict[str, tuple[str, Callable[[Path], SplitFedTrainer]]] = {
    "cut": ("cut: 2, now 1", lambda path: trainer(path, cut=1)),
    "rank of LoRA": ("adapter r: ", lambda path: trainer(path, peft_config=small_lora())),
    "head": ("adapter modules_to_save: ", lambda path: trainer(path, head="frozen")),
    "full fine-tuning": ("full_finetuning: false, now true", lambda path: trainer(path, full_finetuning=True)),
    "weights": ("frozen weights: ", lambda path: trainer(path, tiny_vit(seed=1))),
    "dropout of the model": ("model config hidden_dropout_prob: 0.1", lambda path: trainer(path, tiny_vit(0.3))),
    "training data": ("training data: ", lambda path: trainer(path, data=images(seed=2))),
    "evaluation data": ("evaluation data: ", lambda path: trainer(path, eval_dataset=images(24, seed=3))),
    "clients": ("clients: 6, now 4", lambda path: trainer(path, num_clients=4)),
    "partition": ("rows of clients: ", lambda path: trainer(path, data_seed=3)),
    "collator": ("first sample, collated: ", lambda path: trainer(path, data_collator=brighter)),
    "best model": (
        "load_best_model_at_end: false, now true",
        lambda path: trainer(
            path, load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps", eval_steps=1, save_steps=1
        ),
    ),
}  # fmt: skip


def small_lora() -> LoraConfig:
    return LoraConfig(r=2, target_modules="all-linear")


def brighter(rows: list[Any]) -> dict[str, torch.Tensor]:
    pixels = torch.stack([torch.as_tensor(row["pixel_values"]) for row in rows]) + 1
    return {"pixel_values": pixels, "labels": torch.tensor([int(row["labels"]) for row in rows])}


@pytest.mark.parametrize("name", BUILT)
def test_what_is_built_of_them_is_refused(record: Record, tmp_path: Path, name: str) -> None:
    line, build = BUILT[name]
    found = compare(record, identity_of(build(tmp_path)))
    assert any(shown.startswith(line) for shown in found.refused), found


def test_a_setting_that_one_version_does_not_record_is_told(record: Record) -> None:
    older = copy.deepcopy(record)
    del older["decides"]["smashed_noise"]
    older["told"]["torch"] = "1.0"
    found = compare(older, record)
    assert not found.refused
    assert found.told == ["smashed_noise: not recorded, now 0.0", f"torch: 1.0, now {record['told']['torch']}"]


def test_which_schedules_depend_on_the_number_of_rounds(tmp_path: Path) -> None:
    for name, depends in {"constant": False, "linear": True, "cosine": True, "constant_with_warmup": False}.items():
        args = config(tmp_path, num_rounds=8, lr_scheduler_type=name, warmup_steps=2)
        assert schedule_changes(args, 5, done=4) is depends, name
        assert not schedule_changes(args, 8, done=4)
    share = config(tmp_path, num_rounds=8, lr_scheduler_type="constant_with_warmup", warmup_steps=0.5)
    assert schedule_changes(share, 4, done=4)  # a warm-up that is a share of the rounds


# ---- Checksums ----


def test_the_checksum_of_data_does_not_depend_on_how_it_is_stored(tmp_path: Path) -> None:
    rows = {"x": [[i, i + 1] for i in range(2500)], "text": [f"row {i}" for i in range(2500)]}
    rows["y"] = [None if i % 7 == 0 else i % 2 == 0 for i in range(2500)]  # type: ignore[misc]
    data = Dataset.from_dict(rows)
    data.save_to_disk(tmp_path / "data", num_shards=3)
    mapped = data.map(lambda row: row, batched=True, batch_size=77, writer_batch_size=99, keep_in_memory=True)
    order = [*range(1, 2500), 0]
    back = [2499, *range(2499)]
    same = [load_from_disk(tmp_path / "data"), mapped, data.select(order).flatten_indices().select(back)]
    assert {of_datasets([d]) for d in [data, *same]} == {of_datasets([data.with_format("torch")])}
    other = Dataset.from_dict(rows | {"y": [*rows["y"][:-1], True]})
    assert len({of_datasets([d]) for d in (data, other, data.select(order), data.select(range(2499)))}) == 4
    assert of_datasets([data], ["x", "text"]) == of_datasets([other], ["text", "x"])


def test_the_checksum_of_other_kinds_of_data() -> None:
    def samples(last: float) -> list[dict[str, Any]]:
        return [{"x": torch.tensor([0.0, i]), "ids": [i, 2], "name": f"{i}"} for i in (1.0, last)]

    class Loaded(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self, rows: list[Any]):
            self.rows = rows

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> Any:
            return self.rows[index] | {"noise": torch.rand(2)}  # seeded while it is read

    assert of_datasets([samples(2.0)]) == of_datasets([samples(2.0)]) != of_datasets([samples(3.0)])
    assert of_datasets([samples(2.0), samples(3.0)]) != of_datasets([samples(3.0), samples(2.0)])
    assert of_datasets([Loaded(samples(2.0))]) == of_datasets([Loaded(samples(2.0))])
    assert of_datasets([Loaded(samples(2.0))]) != of_datasets([Loaded(samples(3.0))])
    before, made = torch.get_rng_state(), iter(range(2))
    assert repeatable(lambda: next(made)) == "random"
    assert repeatable(lambda: torch.rand(3)) == repeatable(lambda: torch.rand(3)) != "random"
    assert torch.equal(before, torch.get_rng_state())


def test_trained_weights_do_not_count() -> None:
    """They come from the checkpoint; a new head has random ones each time."""
    model, other = tiny_vit(), tiny_vit()
    for each in (model, other):
        each.classifier.requires_grad_(True)
        each.vit.requires_grad_(False)
    with torch.no_grad():
        other.classifier.weight.add_(1)
    assert of_weights(model) == of_weights(other)
    with torch.no_grad():
        other.vit.layernorm.weight[-1] += 1
    assert of_weights(model) != of_weights(other)


def test_texts_have_an_identity(tmp_path: Path) -> None:
    assert of_datasets([texts()]) == of_datasets([texts()]) != of_datasets([texts(seed=1)])


def test_a_part_of_a_setting_that_was_none_or_empty_decides(record: Record) -> None:
    before, now = copy.deepcopy(record), copy.deepcopy(record)
    before["decides"] |= {"schedule": None, "pattern": "{}"}
    now["decides"] |= {"schedule num_cycles": 2, "pattern q": 32}
    found = compare(before, now)
    assert found.refused == ["schedule num_cycles: not recorded, now 2", "pattern q: not recorded, now 32"]
