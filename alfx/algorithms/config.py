"""The documented location of :class:`~alfx.config.TrainerConfig`."""
from alfx.config import TrainerConfig

__all__ = ['TrainerConfig']
