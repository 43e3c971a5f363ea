"""Summaries of a run for TensorBoard: ``from alfx import summary; summary.scalar('loss/actor', loss)``.

:mod:`alfx.summary.summary_ops` holds the operations, :mod:`alfx.summary.summary_utils` functions built on them,
:mod:`alfx.summary.writer` the writer of event files, :mod:`alfx.summary.render` functions that draw tensors.
"""

from alfx.summary.summary_ops import (EnsureSummary, create_summary_writer, disable_summary, embedding,
                                      enable_summary, enter_summary_scope, get_global_counter, histogram, images,
                                      increment_global_counter, is_summary_enabled, push_summary_writer, record_if,
                                      reset_global_counter, scalar, scope, scope_name, set_default_writer,
                                      set_global_counter, should_record_summaries, should_summarize_output, text,
                                      video)

__all__ = [
    'EnsureSummary', 'create_summary_writer', 'disable_summary', 'embedding', 'enable_summary',
    'enter_summary_scope', 'get_global_counter', 'histogram', 'images', 'increment_global_counter',
    'is_summary_enabled', 'push_summary_writer', 'record_if', 'reset_global_counter', 'scalar', 'scope',
    'scope_name', 'set_default_writer', 'set_global_counter', 'should_record_summaries',
    'should_summarize_output', 'text', 'video'
]
