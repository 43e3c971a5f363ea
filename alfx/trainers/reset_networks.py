"""Callback that resets networks during training, to counter the loss of plasticity and the primacy bias."""
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from alfx import gin_utils
from alfx.gin_utils.conf_error import hint_nearest
from alfx.gin_utils.settings import setting
from alfx.layers import reset_parameters
from alfx.runs.callbacks import SettingsCallback, TrainingRun
from alfx.utils.target_updater import TargetUpdater


@gin_utils.configurable
@dataclasses.dataclass(eq=False)
class ResetNetworks(SettingsCallback):
    """Callback that gives trained parameters new initial values at given steps and keeps the replay buffer.

    Resets let an agent with many updates per step forget what it overfitted at first (Nikishin et al. 2022,
    arXiv:2205.07802). With ``keep`` above 0 they only shrink and perturb the parameters (Ash and Adams 2020,
    arXiv:1910.08475), as for the encoder of BBF (Schwarzer et al. 2023, arXiv:2305.19452):

        parameter = keep * parameter + (1 - keep) * initial value

    Layers draw new initial values; parameters outside of layers, such as the logarithm of SAC's temperature, get the
    values that they had when the run started. Running statistics of normalization layers are reset, the optimizer state
    of these parameters (moments and step counts) is set to 0, and target networks become copies. List the callback
    several times, with gin scopes, for parts with different settings.

    Args:
        at_env_steps: numbers of environment steps; a reset follows the iteration that reaches one of them.
        every_env_steps: reset at all multiples of this number as well; 0 for none.
        until_env_steps: last step at which ``every_env_steps`` resets; None for no limit.
        modules: names of the parts to reset, without leading underscores, such as ``('critic_networks',)``: a name
            selects the parameters that have it in their path. Empty for all trained parameters.
        keep: weight of the old values, in [0, 0.99].

    Raises:
        ConfError: a name in ``modules`` selects nothing, there are no steps to reset at, ``until_env_steps`` has no
            effect, or several processes train together.
    """

    at_env_steps: Sequence[int] = setting(())
    every_env_steps: int = setting(0, minimum=0)
    until_env_steps: int | None = setting(None, minimum=1)
    modules: Sequence[str] = setting(())
    keep: float = setting(0.0, minimum=0, maximum=0.99)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._initial: dict[str, Tensor] | None = None
        if not self.at_env_steps and not self.every_env_steps:
            raise gin_utils.ConfError('ResetNetworks: there are no steps to reset at',
                                      'set ResetNetworks.at_env_steps or ResetNetworks.every_env_steps')
        if self.until_env_steps is not None and not self.every_env_steps:
            raise gin_utils.ConfError('ResetNetworks.until_env_steps: has no effect without every_env_steps',
                                      'leave it out, or set ResetNetworks.every_env_steps')
        if not all(isinstance(step, int) and step > 0 for step in self.at_env_steps):
            raise gin_utils.ConfError('ResetNetworks.at_env_steps: expected numbers of environment steps of 1 or more, '
                                      f'found {self.at_env_steps!r}')

    def on_training_start(self, run: TrainingRun) -> None:
        if run.algorithm.updater.ranks is not None:
            raise gin_utils.ConfError('ResetNetworks: only works in a single process', 'train without --num_processes')
        self._chosen = self._choose(run.algorithm.optimized_parameters()[1])
        self._num_due = self._count_due(run.env_steps)
        if run.iteration == 0 or self._initial is None:
            in_layers = {p for layer in _layers(run.algorithm, {*self._chosen.values()}) for p in layer.parameters()}
            self._initial = {name: p.detach().clone() for name, p in self._chosen.items() if p not in in_layers}

    def _choose(self, named: list[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
        parts = {name: {part.lstrip('_') for part in name.split('.')} for name, _ in named}
        for module in self.modules:
            if not any(module in found for found in parts.values()):
                names = sorted({part for found in parts.values() for part in found if not part.isdigit()})
                raise gin_utils.ConfError(f'ResetNetworks.modules: no trained parameters have {module!r} in their path',
                                          hint_nearest(module, names) or f'choose one of {", ".join(names)}')
        return {name: p for name, p in named if not self.modules or parts[name].intersection(self.modules)}

    def _count_due(self, env_steps: int) -> int:
        count = sum(step <= env_steps for step in self.at_env_steps)
        if self.every_env_steps:
            last = env_steps if self.until_env_steps is None else min(env_steps, self.until_env_steps)
            count += last // self.every_env_steps
        return count

    def on_iteration_end(self, run: TrainingRun) -> None:
        due = self._count_due(run.env_steps)
        if due > self._num_due:
            self._reset(run.algorithm)
        self._num_due = due

    @torch.no_grad()
    def _reset(self, algorithm: Any) -> None:
        chosen = {*self._chosen.values()}
        layers = list(_layers(algorithm, chosen))
        old = {p: p.clone() for layer in layers for p in layer.parameters()} | {p: p.clone() for p in chosen}
        for layer in layers:
            reset_parameters(layer)
        for name, value in (self._initial or {}).items():
            if name in self._chosen:
                self._chosen[name].copy_(value)
        for p, value in old.items():  # a layer may also have parameters that are not chosen
            p.lerp_(value, self.keep if p in chosen else 1.0)
        for module in algorithm.modules():
            if getattr(module, 'projects_parameters', False) and chosen.intersection(module.parameters(recurse=False)):
                module.project_parameters()
        updaters = [module for module in algorithm.modules() if isinstance(module, TargetUpdater)]
        for updater in 2 * updaters:  # TD7 has targets of targets
            chosen |= updater.copy_to_targets(chosen)
        for optimizer in algorithm.optimized_parameters()[0]:
            for group in optimizer.param_groups:
                if 'iterations' in group and chosen.issuperset(group['params']):  # AdamTF counts the steps of a group
                    group['iterations'] = 0
            for p in chosen.intersection(optimizer.state):
                for key, value in optimizer.state[p].items():
                    optimizer.state[p][key] = value.zero_() if isinstance(value, Tensor) else type(value)()

    def state_dict(self) -> dict[str, Any]:
        return {'initial': self._initial}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._initial = state['initial']


def _layers(module: nn.Module, chosen: set[Tensor]) -> Iterator[nn.Module]:
    """Yield the outermost modules that can draw new initial values for chosen parameters."""
    if not chosen.isdisjoint(module.parameters()):
        if callable(getattr(module, 'reset_parameters', None)):
            yield module
        else:
            for child in module.children():
                yield from _layers(child, chosen)
