"""The costs of federated weights in few bytes are those of a run."""

from pathlib import Path
from typing import Any

import pytest

from hf_coefsfl.analysis.cost import CostModel, Round
from hf_coefsfl.analysis.memory import Run
from hf_coefsfl.cli import main
from hf_coefsfl.methods import make_method
from tests.support.federated import images, tiny_vit, trainer


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
def test_bytes_memory_and_files(codec: str, tmp_path: Path) -> None:
    """To the byte: what crosses, and the residuals that clients leave."""
    settings: dict[str, Any] = {"num_clients": 2, "participation": 1.0, "warmup_rounds": 0, "num_rounds": 1}
    run = trainer(tmp_path, data=images(14), adapter_codec=codec, method="acc_sfl", eval_dataset=None, **settings)
    run.train()
    plan, whole = Round(7, run.args.per_device_train_batch_size), Run(1, 2, 2)
    models = [CostModel(tiny_vit(attn_implementation="eager"), adapter_codec=name) for name in ("float32", codec)]
    (plain,), (cost,) = (model.costs(make_method("acc_sfl"), 2, plan, whole) for model in models)
    for entry in run.ledger.entries:
        for found, predicted in ((entry["up"], cost.up), (entry["down"], cost.down)):
            assert found["adapters"] + found["auxiliary_models"] == predicted["adapters"]
    assert plain.up["adapters"] > (1.9 if codec == "bfloat16" else 3.5) * cost.up["adapters"]
    assert run.rounds is not None and plain.footprint is not None and cost.footprint is not None
    residuals = sum(t.nbytes for name, t in run.rounds.state_dict().items() if name.startswith("residual."))
    assert residuals == 2 * plain.up["adapters"]
    for memory in ("process", "disk"):
        before, after = (getattr(c.footprint, memory)["state"] for c in (plain, cost))
        assert after - before == residuals
    grown = cost.footprint.disk["checkpoints"] - plain.footprint.disk["checkpoints"]
    assert grown == pytest.approx(residuals, abs=8)  # a ledger with shorter numbers


def test_the_command_and_a_wrong_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="adapter_codec='int4' is not one of: float32, bfloat16, int8"):
        CostModel(tiny_vit(), adapter_codec="int4")
    with pytest.raises(SystemExit):
        main(["cost", "--model", "vit-tiny", "--adapter-codec", "int4"])
    assert "invalid choice: 'int4'" in capsys.readouterr().err
