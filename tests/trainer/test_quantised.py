"""Training an adapter over a base whose blocks bitsandbytes keeps in 8 or 4 bits."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel

from hf_coefsfl import METHODS, SplitFedTrainer, load_adapter, split_model
from hf_coefsfl.split.quantized import beside_weights, quantised_layers
from tests.support.federated import QUICK, rounds, same, texts, trainer, weights
from tests.support.quantised import dequantised, need_bitsandbytes, quantised, wide_bert
from tests.support.selection import slow_except

need_bitsandbytes()
TRAINED = [name for name in sorted(METHODS) if not METHODS[name].trains_block_copies]
CASES = list(product(TRAINED, ("int8", "nf4")))
FAST = [case for case in CASES if case[1] == "nf4" or case[0] == "coef_p"]


@pytest.fixture(autouse=True)
def garbage_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate collects garbage after each training, which takes longer than these."""
    monkeypatch.setattr("accelerate.utils.memory.gc.collect", lambda: 0)


def make(folder: Path, model: Any, method: str = "coef_p", **changes: Any) -> SplitFedTrainer:
    """Two clients of two batches."""
    settings = {"num_clients": 2, "participation": 1.0, "num_rounds": 1, "warmup_rounds": 0} | changes
    settings.setdefault("method_kwargs", QUICK.get(method))
    return trainer(folder, model, texts(10), method=method, eval_dataset=None, compute_metrics=None, **settings)


