"""Flower's own processes on loopback, without the long pauses that Flower makes."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.loopback import Loopback
from tests.support.paths import SUPPORT

# Loaded as Python starts. After the first looks, SuperNodes look for messages every 0.5 seconds instead of 3; one that
# is lost counts as offline after 30 seconds without a heartbeat instead of 60.
HURRY = """
import time
from flwr.common import constant
constant.HEARTBEAT_DEFAULT_INTERVAL = 15
sleep = time.sleep
time.sleep = lambda seconds: sleep(0.5 if seconds == 3 else seconds)
"""


def hurried(*args: Any, **kwargs: Any) -> Loopback:
    """Return a `Loopback` whose processes make short pauses and load less."""
    flower = Loopback(*args, **kwargs)
    (flower.folder / "hurry").mkdir()
    light = (SUPPORT / "light" / "sitecustomize.py").read_text()
    (flower.folder / "hurry" / "sitecustomize.py").write_text(light + HURRY)
    flower.environment["PYTHONPATH"] = os.pathsep.join([str(flower.folder / "hurry"), flower.environment["PYTHONPATH"]])
    return flower
