"""Automatic mixed precision: networks compute in 16 bits, everything around them in 32.

Networks run under ``torch.autocast`` and return float32. Distributions, losses, targets, normalizers and stored
experience therefore stay in float32, as do the parameters and the state of optimizers. The 16-bit type is bfloat16,
which has the range of float32, wherever the device supports it. Elsewhere it is float16, and the loss is scaled so that
small gradients do not vanish (Micikevicius et al. 2018, arXiv:1710.03740).
"""
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alfx import context, nest
from alfx.engine.loss_reduction import NonFiniteLossError
from alfx.engine.plan import torch_internals
from alfx.networks.network import Network

logger = logging.getLogger(__name__)

_HALF = (torch.bfloat16, torch.float16)
_LEAST_SCALE = 2.0**-14  # at this scale, infinite gradients are not caused by the scaling


class MixedPrecision:
    """Makes the networks of an algorithm compute in 16 bits.

    Args:
        module: module with the networks: every :class:`~alfx.networks.network.Network` in it, including parts of other
            networks, so that the inputs and outputs of each match its specs.
        device: device of the networks.
        dtype: ``torch.bfloat16`` or ``torch.float16``; ``None`` for the best type of the device, which is float32 on a
            CPU without instructions for bfloat16, where 16 bits would be several times slower.

    Attributes:
        dtype: type of the computation.
        scaler: scales losses; ``None`` with bfloat16, which does not need it.
    """

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype | None = None):
        self.dtype = _best_dtype(device) if dtype is None else dtype
        self.scaler = LossScaler(device.type) if self.dtype is torch.float16 else None
        if self.dtype is torch.float32:
            logger.info('TrainerConfig.enable_amp has no effect: this CPU has no instructions for bfloat16')
            return
        networks = [part for part in module.modules() if isinstance(part, Network)]
        for network in networks:
            autocast = _Autocast(device.type, self.dtype)
            network.register_forward_pre_hook(autocast.enter)
            network.register_forward_hook(autocast.leave, always_call=True)
        logger.info('mixed precision: %d network(s) compute in %s on %s%s', len(networks), self.dtype, device,
                    '; losses are scaled' if self.scaler is not None else '')

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the scale, if losses are scaled."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`; a state of another precision is ignored."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


class LossScaler:
    """Scales losses, and skips updates whose gradients are infinite because of the scale.

    Args:
        device_type: 'cpu' or 'cuda'.
    """

    def __init__(self, device_type: str):
        self._scaler = torch.amp.GradScaler(device_type)

    @property
    def scale(self) -> float:
        """Current factor of the loss."""
        return self._scaler.get_scale()

    def scaled(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times the scale."""
        return self._scaler.scale(loss)

    def step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Unscale the gradients, then let the optimizers clip and step, except for those with infinite gradients.

        Raises:
            NonFiniteLossError: the scale is so small that it cannot be the cause; no parameter has been changed.
        """
        with_gradients = [optimizer for optimizer in optimizers if any(
            p.grad is not None for group in optimizer.param_groups for p in group['params'])]
        if not with_gradients:
            return
        for optimizer in with_gradients:
            self._scaler.unscale_(optimizer)
            self._scaler.step(optimizer)
        self._scaler.update()
        if self.scale < _LEAST_SCALE:
            raise NonFiniteLossError(f'the gradients are NaN or infinite at update {context.get_global_counter()}, '
                                     f'although the loss is finite and is scaled by only {self.scale:.3g}; the '
                                     'parameters have not been changed by this update')

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the number of updates since it last changed."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self._scaler.load_state_dict(state)


class _Autocast:
    """Hooks around the call of a network."""

    def __init__(self, device_type: str, dtype: torch.dtype):
        self._device_type, self._dtype = device_type, dtype
        self._entered: list[Any] = []

    def enter(self, network: nn.Module, args: Any) -> None:
        """Enter autocast before the call.

        Weights are cast again at each call, because weights that were cast without gradients cannot be used with
        gradients.
        """
        autocast = torch.autocast(self._device_type, self._dtype)
        autocast.__enter__()
        self._entered.append(autocast)

    def leave(self, network: nn.Module, args: Any, output: Any) -> Any:
        """Leave autocast after the call, even if it failed, and return the output in float32."""
        self._entered.pop().__exit__(None, None, None)
        if output is None or not any(x.dtype in _HALF for x in nest.flatten(output) if isinstance(x, Tensor)):
            return output
        return nest.map_structure(lambda x: x.float() if isinstance(x, Tensor) and x.dtype in _HALF else x, output)


def _best_dtype(device: torch.device) -> torch.dtype:
    if device.type == 'cpu' and not torch_internals.has_bfloat16_instructions():
        return torch.float32
    if device.type != 'cuda' or torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float16
