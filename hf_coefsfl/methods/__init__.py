"""The training methods, one file each. `METHODS` maps a name to its class."""

from .base import METHODS, Method, make_method
from .coef_d import CoeFD
from .coef_j import CoeFJ
from .oracle import Oracle
from .reuse import GradientReuse
from .vanilla import VanillaSFL

__all__ = ["METHODS", "CoeFD", "CoeFJ", "GradientReuse", "Method", "Oracle", "VanillaSFL", "make_method"]
