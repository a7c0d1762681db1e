"""The training methods, one file each. `METHODS` maps a name to its class."""

from .base import METHODS, Method, make_method
from .coef_d import CoeFD
from .coef_j import CoeFJ
from .ggn import GGN
from .hutchinson import Hutchinson
from .oracle import Oracle
from .reuse import GradientReuse
from .vanilla import VanillaSFL

__all__ = [
    "GGN",
    "METHODS",
    "CoeFD",
    "CoeFJ",
    "GradientReuse",
    "Hutchinson",
    "Method",
    "Oracle",
    "VanillaSFL",
    "make_method",
]
