"""Networks: modules with input specs and state. Read next: :mod:`alfx.networks.network`.

The classes can be imported from here, ``from alfx.networks import EncodingNetwork``, and live in the modules below,
which are imported when one of their names is asked for.
"""
import importlib
from typing import Any

_MODULES = ('network', 'networks', 'containers', 'encoding_networks', 'actor_networks', 'actor_distribution_networks',
            'critic_networks', 'q_networks', 'value_networks', 'projection_networks', 'mdq_critic_networks',
            'preprocessors', 'preprocessor_networks', 'decoding_networks', 'ou_process', 'memory', 'action_encoder',
            'param_networks')


def __getattr__(name: str) -> Any:
    if not name.startswith('_'):
        for module in _MODULES:
            defined = vars(importlib.import_module(f'{__name__}.{module}'))
            if getattr(defined.get(name), '__module__', None) == f'{__name__}.{module}':
                return defined[name]
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
