"""Summaries of a run for TensorBoard: ``from alfx import summary; summary.scalar('loss/actor', loss)``.

:mod:`alfx.summary.summary_ops` holds the operations, :mod:`alfx.summary.summary_utils` functions built on them,
:mod:`alfx.summary.writer` the writer of event files, :mod:`alfx.summary.render` functions that draw tensors.
"""
from alfx.summary.summary_ops import *  # noqa: F403
from alfx.summary.summary_ops import __all__ as __all__
