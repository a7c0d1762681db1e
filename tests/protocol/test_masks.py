"""A mask that the host knows answers there, and is an ordinary mask otherwise."""

import pytest
import torch
from torch import Tensor
from transformers import masking_utils

from hf_coefsfl.protocol.masks import KnownMask, joined, known_mask, known_masks, rows_of, with_rows
from hf_coefsfl.protocol.messages import SmashedData

FULL, PADDED = torch.ones(2, 4), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def claimed(mask: Tensor, host: Tensor) -> KnownMask:
    """Return a mask whose copy on the host says something else, so that a test can tell which one was asked."""
    known = known_mask(mask.long(), host.long())
    assert isinstance(known, KnownMask)
    return known


@pytest.mark.parametrize(("there", "here"), [(FULL, PADDED), (PADDED, FULL)])
def test_transformers_asks_the_host(there: Tensor, here: Tensor) -> None:
    full = bool(here.all())
    mask = claimed(there, here).to(device="cpu", dtype=torch.bool)
    assert bool(masking_utils._ignore_bidirectional_mask_sdpa(mask, 4)) is full
    assert bool(masking_utils._ignore_causal_mask_sdpa(mask, 4, 4, 0, 0)) is full


def test_casts_slices_and_the_inverse_stay_known() -> None:
    mask = claimed(FULL, PADDED)
    for derived, expected in [
        (mask.bool(), PADDED.bool()),
        (mask.bool().long(), PADDED),
        (mask[:, :2], PADDED[:, :2]),
        (mask[1:], PADDED[1:]),
        (~mask.bool(), ~PADDED.bool()),
    ]:
        assert isinstance(derived, KnownMask) and torch.equal(derived.host, expected)
        assert derived.sum().item() == expected.sum().item()


def test_rows_of_the_host_can_be_added() -> None:
    longer = with_rows(claimed(FULL, PADDED), PADDED.bool())
    assert isinstance(longer, KnownMask) and torch.equal(longer.host, torch.cat([PADDED, PADDED]))
    assert torch.equal(longer.as_subclass(Tensor), torch.cat([FULL.long(), PADDED]))
    assert type(with_rows(FULL, PADDED)) is Tensor


def test_rows_can_be_chosen_and_joined() -> None:
    rows = torch.tensor([1, 0, 1])
    chosen = rows_of(claimed(FULL, PADDED), rows, rows)
    assert isinstance(chosen, KnownMask) and torch.equal(chosen.host, PADDED[rows])
    assert torch.equal(chosen.as_subclass(Tensor), FULL.long()[rows])
    assert type(rows_of(PADDED, rows, rows)) is Tensor and torch.equal(rows_of(PADDED, rows, rows), PADDED[rows])
    both = joined([chosen, claimed(FULL, PADDED)])
    assert isinstance(both, KnownMask) and torch.equal(both.host, torch.cat([PADDED[rows], PADDED]))
    for parts in ([chosen, PADDED], [PADDED, PADDED]):  # what the host does not know whole, it does not know
        assert type(joined(parts)) is Tensor and torch.equal(joined(parts)[-2:], PADDED)


def test_all_else_is_computed_with_the_mask_itself() -> None:
    mask = claimed(FULL, PADDED)
    rows = torch.tensor([1])
    for result in (mask + 1, mask[rows], mask[1], mask.cumsum(-1), torch.cat([mask, mask]), mask == 0, mask.to("meta")):
        assert type(result) is Tensor
    assert mask.sum(-1).tolist() == [4, 4] and mask.all(1).tolist() == [True, True]
    assert torch.equal(mask[rows], FULL.long()[rows])


def test_the_host_does_not_know_a_mask_that_was_written_into() -> None:
    mask = known_mask(FULL.bool(), FULL.bool())
    mask[0, 0] = False
    assert not mask.all() and mask.sum() == 7 and not mask[:, :1].all()
    assert type(mask.long()) is Tensor and type(~mask) is Tensor


def test_messages_carry_it() -> None:
    context: dict[str, Tensor] = {"attention_mask": known_mask(PADDED.bool(), PADDED.bool())}
    sent = SmashedData(torch.ones(2, 4, 1, requires_grad=True) * 2, context).detach()
    assert isinstance(sent.context["attention_mask"], KnownMask) and not sent.activations.requires_grad


def test_which_inputs_are_known() -> None:
    known = known_masks(
        {"decoder_attention_mask": FULL, "input_ids": PADDED, "flag": True}, {"decoder_attention_mask": FULL}
    )
    assert [type(t) for t in known.values()] == [KnownMask, Tensor, bool]


def test_masks_in_inference_mode_are_ordinary() -> None:
    """It does not say who has written into a tensor."""
    known = claimed(FULL, PADDED)
    with torch.inference_mode():
        assert type(known.bool()) is Tensor and type(known_mask(FULL + 0, FULL)) is Tensor
