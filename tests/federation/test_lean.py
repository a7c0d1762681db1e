"""What the package itself does for a batch and a client: seeding, calls of functions, gradients that are in the way."""

import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

import hf_coefsfl
from hf_coefsfl.protocol import context
from hf_coefsfl.protocol.server_side import ServerSide
from hf_coefsfl.split.stand_ins import Injection, RandomState
from tests.support.federated import images, texts, tiny_bert, tiny_vit, trainer

BATCH_SIZE, RATE = 4, 1e-3
PACKAGE = os.path.dirname(hf_coefsfl.__file__)
# Calls of functions of the package for one batch more: what was counted, and a twentieth.
OWN_CALLS = {"vanilla vit": 285, "coef_j vit": 444, "vanilla bert": 321, "coef_j bert": 506}
# Of all Python functions: 1,543 were counted, and 4,872 when modules were listed by `modules()`.
CALLS_OF_A_CLIENT = 2000


def simulation(folder: Path, method: str, kind: str, batches: int) -> Any:
    """Return the rounds of one client, after the first: shapes are remembered there."""
    model, data = (tiny_vit(), images) if kind == "vit" else (tiny_bert(), texts)
    settings: dict[str, Any] = {"num_clients": 1, "participation": 1.0, "warmup_rounds": 0, "method": method}
    rounds = trainer(folder, model, data(BATCH_SIZE * batches), **settings).rounds
    assert rounds is not None
    rounds.run_round(0, RATE)
    return rounds


@pytest.mark.parametrize(("method", "client", "server"), [("vanilla", 3, 3), ("coef_j", 5, 6), ("coef_p", 5, 6)])
@pytest.mark.parametrize("kind", ["vit", "bert"])
def test_generators_are_set_once_for_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, client: int, server: int, kind: str
) -> None:
    """A pass is seeded once. The server's puts back, once, what its placeholders may have drawn."""
    rounds, counted = simulation(tmp_path, method, kind, batches=3), Counter[str]()

    def counting(owner: Any, name: str) -> None:
        own = getattr(owner, name)

        def noted(*args: Any) -> Any:
            counted[name] += 1
            return own(*args)

        monkeypatch.setattr(owner, name, noted)

    for owner, name in ((context, "set_random_state"), (RandomState, "restore"), (ServerSide, "forward")):
        counting(owner, name)
    rounds.run_round(1, RATE)
    assert counted == {"set_random_state": client + server, "restore": server, "forward": server}


@pytest.mark.parametrize("last", [nn.Module(), GradientCheckpointingLayer()], ids=["from outside", "itself"])
def test_a_block_that_is_checkpointed_from_outside_begins_with_the_generators_put_back(last: nn.Module) -> None:
    injection = Injection(torch.zeros(1), random_state=RandomState(torch.device("cpu")))
    first, second = torch.rand(()), torch.rand(())
    injection.random_state.restore()  # type: ignore[union-attr]
    torch.rand(())  # what placeholders draw
    injection.hand_over(last)
    assert torch.rand(()) == (second if isinstance(last, GradientCheckpointingLayer) else first)


def calls_of(folder: Path, method: str, kind: str, batches: int, within: str = PACKAGE) -> Counter[str]:
    """Return how often each Python function of a folder was called in a round, by default of the package."""
    rounds, calls = simulation(folder / str(batches), method, kind, batches), Counter[str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(within):
            calls[f"{frame.f_code.co_filename.removeprefix(PACKAGE)} {frame.f_code.co_name}"] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        rounds.run_round(1, RATE)
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("name", OWN_CALLS)
def test_a_batch_takes_few_calls_of_our_functions(tmp_path: Path, name: str) -> None:
    few, more = (calls_of(tmp_path, *name.split(), batches) for batches in (2, 3))
    added = more - few
    assert sum(added.values()) <= OWN_CALLS[name], added.most_common(20)


def test_a_client_takes_few_calls_beside_its_batches(tmp_path: Path) -> None:
    few, more = (calls_of(tmp_path, "vanilla", "vit", batches, within="") for batches in (2, 3))
    beside = few.total() - 2 * (more - few).total()
    assert beside <= CALLS_OF_A_CLIENT, few.most_common(20)


@pytest.mark.parametrize("method", ["vanilla", "coef_d", "coef_w", "acc_sfl", "celu_vfl"])
def test_no_pass_begins_beside_the_gradients_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """They are small, but what a pass frees around them is then not in one piece for the next."""
    rounds = simulation(tmp_path, method, "vit", batches=3)
    halves: tuple[nn.Module, ...] = (rounds.split.client, rounds.split.server)
    seen: list[bool] = []
    for half in halves:

        def noted(*args: Any, own: Any = half.forward, **kwargs: Any) -> Any:
            seen.append(any(p.grad is not None for half in halves for p in half.parameters()))
            return own(*args, **kwargs)

        monkeypatch.setattr(half, "forward", noted)
    rounds.run_round(1, RATE)
    assert len(seen) >= 6 and not any(seen)
