"""torch functions that conf files may name: activations, losses and initializers.

``@torch.tanh``, ``@torch.nn.functional.elu`` and ``@torch.nn.init.orthogonal_`` work, and so does any unambiguous
suffix such as ``@elu``. A name that exists in both ``torch`` and ``torch.nn.functional`` (``relu``, ``tanh``) means the
function in ``torch`` when written without a module. ``softsign``, which alfx also defines, means
``torch.nn.functional.softsign``.
"""

import torch
import torch.nn.functional as F

from .registry import register_function

_TORCH = ('relu relu_ tanh tanh_ sigmoid sigmoid_ exp exp_ log log1p abs square sqrt sin cos sign '
          'clamp selu selu_ celu celu_').split()
_FUNCTIONAL = ('relu relu_ relu6 elu elu_ selu celu leaky_relu leaky_relu_ gelu silu mish softplus softsign hardtanh '
               'hardswish hardsigmoid logsigmoid tanh sigmoid tanhshrink softshrink hardshrink softmax log_softmax '
               'normalize mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits '
               'cross_entropy').split()
_INIT = ('uniform_ normal_ trunc_normal_ constant_ ones_ zeros_ eye_ xavier_uniform_ xavier_normal_ '
         'kaiming_uniform_ kaiming_normal_ orthogonal_ sparse_').split()
_PARAMETERS = {  # parameters of functions written in C, which have no signature
    'celu_': ('alpha',), 'clamp': ('min', 'max'), 'elu_': ('alpha', 'scale', 'input_scale'), 'gelu': ('approximate',),
    'leaky_relu_': ('negative_slope',), 'softplus': ('beta', 'threshold'), 'softshrink': ('lambd',),
    'hardshrink': ('lambd',), 'torch.celu': ('alpha',),
}


def register_torch_functions() -> None:
    """Register the functions with gin; further calls have no effect."""
    for module, names in ((torch, _TORCH), (F, _FUNCTIONAL), (torch.nn.init, _INIT)):
        for name in names:
            parameters = _PARAMETERS.get(f'{module.__name__}.{name}', _PARAMETERS.get(name))
            register_function(getattr(module, name), name=name, module=module.__name__, parameters=parameters)
    for name in sorted(set(_TORCH) & set(_FUNCTIONAL)):
        parameters = _PARAMETERS.get(f'torch.{name}', _PARAMETERS.get(name))
        register_function(getattr(torch, name), name=name, module='', parameters=parameters)
    register_function(F.softsign, name='softsign', module='')
