"""Conf files: the layer between gin-config and the rest of alfx.

- ``registry``: :func:`configurable` for constructors and factories, :func:`register_function` for functions that are
  called at every step; ``torch_functions`` registers functions of torch;
- ``signatures``: :func:`takes_arguments_of` for constructors and factories that forward the arguments of another one;
- ``conf_loading``: :func:`load` reads (``parsing``), checks (``static_check``, ``type_check``) and applies a conf;
- ``syntax_problems``: messages for text that is not gin;
- ``locations``: file and line of each binding; ``conf_error``: :class:`ConfError`, which reports them;
- ``value_checks``: :func:`check_value` for the arguments of constructors; ``settings``: dataclasses that use it;
- ``user_modules``: user modules that a conf imports;
- ``stored_files``: reading and writing of files of run folders and datasets;
- ``aliases``: replacements for names that confs of the Agent Learning Framework use and alfx does not have;
- ``python_values``: values of a Python program as gin text;
- ``python_confs``, ``python_to_gin``: Python confs of the Agent Learning Framework, executed and written as gin files;
- ``trust``: restrictions on untrusted confs;
- ``operative``: the bindings that were used; ``run_folder``: the conf files in a run folder;
- ``describe``: human-readable descriptions of configurables and of loaded confs.
"""

from alfx.gin_utils.conf_error import ConfError, Problem, hint_nearest, plain_text
from alfx.gin_utils.conf_loading import check_file, clear, import_configurables, load, loaded
from alfx.gin_utils.value_checks import (Count, Fraction, NonNegative, Positive, PositiveFraction, Range, StepLimit,
                                         check_value, log_unused, non_default, problem_at)
from .describe import describe, flat_lines, meanings
from .locations import is_explained
from .operative import (config_str, confs_without_effect, mistakes_of_unused, operative_config_str, refuse_unused,
                        supplied_arguments, unused_bindings, warn_of_unused)
from .parsing import Conf
from .registry import configurable, raw_functions, register_function
from .run_folder import (check_same_conf, copy_conf, has_checkpoint, is_own_conf, rewrite_conf, stored_conf,
                         stored_info, write_conf, write_operative)
from .signatures import takes_arguments_of
from .static_check import declare_scope
from .torch_functions import register_torch_functions
from .trust import is_trusted, may_import, require_trust

__all__ = [
    'Conf', 'ConfError', 'Count', 'Fraction', 'NonNegative', 'Positive', 'PositiveFraction', 'Problem', 'Range',
    'StepLimit', 'check_file', 'check_same_conf', 'check_value', 'clear', 'config_str', 'configurable',
    'confs_without_effect', 'copy_conf', 'declare_scope', 'describe', 'flat_lines', 'has_checkpoint',
    'hint_nearest', 'import_configurables', 'is_explained', 'is_own_conf', 'is_trusted', 'load', 'loaded',
    'log_unused', 'may_import', 'meanings', 'mistakes_of_unused', 'non_default', 'operative_config_str',
    'plain_text', 'problem_at', 'raw_functions', 'refuse_unused', 'register_function', 'require_trust',
    'rewrite_conf', 'stored_conf', 'stored_info', 'supplied_arguments', 'takes_arguments_of', 'unused_bindings',
    'warn_of_unused', 'write_conf', 'write_operative'
]

register_torch_functions()
