"""alfx: a config-driven reinforcement-learning experiment runner for PyTorch."""
from alfx import nest
from alfx.data_structures import (AlgStep, BatchInfo, Experience, LossInfo, StepType, TimeStep)
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec

__version__ = '0.5.0'
__all__ = [
    'AlgStep', 'BatchInfo', 'BoundedTensorSpec', 'Experience', 'LossInfo', 'StepType', 'TensorSpec', 'TimeStep', 'nest'
]
