"""Optimizers: ``torch.optim`` with gradient clipping, schedules and trust regions."""
from alfx.optimizers.adam_tf import AdamTF
from alfx.optimizers.optimizers import SGD, Adam, AdamW, RAdam, RMSprop, wrap_optimizer
from alfx.optimizers.trusted_updater import TrustedUpdater

__all__ = ['Adam', 'AdamTF', 'AdamW', 'RAdam', 'RMSprop', 'SGD', 'TrustedUpdater', 'wrap_optimizer']
