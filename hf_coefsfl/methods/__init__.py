"""The training methods, one file each. `METHODS` maps a name to its class."""

from .acc_sfl import AccSFL
from .base import METHODS, Method, make_method
from .coef_d import CoeFD
from .coef_j import CoeFJ
from .fsl_sage import FSLSAGE
from .gas import GAS
from .ggn import GGN
from .hutchinson import Hutchinson
from .mu_splitfed import MUSplitFed
from .oracle import Oracle
from .reuse import GradientReuse
from .vanilla import VanillaSFL

__all__ = [
    "FSLSAGE",
    "GAS",
    "GGN",
    "METHODS",
    "AccSFL",
    "CoeFD",
    "CoeFJ",
    "GradientReuse",
    "Hutchinson",
    "MUSplitFed",
    "Method",
    "Oracle",
    "VanillaSFL",
    "make_method",
]
