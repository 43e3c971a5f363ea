"""Conf files: everything between gin-config and the rest of alfx.

- ``registry``: :func:`configurable` for constructors and factories, :func:`register_function` for functions that
  run once a step, ``torch_functions`` for those of torch;
- ``signatures``: :func:`takes_arguments_of` for those that forward the arguments of another one;
- ``loading``: :func:`load`, which reads (``parsing``), checks (``static_check``, ``type_check``) and applies a conf;
- ``locations``: where each binding was written; ``errors``: :class:`ConfError`, which says so;
- ``checks``: :func:`check_value` for the arguments of constructors; ``settings``: dataclasses that use it;
- ``own_modules``: modules of the user's own that a conf imports;
- ``other_names``: what to write in place of names that confs of elsewhere have;
- ``trust``: what the conf of a stranger may not do;
- ``operative``: what was used of a conf; ``run_folder``: what a run folder records of it;
- ``describe``: what a configurable takes and what a conf comes to, for people.
"""

from alfx.gin_utils.value_checks import Count, Fraction, NonNegative, Positive, StepLimit, check_value
from .describe import describe, flat_lines
from alfx.gin_utils.conf_error import ConfError, Problem, plain_text
from alfx.gin_utils.conf_loading import clear, import_configurables, load, loaded
from .locations import is_explained
from .operative import (config_str, mistakes_of_unused, operative_config_str, refuse_unused, unused_bindings,
                        warn_of_unused)
from .parsing import Conf
from .registry import configurable, raw_functions, register_function
from .run_folder import check_same_conf, copy_conf, rewrite_conf, stored_conf, stored_info, write_conf, write_operative
from .signatures import takes_arguments_of
from .static_check import declare_scope
from .torch_functions import register_torch_functions
from .trust import is_trusted, may_import, require_trust

__all__ = [
    'Conf', 'ConfError', 'Count', 'Fraction', 'NonNegative', 'Positive', 'Problem', 'StepLimit', 'check_same_conf',
    'check_value', 'clear', 'config_str', 'configurable', 'copy_conf', 'declare_scope', 'describe', 'flat_lines',
    'import_configurables', 'is_explained', 'is_trusted', 'load', 'loaded', 'may_import', 'mistakes_of_unused',
    'operative_config_str', 'plain_text', 'raw_functions', 'refuse_unused', 'register_function', 'require_trust',
    'rewrite_conf', 'stored_conf', 'stored_info', 'takes_arguments_of', 'unused_bindings', 'warn_of_unused',
    'write_conf', 'write_operative'
]

register_torch_functions()
