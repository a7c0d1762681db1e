"""Training over weights that torchao keeps in int8: `make test-torchao`. It makes every start a second slower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_coefsfl import METHODS, split_model
from tests.support import federated
from tests.support.federated import QUICK, texts, trainer
from tests.support.quantised import wide_bert
from tests.support.selection import slow_except

quantization = pytest.importorskip("torchao.quantization", reason="needs torchao: make test-torchao has it")
TRAINED = [name for name in sorted(METHODS) if not METHODS[name].trains_block_copies]


def quantised(folder: Path, skip: tuple[str, ...] = ("classifier",), kind: Any = None) -> Any:
    from transformers import TorchAoConfig

    model = wide_bert()
    model.save_pretrained(folder)
    settings = TorchAoConfig(kind or quantization.Int8WeightOnlyConfig(), modules_to_not_convert=list(skip))
    return type(model).from_pretrained(folder, quantization_config=settings, dtype=torch.float32)


def moved(folder: Path, model: Any, method: str) -> dict[str, torch.Tensor]:
    few = {"num_clients": 2, "participation": 1.0, "num_rounds": 1, "warmup_rounds": 0, "eval_dataset": None}
    run = trainer(folder, model, texts(10), method=method, method_kwargs=QUICK.get(method), **few)
    before = federated.weights(run)
    run.train()
    run.save_model()
    return {name: t - before[name] for name, t in federated.weights(run).items()}


@pytest.mark.parametrize("method", slow_except("coef_p", "ggn", of=TRAINED))
def test_every_method_trains_as_over_the_same_weights_as_floats(method: str, tmp_path: Path) -> None:
    twin, weight = wide_bert(), "bert.encoder.layer.0.output.dense.weight"
    with torch.no_grad():
        for name, p in quantised(tmp_path / "base").named_parameters():
            twin.get_parameter(name).copy_(p.dequantize() if hasattr(p, "qdata") else p)
    assert 0 < (twin.get_parameter(weight) - wide_bert().get_parameter(weight)).abs().max() < 0.01
    found = moved(tmp_path / "run", quantised(tmp_path / "base"), method)
    expected = moved(tmp_path / "twin", twin, method)
    assert found.keys() == expected.keys() and all(t.any() for t in found.values())
    assert all((t - expected[name]).norm() < 0.05 * expected[name].norm() for name, t in found.items())


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"quantised \(torchao\). method='fsl_sage' trains copies"):
        moved(tmp_path, quantised(tmp_path), "fsl_sage")
    with pytest.raises(ValueError, match="weights of classifier are quantised"):
        moved(tmp_path, quantised(tmp_path, skip=()), "coef_p")
    with pytest.raises(ValueError, match="quantised by torchao with Int8DynamicActivationInt8WeightConfig"):
        split_model(quantised(tmp_path, kind=quantization.Int8DynamicActivationInt8WeightConfig()), 2)
    split = split_model(quantised(tmp_path), 2)
    weights, rows = 2 * (4 * 64 * 64 + 2 * 64 * 128), 2 * (4 * 64 + 128 + 64)  # a row has a scale and a zero point
    assert split_model(wide_bert(), 2).client.nbytes() - split.client.nbytes() == 3 * weights - (4 + 1) * rows
    with pytest.raises(ValueError, match="is quantised by torchao, of which a half cannot be saved"):
        split.client.save_pretrained(tmp_path / "half")
