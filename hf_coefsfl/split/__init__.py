"""Cutting a model in two: `split_model(model, cut)` gives a client half and a server half."""

from .blocks import find_blocks
from .halves import ClientHalf, Half, ServerHalf
from .save_load import load_client, load_server
from .splitting import SplitModel, split_model

__all__ = ["ClientHalf", "Half", "ServerHalf", "SplitModel", "find_blocks", "load_client", "load_server", "split_model"]
