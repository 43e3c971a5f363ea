"""Reanalysis of stored steps with the latest model (MuZero Reanalyse, Schrittwieser et al. 2021, arXiv:2104.06294).

The search result that is stored with a step becomes outdated as the model learns. :class:`Reanalyzer` searches again
from stored observations; :mod:`alfx.algorithms.muzero_representation_learner` computes targets from the results.
"""
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from alfx import context, nest
from alfx.algorithms.mcts_algorithm import MCTSInfo
from alfx.data_structures import BatchInfo, Experience, TimeStep, add_batch_info, clear_batch_info
from alfx.tensor_specs import NestedTensor, NestedTensorSpec

SEARCH_FIELDS = ('valid_action_mask', 'steps', 'to_play')
_NUM_SAMPLES = 16  # samples of a policy whose actions cannot be enumerated
Transform = Callable[[Experience], Experience]


def search_observation(model: Any, observation: NestedTensor) -> NestedTensor:
    """Return the input of a search: the latent state ``[B, ...]``, with the observation fields that the search uses.

    Args:
        model: an ``MCTSModel``.
        observation: nest ``[B, ...]``.
    """
    latent = model.initial_representation(observation)
    fields = _fields(observation)
    return {'latent': latent, **fields} if fields else latent


def search_observation_spec(model: Any, observation_spec: NestedTensorSpec) -> NestedTensorSpec:
    """Return the spec of :func:`search_observation`."""
    fields = _fields(observation_spec)
    return {'latent': model.repr_spec, **fields} if fields else model.repr_spec


def _fields(observation: Any) -> dict[str, Any]:
    return {name: observation[name] for name in SEARCH_FIELDS if name in observation} if isinstance(
        observation, dict) else {}


def time_steps_at(buffer: Any, transform: Transform, env_ids: Tensor, positions: Tensor) -> TimeStep:
    """Return stored time steps, transformed as for training.

    Args:
        buffer: the replay buffer.
        transform: data transformer for experience ``[N, 1, ...]``; its statistics are not updated.
        env_ids: int64 ``[N]``.
        positions: int64 ``[N]``.

    Returns:
        Time steps ``[N, ...]``.
    """
    stored = Experience(time_step=buffer.get_field('time_step', env_ids[:, None], positions[:, None]))
    batch_info = BatchInfo(env_ids=env_ids, positions=positions, replay_buffer=buffer)
    with context.eval_context():
        experience = clear_batch_info(transform(add_batch_info(stored, batch_info, buffer)))
    return nest.map_structure(lambda x: x.squeeze(1), experience.time_step)


@contextlib.contextmanager
def inference(module: nn.Module, enable_amp: bool) -> Iterator[None]:
    """Context in which ``module`` runs in evaluation mode, without gradients and summaries.

    On a GPU it computes in 16 bits if ``enable_amp`` is set.
    """
    parameter = next(module.parameters(), None)
    device = context.get_default_device() if parameter is None else parameter.device
    was_training = module.training
    module.train(False)
    try:
        with torch.no_grad(), context.record_if(False), half_precision(device, enable_amp):
            yield
    finally:
        module.train(was_training)


def half_precision(device: torch.device, enable_amp: bool) -> Any:
    """Context in which networks on a GPU compute in 16 bits, if ``enable_amp`` is set; no effect on a CPU."""
    if device.type != 'cuda' or not enable_amp:
        return contextlib.nullcontext()
    return torch.autocast('cuda', torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16)


class Reanalyzer:
    """Searches again from stored steps.

    Args:
        algorithm: an ``MCTSAlgorithm`` that has a model, or another algorithm, whose ``rollout_step`` returns an info
            with 'value' and 'action_distribution'.
        model: model of the search; ``None`` for another algorithm.
        transform: data transformer for experience.
        batch_size: number of steps processed at once; ``None``: all.
        state_path: path of the algorithm's states in the stored experience, such as 'state.rl'; ``None``: initial
            states are used.
        enable_amp: see :func:`inference`.
    """

    def __init__(self, algorithm: Any, model: Any, transform: Transform, batch_size: int | None, state_path: str | None,
                 enable_amp: bool):
        self._algorithm, self._model, self._transform = algorithm, model, transform
        self._batch_size, self._state_path, self._enable_amp = batch_size, state_path, enable_amp

    def search(self, buffer: Any, env_ids: Tensor, positions: Tensor) -> Any:
        """Search from steps at ``env_ids`` and ``positions`` ``[N]``; return an ``MCTSInfo`` ``[N, ...]``."""
        return self._in_parts(self._found, buffer, env_ids, positions)

    def values(self, buffer: Any, env_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the values ``[N]`` that the model predicts without a search, or those of another algorithm."""
        return self._in_parts(self._predicted, buffer, env_ids, positions)

    def _in_parts(self, function: Callable[..., Any], buffer: Any, env_ids: Tensor, positions: Tensor) -> Any:
        size = self._batch_size or len(env_ids)
        with inference(self._algorithm if self._model is None else self._model, self._enable_amp):
            parts = [function(time_steps_at(buffer, self._transform, *part), self._state(buffer, *part))
                     for part in zip(env_ids.split(size), positions.split(size))]
        return parts[0] if len(parts) == 1 else nest.concatenate(parts)

    def _state(self, buffer: Any, env_ids: Tensor, positions: Tensor) -> NestedTensor:
        if self._state_path is None:
            return self._algorithm.get_initial_rollout_state(len(env_ids))
        return buffer.get_field(self._state_path, env_ids, positions)

    def _found(self, inputs: TimeStep, state: NestedTensor) -> Any:
        if self._model is not None:
            observation = search_observation(self._model, inputs.observation)
            return self._algorithm.rollout_step(inputs._replace(observation=observation), state).info
        info = self._algorithm.rollout_step(inputs, state).info
        distribution = info.action_distribution
        if hasattr(distribution, 'logits') and distribution.logits.ndim == 2:
            return MCTSInfo(value=info.value, candidate_action_policy=distribution.logits.softmax(-1))
        actions = distribution.sample((_NUM_SAMPLES, )).movedim(0, 1)
        policy = info.value.new_full((len(actions), _NUM_SAMPLES), 1.0 / _NUM_SAMPLES)
        return MCTSInfo(candidate_actions=actions, value=info.value, candidate_action_policy=policy)

    def _predicted(self, inputs: TimeStep, state: NestedTensor) -> Tensor:
        if self._model is None:
            return self._algorithm.rollout_step(inputs, state).info.value
        observation = search_observation(self._model, inputs.observation)
        return self._algorithm.model_value(inputs._replace(observation=observation), state).float()
