"""Networks: modules with input specs and state. Read next: :mod:`alfx.networks.network`.

The classes can be imported from here (``from alfx.networks import EncodingNetwork``). The modules below define them and
are imported on first use.
"""
import sys

from alfx.utils import lazy_exports

_MODULES = ('network', 'networks', 'containers', 'encoding_networks', 'actor_networks', 'actor_distribution_networks',
            'critic_networks', 'q_networks', 'value_networks', 'projection_networks', 'mdq_critic_networks',
            'preprocessors', 'preprocessor_networks', 'decoding_networks', 'ou_process', 'memory', 'action_encoder',
            'param_networks')

__getattr__ = lazy_exports.from_modules(sys.modules[__name__], _MODULES)
