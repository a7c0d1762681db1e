"""Passes that are counted once: the same figures as with all of them run, and none is run twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from hf_coefsfl.analysis.cost import CostModel
from hf_coefsfl.analysis.flops import OperationCounter
from hf_coefsfl.analysis.passes import Passes
from hf_coefsfl.methods import METHODS, make_method
from tests.support.federated import tiny_vit

OPTIONS = {"ggn": {"rank": 2, "num_iterations": 3}, "hutchinson": {"num_probes": 2}, "fsl_sage": {"align_epochs": 1}}


@contextmanager
def forward_passes(model: CostModel) -> Iterator[Counter[str]]:
    """Count the calls of both halves."""
    split, calls = model.split(2), Counter[str]()
    handles = [
        half.register_forward_pre_hook(lambda module, args: calls.update([module.side]))
        for half in (split.client, split.server)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_counts_are_those_of_all_passes(tiny: CostModel, name: str) -> None:
    """Of rounds whose passes were counted before, too, by this method and by others."""
    method, sizes = make_method(name, OPTIONS.get(name)), [2, 1, 2]
    every = tiny.measure(method, 2, sizes, local_epochs=2, compute=True)
    for _ in range(2):
        assert tiny.measure(method, 2, sizes, local_epochs=2) == every


def test_a_kind_of_pass_is_run_once_for_a_split_model() -> None:
    model = CostModel(tiny_vit(attn_implementation="eager"))
    with forward_passes(model) as calls:
        model.measure(make_method("hutchinson"), 2, [1, 1])
        # g₀, a probe and a training step. The client: s₀ of both batches, of which the first stays on its graph, and
        # the second batch once more.
        assert calls == {"server": 3, "client": 3}
        calls.clear()
        model.measure(make_method("coef_d"), 2, [1, 1])
        assert calls == {"client": 2}
        calls.clear()
        model.measure(make_method("coef_d"), 2, [2])
        assert calls == {"server": 2, "client": 1}  # other shapes
        calls.clear()
        model.measure(make_method("coef_d"), 2, [2], compute=True)
        assert calls == {"server": 2, "client": 1}


def test_another_cut_has_other_passes() -> None:
    model, method = CostModel(tiny_vit(attn_implementation="eager")), make_method("reuse")
    first, second = (model.measure(method, cut, [2]) for cut in (2, 1))
    assert second["server_flops"] > first["server_flops"]
    assert model.measure(method, 2, [2]) == first


def test_what_a_pass_returned_is_not_changed_by_whoever_gets_it() -> None:
    passes, counter, weight = Passes(), OperationCounter(), torch.ones(2, 2, requires_grad=True)

    def run() -> dict[str, torch.Tensor]:
        return {"product": weight @ torch.ones(2, 3)}

    with counter:
        first = passes.once("product", counter, run)["product"]
        later = passes.once("product", counter, run)["product"]
    assert first.requires_grad and not later.requires_grad
    before = first.detach().clone()
    later.zero_()
    assert torch.equal(first, before) and torch.equal(passes.once("product", counter, run)["product"], before)
    assert counter.flops["server"] == 3 * 2 * 2 * 2 * 3
