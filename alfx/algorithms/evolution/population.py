"""Episodes of many policies at once: each environment of a batch runs one policy and then the next.

A queue assigns (policy, episode) to whichever environment has finished its last episode. There may be more or fewer
environments than policies, and a long episode blocks only its own environment.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alfx import context, nest
from alfx.data_structures import TimeStep, reset_at_first
from alfx.tensor_specs import NestedTensor
from alfx.utils.transfers import to_device

Act = Callable[[TimeStep, NestedTensor, Tensor], tuple[NestedTensor, NestedTensor]]


class PopulationResult(NamedTuple):
    """Results of N policies.

    Attributes:
        returns: float32 ``[N, E]``, or ``[N, E, K]`` for a K-dimensional reward, of E episodes each.
        num_steps: number of environment steps, including steps of idle environments.
    """

    returns: Tensor
    num_steps: int


def play_population(act: Act, algorithm: Any, env: Any, num_policies: int, num_episodes: int,
                    initial_state: NestedTensor, observe: Callable[[TimeStep], None]) -> PopulationResult:
    """Play ``num_episodes`` episodes with each of ``num_policies`` policies, starting from a reset.

    Idle environments act with policy -1 until the last episode has ended.

    Args:
        act: maps inputs ``[B, ...]``, the policy state and the index of the policy in each environment, int64 ``[B]``,
            to actions and the next state.
        algorithm: transforms time steps.
        env: batched environment; it is reset.
        num_policies: N.
        num_episodes: E.
        initial_state: policy state ``[B, ...]`` at the first step of an episode.
        observe: called with each time step ``[B, ...]``.
    """
    batch_size, device, total = env.batch_size, algorithm.device, num_policies * num_episodes
    task = torch.arange(batch_size)  # policy = task // num_episodes
    task[task >= total] = -1
    next_task, num_left, num_steps = min(batch_size, total), total, 0
    time_step = env.reset()
    returns: Tensor = torch.zeros(total, *time_step.reward.shape[1:])
    so_far = torch.zeros_like(time_step.reward, device='cpu')
    state, transform_state = initial_state, algorithm.get_initial_transform_state(batch_size)
    has_state = bool(nest.flatten(initial_state))
    with context.rollout_context(), torch.no_grad():
        while True:
            observe(time_step)
            so_far += time_step.reward.cpu()
            is_first, is_last = time_step.is_first().cpu(), time_step.is_last().cpu()
            num_steps += int((~is_first).sum())
            for slot in is_last.nonzero().flatten().tolist():
                if task[slot] >= 0:
                    returns[task[slot]] = so_far[slot]
                    num_left -= 1
                    task[slot] = next_task if next_task < total else -1
                    next_task += 1
                so_far[slot] = 0
            if not num_left:
                return PopulationResult(returns.unflatten(0, (num_policies, num_episodes)), num_steps)
            if device.type != 'cpu':
                time_step = to_device(time_step, device)
            inputs, transform_state = algorithm.transform_timestep(time_step, transform_state)
            if has_state:
                state = reset_at_first(state, initial_state, inputs)
            policy = torch.where(task < 0, -1, task // num_episodes)
            action, state = act(inputs, state, policy)
            time_step = env.step(action)
