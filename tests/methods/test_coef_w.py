"""CoeF-W: CoeF-D along the walk of the server, with two passes."""

from pathlib import Path

import pytest
from torch import Tensor

from hf_coefsfl import SplitFedConfig
from hf_coefsfl.methods import DEFAULT_METHOD, make_method
from hf_coefsfl.protocol.loss import LossSpec
from tests.support.federated import rounds, trainer
from tests.support.toy import CAUSAL, CLASSIFICATION, REGRESSION, SPANS, TOKENS, toy_sides
from tests.support.walk import assert_close, same, trained, trained_by_hand

TASKS = [CLASSIFICATION, REGRESSION, TOKENS, CAUSAL, SPANS]


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.loss_type)
def test_a_round_equals_a_loop_by_hand(task: LossSpec, epochs: int) -> None:
    def compensate(g: Tensor, loss: Tensor, delta: Tensor) -> Tensor:
        return g + 3000 * len(g) / 32 * g * g * delta

    ours = trained("coef_w", toy_sides(task, 3, local_epochs=epochs))
    assert_close(ours, trained_by_hand(task, epochs, 2, compensate))


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.loss_type)
def test_it_is_coef_d_with_two_other_options(task: LossSpec) -> None:
    """To the bit: the archive of the study has its runs as such."""
    ours = trained("coef_w", toy_sides(task, 3))
    theirs = trained("coef_d", toy_sides(task, 3), feedback_at="walk", server_passes=2)
    papers = trained("coef_d", toy_sides(task, 3))
    assert same(ours, theirs) and not same(ours, papers)


@pytest.mark.parametrize("method", ["coef_w", "coef_p"])
@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.loss_type)
def test_one_batch_and_one_pass_equal_vanilla(task: LossSpec, method: str) -> None:
    assert same(trained(method, toy_sides(task, 1), server_passes=1), trained("vanilla", toy_sides(task, 1)))


def test_it_is_the_default() -> None:
    assert DEFAULT_METHOD == SplitFedConfig.method == "coef_w"


def test_titles() -> None:
    assert make_method("coef_w").full_title == "CoeF-W"
    assert make_method("coef_w", {"feedback_at": "initial", "server_passes": 1}).full_title == "CoeF-W, initial, 1 pass"
    with pytest.raises(ValueError, match="0 makes CoeF-W gradient reuse"):
        make_method("coef_w", {"compensation_factor": -1.0})
    assert make_method("coef_w").defaults_of_run(8) == "CoeF-W: λ = 3000 b/32 = 750 for batches of b = 8."


def test_the_clients_loss_is_that_of_the_gradient_it_followed(tmp_path: Path) -> None:
    """More passes of the server, which learns with each, do not make the client's loss smaller."""
    ends = []
    for passes in (1, 2, 8):
        run = trainer(
            tmp_path / str(passes),
            method="coef_w",
            method_kwargs={"server_passes": passes},
            num_rounds=1,
            warmup_rounds=0,
        )
        run.train()
        ends.append((rounds(run)[0], run))
    assert len({entry["client_loss"] for entry, _ in ends}) == 1
    assert len({entry["server_loss"] for entry, _ in ends}) == 3
