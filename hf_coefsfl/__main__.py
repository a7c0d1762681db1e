"""The `coefsfl` command; also `python -m hf_coefsfl`."""

from __future__ import annotations

import sys

from .cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
