"""Split federated fine-tuning of Hugging Face models with compensated feedback (CoeF-SFL)."""

from .adapters import load_adapter
from .config import SplitFedConfig
from .injection import inject
from .messages import Feedback, Message, SmashedData
from .methods import METHODS, Method
from .split import SplitModel, load_client, load_server, split_model
from .trainer import SplitFedTrainer

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Feedback",
    "Message",
    "Method",
    "SmashedData",
    "SplitFedConfig",
    "SplitFedTrainer",
    "SplitModel",
    "inject",
    "load_adapter",
    "load_client",
    "load_server",
    "split_model",
]
