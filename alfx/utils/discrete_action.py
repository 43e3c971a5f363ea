"""Single discrete actions, for algorithms that compare the values of all actions, and exploration with them."""
from typing import Any

import torch
from torch import Tensor

from alfx import nest
from alfx.data_structures import TimeStep, namedtuple
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, TensorSpec


class NoValidActionError(ValueError):
    """An action mask of the environment allows no action where the episode is not over."""


def suited_algorithms(action_spec: NestedTensorSpec) -> str:
    """Return advice for errors: the algorithms that support actions of this spec."""
    leaves = nest.flatten(action_spec)
    discrete = [leaf for leaf in leaves if leaf.is_discrete]
    if not all(leaf.is_bounded() for leaf in leaves):
        return ('SacAlgorithm, Td3Algorithm and PPOAlgorithm support such actions with the bounds of '
                'gym_wrappers.ContinuousActionClip(min_v=..., max_v=...) among gym_env_wrappers')
    if not discrete:
        names = 'SacAlgorithm, Td3Algorithm and PPOAlgorithm'
    elif len(leaves) == 1 and leaves[0].ndim == 0:
        names = 'DqnAlgorithm and PPOAlgorithm' if nest.is_nested(action_spec) else (
            'DqnAlgorithm, SacAlgorithm and PPOAlgorithm')
    elif len(discrete) == 1 and discrete[0].ndim == 0 and len(action_spec) == 2 and discrete[0] in (
            action_spec.values() if isinstance(action_spec, dict) else action_spec):
        names = 'SacAlgorithm and PPOAlgorithm'
    else:
        return 'PPOAlgorithm and ActorCriticAlgorithm support such actions'
    return f'{names} support such actions'


class DiscreteAction:
    """Conversion between an action of the environment, ``minimum .. maximum``, and its index ``0 .. n - 1``.

    Args:
        action_spec: one scalar discrete ``BoundedTensorSpec``, possibly in a nest.
        owner: name of the user of the action, for error messages.

    Raises:
        ValueError: ``action_spec`` is not a single discrete action.
    """

    def __init__(self, action_spec: NestedTensorSpec, owner: str):
        specs: list[Any] = nest.flatten(action_spec)
        if len(specs) != 1 or not isinstance(specs[0], BoundedTensorSpec) or not specs[0].is_discrete or specs[0].ndim:
            raise ValueError(f'{owner}: expected one discrete action, a scalar BoundedTensorSpec of integers, found '
                             f'{action_spec}; {suited_algorithms(action_spec)}')
        self.spec = specs[0]
        self.num_actions = int(self.spec.maximum) - int(self.spec.minimum) + 1
        self._first = int(self.spec.minimum)
        self._nest = None if isinstance(action_spec, TensorSpec) else action_spec

    def index(self, action: NestedTensor) -> Tensor:
        """Return the indices, int64 ``[...]``, of actions ``[...]``."""
        leaf = action if isinstance(action, Tensor) else nest.flatten(action)[0]
        return leaf.long() - self._first if self._first else leaf.long()

    def action(self, index: Tensor) -> NestedTensor:
        """Return actions ``[...]`` with the structure of the spec for indices ``[...]``."""
        leaf = (index + self._first if self._first else index).to(self.spec.dtype)
        return leaf if self._nest is None else nest.pack_sequence_as(self._nest, [leaf])

    def mask_of(self, inputs: TimeStep) -> NestedTensor:
        """Return the mask of the valid actions, bool ``[B, n]``, or ``()``."""
        return leaf_of_mask(inputs.action_mask)

    def explore(self, index: Tensor, epsilon: float, mask: NestedTensor = ()) -> Tensor:
        """Replace each element of ``index`` ``[B]`` with probability ``epsilon`` by a uniformly random action.

        Args:
            index: int64 ``[B]``.
            epsilon: in [0, 1].
            mask: bool ``[B, n]``, the actions that may be drawn; ``()`` means all.
        """
        if epsilon <= 0.0:
            return index
        return self.random(index, mask) if epsilon >= 1.0 else self.replace_some(index, epsilon, mask)

    def random(self, like: Tensor, mask: NestedTensor = ()) -> Tensor:
        """Sample indices with the shape ``[B]`` of ``like`` uniformly from the actions that ``mask`` ``[B, n]``
        allows."""
        if not isinstance(mask, Tensor):
            return torch.randint(self.num_actions, like.shape, device=like.device)
        return random_valid(mask)

    def replace_some(self, index: Tensor, epsilon: float | Tensor, mask: NestedTensor = ()) -> Tensor:
        """Compute :meth:`explore` with the same operations for every ``epsilon``, which may be a tensor ``[]``."""
        random = self.random(index, mask)
        return torch.where(torch.rand(index.shape, device=index.device) < epsilon, random, index)


