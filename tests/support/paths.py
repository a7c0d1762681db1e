"""Where the project lies."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
LIGHT = f"{SUPPORT / 'light'}{os.pathsep}{ROOT}"  # PYTHONPATH of processes that load less
