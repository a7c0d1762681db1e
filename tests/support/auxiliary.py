"""Sides and options for the tests of the methods with auxiliary networks."""

from __future__ import annotations

QUICK = {"align_every": 2, "align_epochs": 3, "align_warmup_steps": 0, "buffer_every": 2, "num_blocks": 1}