def leaf_of_mask(mask: NestedTensor) -> Any:
    """Return the mask ``[B, n]`` of a discrete action, possibly the only leaf of a nest; ``()`` without a mask."""
    return mask if isinstance(mask, Tensor) else next(iter(nest.flatten(mask)), ())


def random_valid(mask: Tensor) -> Tensor:
    """Sample uniformly among the positions where ``mask`` ``[..., N]`` is True, int64 ``[...]``."""
    return torch.where(mask, torch.rand(mask.shape, device=mask.device), -1.0).argmax(-1)


def mask_invalid(values: Tensor, mask: NestedTensor) -> Tensor:
    """Set ``values`` ``[..., N]`` to -inf where ``mask`` ``[..., N]`` is False; ``()`` leaves them unchanged.

    Raises:
        ValueError: the mask has another shape.
    """
    if not isinstance(mask, Tensor):
        return values
    if mask.shape != values.shape:
        raise ValueError(f'an action mask has the shape {tuple(mask.shape)}; expected one entry for each action, '
                         f'{tuple(values.shape)}')
    return values.masked_fill(~mask, -torch.inf)


LongExplorationState = namedtuple('LongExplorationState', ['steps_left', 'index'], default_value=())
"""Remaining steps for which a random action is repeated, and its index: int64 ``[B]`` each."""

_LONGEST = 10000


class EpsilonZGreedy:
    """Epsilon-z-greedy exploration: random actions that are repeated for a random number of steps.

    Dabney et al. 2021 (arXiv:2006.01782), algorithm 1: with probability epsilon a uniformly random action is chosen and
    taken n times, ``P(n) ~ n ** -exponent`` for n up to 10,000. Such sequences reach states that dithering does not.

    Args:
        action: conversion of the action.
        exponent: greater than 1; 2 in the paper. Larger values give shorter sequences.
        owner: name of the user of the exploration, for error messages.

    Raises:
        ValueError: ``exponent`` is not above 1.
    """

    state_spec = LongExplorationState(TensorSpec((), torch.int64), TensorSpec((), torch.int64))

    def __init__(self, action: DiscreteAction, exponent: float, owner: str):
        if not exponent > 1.0:
            raise ValueError(f'{owner}.exploration_length_exponent: expected a number above 1, or None for random '
                             f'actions of one step, found {exponent}')
        self._action = action
        weights = torch.arange(1, _LONGEST + 1, dtype=torch.float64) ** -exponent
        self._cumulative = (weights.cumsum(0) / weights.sum()).float()

    def __call__(self, index: Tensor, epsilon: float, state: Any, mask: NestedTensor = ()) -> tuple[Tensor, Any]:
        """Return ``index`` ``[B]`` or the actions that explore instead.

        Args:
            index: int64 ``[B]``, greedy actions.
            epsilon: probability of starting a sequence of random actions where there is none.
            state: ``LongExplorationState`` ``[B]``; zeros at the start of an episode.
            mask: bool ``[B, n]``, the valid actions, ``()`` for all; a sequence ends when its action is invalid.

        Returns:
            The index ``[B]`` of the action to take, and the next state.
        """
        self._cumulative = self._cumulative.to(index.device)
        draws = torch.rand(2, *index.shape, device=index.device)
        lengths = 1 + torch.searchsorted(self._cumulative, draws[0]).clamp_(max=_LONGEST - 1)
        random = self._action.random(index, mask)
        continues = state.steps_left > 0
        if isinstance(mask, Tensor):
            continues = continues & mask.gather(-1, state.index.unsqueeze(-1)).squeeze(-1)
        starts = ~continues & (draws[1] < epsilon)
        steps_left = torch.where(starts, lengths, state.steps_left * continues)
        repeated = torch.where(starts, random, state.index)
        taken = torch.where(starts | continues, repeated, index)
        return taken, LongExplorationState((steps_left - 1).clamp(min=0), repeated)
