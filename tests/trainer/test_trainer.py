"""What a Trainer user relies on, with rounds for steps."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi
from transformers import EarlyStoppingCallback, TrainerCallback

from hf_coefsfl import METHODS, SplitFedTrainer
from hf_coefsfl.federation.averaging import flatten
from tests.support.federated import CLASSES, images, rounds, same, texts, tiny_bert, tiny_vit, trainer, weights
from tests.support.selection import slow_except


@pytest.mark.parametrize(
    "method", slow_except("coef_j", of=["reuse", "oracle", "coef_d", "coef_j", "ggn", "hutchinson"])
)
def test_one_batch_per_round_equals_vanilla_with_active_dropout(tmp_path: Path, method: str) -> None:
    """On a real model, with padding and dropout: masks must match for this to hold."""
    runs = []
    for name in (method, "vanilla"):
        run = trainer(
            tmp_path / name,
            tiny_bert(dropout=0.3),
            texts(),
            method=name,
            eval_dataset=None,
            warmup_rounds=0,
            num_rounds=3,
            per_device_train_batch_size=12,
        )
        run.train()
        runs.append(weights(run))
    assert same(*runs)


def test_several_batches_differ_between_methods(tmp_path: Path) -> None:
    runs = {}
    for name in sorted(METHODS):
        run = trainer(tmp_path / name, data=images(16), num_clients=2, method=name, warmup_rounds=0, num_rounds=1)
        run.train()
        runs[name] = flatten(list(weights(run).values()))
    names = sorted(runs)
    assert all(not torch.equal(runs[a], runs[b]) for i, a in enumerate(names) for b in names[i + 1 :])


def test_the_log_tells_a_factor_that_follows_the_batch_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="hf_coefsfl"):
        for kwargs in (None, {"compensation_factor": 7.0}):
            trainer(
                tmp_path, method="coef_d", method_kwargs=kwargs, per_device_train_batch_size=4, num_rounds=1
            ).train()
    told = [record.message for record in caplog.records if "λ" in record.message]
    assert told == ["CoeF-D: λ = 3000 b/32 = 375 for batches of b = 4."]


def test_warmup_rounds_are_vanilla(tmp_path: Path) -> None:
    ours = trainer(tmp_path / "a", method="coef_d", warmup_rounds=2, num_rounds=2)
    vanilla = trainer(tmp_path / "b", method="vanilla", warmup_rounds=0, num_rounds=2)
    ours.train()
    vanilla.train()
    assert same(weights(ours), weights(vanilla)) and rounds(ours) == rounds(vanilla)


def test_logs_of_a_round(tmp_path: Path) -> None:
    run = trainer(tmp_path, method="coef_j", warmup_rounds=1, num_rounds=2, num_clients=6, participation=0.5)
    run.train()
    warmup, round_ = (entry for entry in run.state.log_history if "loss" in entry)
    # 3 clients x 12 samples x (1 + 4) tokens x 16 floats; labels are int64, m is one float a sample
    activations = 3 * 12 * 5 * 16 * 4
    adapters = 3 * sum(p.numel() * 4 for p in run.client_parameters.values())
    assert warmup["transfers"] == 3 * 3 * 2 and round_["transfers"] == 3 * 2
    assert warmup["bytes_up"] == round_["bytes_up"] == activations + 36 * 8 + adapters
    assert warmup["bytes_down"] == activations + adapters
    assert round_["bytes_down"] == 2 * activations + 36 * 4 + adapters
    assert warmup["displacement_norm"] == 0 and round_["displacement_norm"] > 0
    assert warmup["correction_ratio"] == 0 and round_["correction_ratio"] > 0
    assert warmup["client_loss"] == warmup["server_loss"] == pytest.approx(warmup["loss"])
    for name in ("client_loss", "server_loss", "client_seconds", "server_seconds", "learning_rate", "grad_norm"):
        assert math.isfinite(round_[name]) and round_[name] > 0
    ledger = json.loads((tmp_path / "communication.json").read_text())
    total = ledger["total"]
    assert total["transfers"] == 18 + 6
    assert total["up"] == {"smashed_data": 2 * activations, "extras": 2 * 36 * 8, "adapters": 2 * adapters}
    down = {"gradients": 2 * activations, "curvature": activations, "extras": 36 * 4, "adapters": 2 * adapters}
    assert total["down"] == down
    assert [entry["round"] for entry in ledger["entries"]] == [1, 1, 1, 2, 2, 2]
    assert sum(sum(entry["down"].values()) for entry in ledger["entries"]) == sum(down.values())


def test_logs_of_several_rounds_add_up(tmp_path: Path) -> None:
    every, second = trainer(tmp_path / "a", num_rounds=4), trainer(tmp_path / "b", num_rounds=4, logging_steps=2)
    every.train()
    second.train()
    single, double = rounds(every), rounds(second)
    assert len(double) == 2
    for i, entry in enumerate(double):
        pair = single[2 * i : 2 * i + 2]
        assert entry["bytes_up"] == sum(p["bytes_up"] for p in pair)
        assert entry["server_loss"] == pytest.approx(sum(p["server_loss"] for p in pair) / 2)


def test_best_model_and_early_stopping(tmp_path: Path) -> None:
    run = trainer(
        tmp_path,
        num_rounds=12,
        learning_rate=0.08,  # bounces, so that the best round is not the last
        method="reuse",
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        save_total_limit=2,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    run.train()
    losses = {e["step"]: e["eval_loss"] for e in run.state.log_history if "eval_loss" in e}
    best = min(losses, key=lambda step: losses[step])
    assert run.state.global_step == best + 2 < 12, losses
    assert run.evaluate()["eval_loss"] == pytest.approx(losses[best], abs=1e-6)
    # the halves see the reloaded weights
    with torch.no_grad():
        batch = {"pixel_values": torch.stack(list(run.eval_dataset["pixel_values"]))}
        run.split.eval()
        torch.testing.assert_close(
            run.split.server(run.split.client(**batch)).logits, run.model(**batch).logits, atol=1e-6, rtol=0
        )


def test_scheduler_sets_the_local_learning_rate(tmp_path: Path) -> None:
    run = trainer(tmp_path, num_rounds=4, lr_scheduler_type="linear")
    assert run.rounds is not None
    used: list[float] = []
    local = run.rounds.local_optimizer

    def spy(parameters: Any, learning_rate: float) -> torch.optim.Optimizer:
        optimizer = local(parameters, learning_rate)
        used.append(optimizer.param_groups[0]["lr"])
        return optimizer

    run.rounds.local_optimizer = spy  # type: ignore[method-assign]
    run.train()
    logged = [entry["learning_rate"] for entry in run.state.log_history if "loss" in entry]
    expected = [5e-3 * (1 - t / 4) for t in range(4)]
    assert sorted(set(used), reverse=True) == pytest.approx(expected)
    assert len(used) == 4 * 3 * 2  # fresh for every round, client and side
    # Trainer logs the rate a round ran with, as it does for a step
    assert logged == pytest.approx(expected)


def test_predict_evaluate_and_report(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    class Reporter(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(dict(logs))

    run = trainer(tmp_path, callbacks=[Reporter()], eval_strategy="steps", eval_steps=2)
    run.train()
    prediction = run.predict(images(10, seed=2))
    assert prediction.predictions.shape == (10, CLASSES) and "test_accuracy" in prediction.metrics
    assert sum("bytes_up" in logs for logs in seen) == 4 and sum("eval_accuracy" in logs for logs in seen) == 2


@pytest.mark.parametrize("kind", [list, dict])
def test_natural_federation(tmp_path: Path, kind: type) -> None:
    whole = images(60)
    parts = [whole.select(range(0, 10)), whole.select(range(10, 35)), whole.select(range(35, 60))]
    data = parts if kind is list else {"Bern": parts[0], "Basel": parts[1], "Genf": parts[2]}
    run = trainer(tmp_path, data=data, num_clients=None, participation=1.0, num_rounds=2)
    run.train()
    assert run.federation is not None and run.federation.sizes == [10, 25, 25]
    assert run.federation.name(1) == ("1" if kind is list else "Basel")
    assert run.state.log_history[0]["transfers"] == 2 * (3 + 7 + 7)


def test_partition_by_column_and_its_picture(tmp_path: Path) -> None:
    run = trainer(tmp_path, partition="column", partition_column="owner", num_clients=None, num_rounds=1)
    assert run.federation is not None and run.federation.partition.names == tuple(f"site {i}" for i in range(4))
    run.train()
    run.plot_partition(tmp_path / "partition.png", "labels")
    assert (tmp_path / "partition.png").read_bytes()[:4] == b"\x89PNG"


def test_averaging_is_weighted_by_samples(tmp_path: Path) -> None:
    """Two clients of 4 and 12 samples: the mean of their single-client runs, weighted 1 : 3."""
    data = images(16)
    parts = [data.select(range(4)), data.select(range(4, 16))]
    shared: dict[str, Any] = {"num_clients": None, "participation": 1.0, "num_rounds": 1, "dropout": "off"}
    shared |= {"method": "vanilla", "per_device_train_batch_size": 16}
    alone = []
    for i in (0, 1):
        run = trainer(tmp_path / str(i), data=[parts[i]], **shared)
        start = flatten(list(weights(run).values()))
        run.train()
        alone.append(flatten(list(weights(run).values())))
    both = trainer(tmp_path / "both", data=parts, **shared)
    both.train()
    mean = flatten(list(weights(both).values()))
    torch.testing.assert_close(mean, 0.25 * alone[0] + 0.75 * alone[1], atol=1e-7, rtol=1e-5)
    logged = both.state.log_history[0]["grad_norm"]
    assert logged == pytest.approx((mean - start).norm().item(), rel=1e-5)


def test_dropout_off_equals_a_model_without_dropout(tmp_path: Path) -> None:
    off = trainer(tmp_path / "a", tiny_vit(dropout=0.5), dropout="off", num_rounds=2)
    none = trainer(tmp_path / "b", tiny_vit(dropout=0.0), dropout="synced", num_rounds=2)
    synced = trainer(tmp_path / "c", tiny_vit(dropout=0.5), dropout="synced", num_rounds=2)
    for run in (off, none, synced):
        run.train()
    assert same(weights(off), weights(none)) and not same(weights(off), weights(synced))


def test_synced_masks_make_the_first_displacement_zero(tmp_path: Path) -> None:
    run = trainer(tmp_path, tiny_vit(dropout=0.5), warmup_rounds=0, num_rounds=1, local_epochs=2)
    norms: list[torch.Tensor] = []
    original = METHODS["coef_j"].compensate

    def spy(self: Any, feedback: Any, displacement: torch.Tensor, outputs: Any) -> torch.Tensor:
        norms.append(displacement.norm())
        return original(self, feedback, displacement, outputs)

    METHODS["coef_j"].compensate = spy  # type: ignore[method-assign]
    try:
        run.train()
    finally:
        METHODS["coef_j"].compensate = original  # type: ignore[method-assign]
    steps = 2 * 3  # epochs x batches of each client
    assert [n.item() == 0 for n in norms] == ([True] + [False] * (steps - 1)) * 3


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "a", num_rounds=2)
    saving = trainer(tmp_path / "b", num_rounds=2, gradient_checkpointing=True)
    assert any(getattr(m, "gradient_checkpointing", False) for m in saving.split.server.modules())
    plain.train()
    saving.train()
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(saving)[name], value, atol=1e-6, rtol=1e-5)


def test_bf16_autocast_changes_the_arithmetic_not_the_weights_dtype(tmp_path: Path) -> None:
    half, full = trainer(tmp_path / "a", bf16=True, num_rounds=2), trainer(tmp_path / "b", num_rounds=2)
    half.train()
    full.train()
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in weights(half).values())
    assert not same(weights(half), weights(full))
    assert rounds(half)[-1]["loss"] == pytest.approx(rounds(full)[-1]["loss"], rel=0.05)


def test_drop_last_leaves_the_partial_batch_out(tmp_path: Path) -> None:
    run = trainer(tmp_path, method="vanilla", per_device_train_batch_size=5, dataloader_drop_last=True, num_rounds=1)
    run.train()
    assert rounds(run)[0]["transfers"] == 3 * 2 * 2  # 12 samples: two batches of 5


def test_samples_per_second_counts_samples(tmp_path: Path) -> None:
    result = trainer(tmp_path, num_rounds=2, local_epochs=2).train()
    per_round = 3 * 12 * 2
    assert result.metrics["train_samples_per_second"] == pytest.approx(
        2 * per_round / result.metrics["train_runtime"], rel=0.01
    )


def test_progress_bar_shows_rounds_and_clients(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, disable_tqdm=False, num_rounds=2, warmup_rounds=0).train()
    shown = capfd.readouterr().err
    assert "2/2" in shown and "round 1: clients" in shown and "round 2: clients" in shown


def test_nan_stops_with_round_client_and_side(tmp_path: Path) -> None:
    data = {"healthy": images(12), "broken": images(12, seed=3)}
    bad = data["broken"].with_format(None).to_dict()
    bad["pixel_values"][5][0][0][0] = float("nan")
    data["broken"] = type(data["healthy"]).from_dict(bad).with_format("torch")
    run = trainer(tmp_path, data=data, num_clients=None, participation=0.5, save_strategy="steps", save_steps=1, seed=1)
    with pytest.raises(ValueError, match=r"Round \d+, client broken: NaN or infinity on the client side"):
        run.train()
    assert all(p.isfinite().all() for p in weights(run).values())
    reached = run.state.global_step
    assert reached == 0 or (tmp_path / f"checkpoint-{reached}").is_dir()


def test_nan_of_the_server_is_named(tmp_path: Path) -> None:
    run = trainer(tmp_path, num_rounds=2)
    forward = run.split.server.forward

    def poisoned(smashed: Any, **kwargs: Any) -> Any:
        output = forward(smashed, **kwargs)
        output.loss = output.loss * float("nan")
        return output

    run.split.server.forward = poisoned  # type: ignore[method-assign]
    before = weights(run)
    with pytest.raises(ValueError, match=r"Round 1, client \d+: NaN or infinity on the server side"):
        run.train()
    assert same(before, weights(run))


def test_training_args_are_json_not_a_pickle(tmp_path: Path) -> None:
    run = trainer(tmp_path, num_rounds=1, save_strategy="steps", save_steps=1, hub_token="hf_secret")
    run.train()
    run.save_model()
    assert not list(tmp_path.rglob("training_args.bin"))
    saved = json.loads((tmp_path / "training_args.json").read_text())
    assert saved["method"] == "coef_j" and saved["cut"] == 2
    assert "hf_secret" not in (tmp_path / "training_args.json").read_text()


def test_push_uploads_the_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded: list[set[str]] = []

    def upload(self: HfApi, folder_path: str, **kwargs: Any) -> None:
        uploaded.append({str(path.relative_to(folder_path)) for path in Path(folder_path).rglob("*")})

    monkeypatch.setattr(SplitFedTrainer, "init_hf_repo", lambda self, token=None: setattr(self, "hub_model_id", "a/b"))
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    run = trainer(tmp_path, num_rounds=1)
    run.train()
    run.push_to_hub()
    wanted = {"adapter_model.safetensors", "client/adapter_model.safetensors", "server/adapter_model.safetensors"}
    assert wanted | {"README.md", "communication.json"} <= uploaded[0]
