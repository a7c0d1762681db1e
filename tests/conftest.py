"""Settings of every test: one thread, no Hub, no deadline on a noisy machine, bfloat16 products that work."""

import gc
import os
import signal
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # the equalities tested here are those of the CPU

from hf_coefsfl._bfloat16 import REMEDY, VARIABLE, bfloat16_problem

if VARIABLE not in os.environ and bfloat16_problem():  # before PyTorch is loaded; subprocesses inherit it
    os.environ[VARIABLE] = REMEDY

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True)
def _quicker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what takes longer than a round of these runs, wherever no test is about it."""
    from tests.support import once  # not before: it loads transformers

    room, file = request.path.parent.name, request.path.name
    if room != "split":
        once.use(monkeypatch.setattr)
    if room != "tests" and not file.startswith("test_model_card"):  # those of `trainer` look at pictures
        monkeypatch.setattr("hf_coefsfl.trainer.model_card.can_plot", lambda: False)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT interrupt: it is ignored where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_collection_finish() -> None:
    """Have garbage collections pass over all that is loaded: every run begins with one, which would take 0.3 s."""
    gc.collect()
    gc.freeze()