def trained(folder: Path, model: Any, method: str = "coef_p", **changes: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a trainer after its rounds, and how far each weight has moved."""
    run = make(folder, model, method, **changes)
    before = weights(run)
    run.train()
    return run, {name: t - before[name] for name, t in weights(run).items()}


@pytest.mark.parametrize(("method", "kind"), slow_except(*FAST, of=CASES))
def test_every_method_trains_as_over_the_same_weights_as_floats(method: str, kind: str, tmp_path: Path) -> None:
    run, moved = trained(tmp_path / "run", quantised(wide_bert(), kind), method)
    twin, expected = trained(tmp_path / "twin", dequantised(quantised(wide_bert(), kind)), method)
    assert moved.keys() == expected.keys() and all(t.any() for t in moved.values())
    # AdamW's first steps are all of one size: a gradient of nearly zero may have another sign.
    assert all((t - expected[name]).norm() < 0.05 * expected[name].norm() for name, t in moved.items())
    (log,), (other,) = rounds(run), rounds(twin)
    assert log["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert log["bytes_up"] == other["bytes_up"] and log["bytes_down"] == other["bytes_down"]


@pytest.mark.parametrize("dropout", [True, False])  # without, 8-bit layers quantise what enters them, too
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_operations_are_counted_as_those_of_floats(kind: str, dropout: bool, tmp_path: Path) -> None:
    counting = {"count_flops": True, "dropout": "synced" if dropout else "off"}
    (log,) = rounds(trained(tmp_path / "run", quantised(wide_bert(), kind), **counting)[0])
    (other,) = rounds(trained(tmp_path / "twin", dequantised(quantised(wide_bert(), kind)), **counting)[0])
    counted = [name for name in log if "gflops" in name]
    assert len(counted) == 4 and all(log[name] == other[name] > 0 for name in counted)


@pytest.mark.parametrize("method", [name for name in sorted(METHODS) if name not in TRAINED])
def test_a_method_that_trains_copies_of_blocks_is_refused(method: str, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=rf"quantised \(bitsandbytes\). method='{method}' trains copies of the model's"
    ):
        make(tmp_path, quantised(wide_bert(), "nf4"), method)


def test_some_methods_are_refused_and_most_are_not() -> None:
    assert set(METHODS) - set(TRAINED) == {"fsl_sage"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"full_finetuning": True}, "full_finetuning=True trains every weight, and integers cannot be trained"),
        ({"torch_compile": True}, "torch_compile=True cannot compile layers that replace their own weights"),
    ],
)
def test_refused_options(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make(tmp_path, quantised(wide_bert(), "int8"), **changes)


def test_a_quantised_head_is_refused_with_what_to_leave_out(tmp_path: Path) -> None:
    """By default transformers quantises all but the output embeddings."""
    model = quantised(wide_bert(), "nf4", llm_int8_skip_modules=None)
    with pytest.raises(ValueError, match=r"of classifier are quantised, .* llm_int8_skip_modules=\['classifier'\]\)"):
        make(tmp_path, model)
    config = LoraConfig(target_modules=["query"], modules_to_save=["output.dense"])
    blocks_only = quantised(wide_bert(), "nf4")
    with pytest.raises(ValueError, match=r"weights of bert.encoder.layer.0.\S*, \S* ... are quantised"):
        make(tmp_path, blocks_only, peft_config=config)
    _, moved = trained(tmp_path / "lora", model, head="lora")
    assert any("classifier.lora_A" in name for name in moved)


@pytest.mark.parametrize(("kind", "share"), [("int8", 0.05), ("nf4", 0.3)])
def test_the_adapter_loads_on_the_unquantised_base(kind: str, share: float, tmp_path: Path) -> None:
    run, _ = trained(tmp_path, quantised(wide_bert(), kind), num_rounds=4, learning_rate=2e-2)
    run.save_model()
    inputs = {name: t for name, t in texts()[:8].items() if name != "labels"}
    with torch.no_grad():
        expected = run.model.eval()(**inputs).logits
        plain = wide_bert().eval()(**inputs).logits
        model = PeftModel.from_pretrained(wide_bert(), str(tmp_path)).eval()
        logits = model(**inputs).logits
        split = split_model(wide_bert(), 2)
        load_adapter(split.client, tmp_path)
        load_adapter(split.server, tmp_path)
        halves = split.eval().server(split.client(**inputs)).logits
    assert torch.allclose(halves, logits, atol=1e-6)
    assert not torch.equal(logits, expected) and (logits - expected).norm() < share * (expected - plain).norm()


def test_a_run_resumes_bit_by_bit_and_on_the_same_base_only(tmp_path: Path) -> None:
    saving = {"num_rounds": 2, "save_strategy": "steps", "save_steps": 1}
    run, _ = trained(tmp_path / "run", quantised(wide_bert(), "nf4"), **saving)
    resumed = make(tmp_path / "resumed", quantised(wide_bert(), "nf4"), **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert same(weights(run), weights(resumed)) and rounds(run) == rounds(resumed)
    other = make(tmp_path / "other", wide_bert(), **saving)
    with pytest.raises(ValueError, match="frozen weights"):
        other.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_recomputed_passes_have_the_same_gradients(kind: str, tmp_path: Path) -> None:
    run, _ = trained(tmp_path / "run", quantised(wide_bert(), kind))
    other, _ = trained(tmp_path / "other", quantised(wide_bert(), kind), gradient_checkpointing=True)
    assert same(weights(run), weights(other))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_over_bfloat16_and_under_autocast(kind: str, tmp_path: Path) -> None:
    """Embeddings and norms are bfloat16; what is trained is float32; the bits of the base stay as they are."""
    model = quantised(wide_bert(), kind, dtype=torch.bfloat16, **({"bnb_4bit_compute_dtype": "bfloat16"}))
    before = {name: t.clone() for name, t in beside_weights(model)}
    bits = {name: layer.weight.detach().clone() for name, layer in quantised_layers(model)}
    run, moved = trained(tmp_path / "run", model)
    assert {t.dtype for t in moved.values()} == {torch.float32} and all(t.any() for t in moved.values())
    assert {p.dtype for p in run.model.parameters() if not p.requires_grad and p.is_floating_point()} == {
        torch.bfloat16
    }
    run.evaluate(texts(6))
    assert all(torch.equal(t, before[name.replace("base_model.model.", "").replace("base_layer.", "")])
               for name, t in beside_weights(run.model))  # fmt: skip
    kept = {name: layer.weight for name, layer in quantised_layers(run.model)}
    assert all(torch.equal(a, b) for a, b in zip(kept.values(), bits.values(), strict=True))
    _, moved = trained(tmp_path / "autocast", quantised(wide_bert(), kind), bf16=True)
    assert all(t.any() and t.isfinite().all() for t in moved.values())
