"""Checkpoints: the names of ALF, provided by :mod:`alfx.checkpoints`."""
from alfx.checkpoints.checkpointer import Checkpointer
from alfx.checkpoints.files import CheckpointError
from alfx.checkpoints.module_states import enable_checkpoint, is_checkpoint_enabled
from alfx.checkpoints.reading import extract_sub_state_dict_from_checkpoint, read_checkpoint

__all__ = ['Checkpointer', 'CheckpointError', 'enable_checkpoint', 'extract_sub_state_dict_from_checkpoint',
           'is_checkpoint_enabled', 'read_checkpoint']
