"""Comparisons of methods x splits x cuts x learning rates x seeds, run in worker processes and reported together."""

from .archive import Archive
from .grid import Cell, Run, check_files, expand, total
from .render.report import write_report
from .runner import Failure, Runner, load_finished
from .spec import Spec, load_spec, parse_spec

__all__ = [
    "Archive",
    "Cell",
    "Failure",
    "Run",
    "Runner",
    "Spec",
    "check_files",
    "expand",
    "load_finished",
    "load_spec",
    "parse_spec",
    "total",
    "write_report",
]
