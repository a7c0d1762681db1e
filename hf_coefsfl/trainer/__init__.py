"""`SplitFedTrainer` and what it is made of."""

from .trainer import SplitFedTrainer

__all__ = ["SplitFedTrainer"]
