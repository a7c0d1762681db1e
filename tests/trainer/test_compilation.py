"""`torch_compile=True`: the halves' blocks are compiled, and nothing else changes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch._dynamo.utils import counters

from hf_coefsfl import SplitFedTrainer, load_adapter, split_model
from hf_coefsfl.split.lora import default_lora
from hf_coefsfl.split.stand_ins import PassThrough, Stop
from tests.support.federated import config, images, same, texts, tiny_bert, tiny_vit, trainer, weights
from tests.support.selection import slow_except

FEWER = {"fsl_sage": {"align_epochs": 1, "num_blocks": 1}}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Earlier tests fill the compiler's cache, which gives up on a function after a few variants of it."""
    donated = torch._functorch.config.donated_buffer
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = donated


def two_blocks() -> Any:
    model = tiny_vit(dropout=0.3)
    del model.vit.layers[2:]
    model.config.num_hidden_layers = 2
    return model


def run(folder: Path, backend: str | None, **changes: Any) -> SplitFedTrainer:
    compiled = {} if backend is None else {"torch_compile": True, "torch_compile_backend": backend}
    if changes.get("method") in FEWER:
        changes.setdefault("method_kwargs", FEWER[changes["method"]])
    small = {"model": two_blocks, "data": lambda: images(16), "num_clients": 2, "dataloader_drop_last": True, "cut": 1}
    for name, value in small.items():
        changes.setdefault(name, value() if callable(value) else value)
    run = trainer(folder / (backend or "plain"), num_rounds=2, warmup_rounds=0, **compiled, **changes)
    run.train()
    return run


def blocks(run: SplitFedTrainer) -> list[torch.nn.Module]:
    """The blocks of both halves."""
    return [b for half in (run.split.client, run.split.server) for b in half.model.get_base_model().vit.layers]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["coef_j", "gas", "mu_splitfed"])
def test_the_eager_backend_gives_the_same_bits(tmp_path: Path, method: str) -> None:
    plain, compiled = (run(tmp_path, backend, method=method) for backend in (None, "eager"))
    assert same(weights(plain), weights(compiled))
    assert plain.evaluate()["eval_loss"] == compiled.evaluate()["eval_loss"]


# CoeF-J goes through one graph twice; GGN and FSL-SAGE differentiate twice, which compiled blocks cannot.
@pytest.mark.parametrize("method", slow_except("coef_j", of=["coef_j", "ggn", "fsl_sage"]))
def test_differentiated_by_aot_autograd_gives_the_same_bits(tmp_path: Path, method: str) -> None:
    plain, compiled = (run(tmp_path, backend, method=method) for backend in (None, "aot_eager"))
    assert same(weights(plain), weights(compiled))


def test_only_the_blocks_that_a_half_computes_are_compiled(tmp_path: Path) -> None:
    compiled = run(tmp_path, "eager")
    for block in blocks(compiled):
        stands_in = isinstance(block, (Stop, PassThrough))
        assert (block._compiled_call_impl is None) == stands_in
    whole = [compiled.split.model, compiled.split.client, compiled.split.server]
    others = [m for top in whole for m in top.modules() if all(m is not block for block in blocks(compiled))]
    assert all(m._compiled_call_impl is None for m in others)


def test_training_compiles_and_evaluation_does_not(tmp_path: Path) -> None:
    counters["stats"].clear()
    compiled = run(tmp_path, "eager")
    assert counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()
    counters["stats"].clear()
    compiled.evaluate()
    compiled.predict(images(4))
    assert counters["stats"]["unique_graphs"] == 0


@pytest.mark.slow
def test_operations_are_counted_as_without(tmp_path: Path) -> None:
    plain, compiled = (run(tmp_path, backend, count_flops=True) for backend in (None, "eager"))
    counted = [[{k: v for k, v in e.items() if "gflops" in k} for e in r.state.log_history] for r in (plain, compiled)]
    assert counted[0] == counted[1]
    assert counted[0][0]["server_gflops"] > 0


@pytest.mark.slow
def test_texts_and_a_last_batch_that_is_smaller(tmp_path: Path) -> None:
    data = {"data": texts(18), "eval_dataset": texts(8), "dataloader_drop_last": False, "method": "coef_j"}
    plain, compiled = (run(tmp_path, b, model=tiny_bert(), **data) for b in (None, "eager"))
    assert same(weights(plain), weights(compiled))


def test_adapters_are_saved_and_loaded_as_without(tmp_path: Path) -> None:
    plain, compiled = (run(tmp_path, backend, method="vanilla") for backend in (None, "eager"))
    files = []
    for trained in (plain, compiled):
        trained.save_model()
        folder = Path(trained.args.output_dir or "")
        files.append({p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*.safetensors"))})
    assert files[0].keys() == files[1].keys()
    assert files[0] == files[1]
    model = two_blocks()
    split = split_model(get_peft_model(model, default_lora(model)), 1)
    load_adapter(split.client, compiled.args.output_dir)
    found = dict(split.model.named_parameters())
    assert all(torch.equal(found[name], p) for name, p in compiled.client_parameters.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"torch_compile_mode": "reduce-overhead"}, "max-autotune-no-cudagraphs"),
        ({"gradient_checkpointing": True}, "Leave one of them out"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(tmp_path, torch_compile=True, **changes)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # compiling takes a minute and a half of an idle core
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor(tmp_path: Path) -> None:
    plain, compiled = (run(tmp_path, backend, method="coef_j") for backend in (None, "inductor"))
    expected, found = weights(plain), weights(compiled)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-4)
    # The masks of a pass without a graph, as in the exchange, and with one, as in the local updates.
    batch = {"pixel_values": torch.randn(4, 1, 8, 8)}
    client = compiled.split.client.train()
    torch.manual_seed(0)
    with torch.no_grad():
        without = client(**batch).activations
    torch.manual_seed(0)
    torch.testing.assert_close(client(**batch).activations.detach(), without)
