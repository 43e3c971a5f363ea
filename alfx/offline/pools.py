"""Two pools of episodes, replayed together with the collected ones; see :mod:`alfx.algorithms.ppod_algorithm`."""
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alfx import nest
from alfx.data_structures import StepType, TimeStep
from alfx.tensor_specs import NestedTensor


@dataclass(eq=False)
class Demonstration:
    """An episode.

    Attributes:
        steps: time steps and actions ``[L + 1, ...]``, from FIRST to LAST.
        score: return of the episode.
        max_value: maximum value of its observations when it was last replayed or collected.
        is_given: the episode is one of the initial demonstrations, which are never dropped.
    """

    steps: tuple[TimeStep, NestedTensor]
    score: float
    max_value: float = 0.0
    is_given: bool = False

    @property
    def length(self) -> int:
        """Number of steps, L + 1."""
        return len(self.steps[0].step_type)


def score_of(time_step: TimeStep) -> float:
    """Return the sum of the rewards of the steps ``[L, ...]`` of an episode; the reward at FIRST is ignored."""
    return float((time_step.reward * (time_step.step_type != StepType.FIRST)).sum())


class Pools:
    """Episodes with reward, and episodes without reward that the value function considers promising.

    Args:
        given: initial episodes; they are in the pool with reward.
        rho: initial fraction of all episodes, collected and replayed, that are replays of episodes with reward.
        phi: initial fraction of all episodes that are replays from the other pool.
        alpha: episodes of the other pool are drawn in proportion to ``max_value ** alpha``.
        capacity: maximum number of episodes in both pools together.
        threshold: minimum score of an episode with reward; ``None``: the minimum score of ``given``.
    """

    def __init__(self, given: list[Demonstration], rho: float, phi: float, alpha: float, capacity: int,
                 threshold: float | None):
        self.with_reward, self.with_value = list(given), []  # type: list[Demonstration], list[Demonstration]
        self._total, self.phi, self._step = rho + phi, phi, phi / capacity
        self._alpha, self._capacity = alpha, capacity
        self.threshold = min(demo.score for demo in given) if threshold is None else threshold

    @property
    def rho(self) -> float:
        """Current fraction of replays of episodes with reward; it increases as ``phi`` decreases."""
        return self._total - self.phi

    def add(self, demo: Demonstration) -> None:
        """Add an episode to the pool that it qualifies for; drop episodes beyond the capacity."""
        if demo.score >= self.threshold:
            self.with_reward.append(demo)
            self.phi = max(self.phi - self._step, 0.0)
        else:
            self.with_value.append(demo)
        while len(self.with_reward) + len(self.with_value) > self._capacity:
            if self.with_value:
                self.with_value.remove(min(self.with_value, key=lambda x: x.max_value))
                continue
            own = next((x for x in self.with_reward if not x.is_given), None)
            if own is None:
                return
            self.with_reward.remove(own)

    def draw(self) -> Demonstration:
        """Return the next episode to replay."""
        if self.with_value and float(torch.rand(())) * self._total >= self.rho:
            return self.with_value[int(torch.multinomial(self.chances(), 1))]
        return self.with_reward[int(torch.randint(len(self.with_reward), ()))]

    def chances(self) -> Tensor:
        """Return the probability of each episode in the pool by value, float64 ``[n]``, given that this pool is chosen.
        """
        values = torch.tensor([x.max_value for x in self.with_value], dtype=torch.float64).clamp(min=1e-9)
        weights = (values / values.max())**self._alpha
        return weights / weights.sum()

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: everything except the given episodes, as tensors and numbers."""
        return {'phi': self.phi, 'pools': [[_state_of(x) for x in pool if not x.is_given]
                                           for pool in (self.with_reward, self.with_value)]}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state of :meth:`state`; the given episodes must be the same."""
        given = [x for x in self.with_reward if x.is_given]
        pools = [[self._demonstration(x) for x in pool] for pool in state['pools']]
        self.phi, self.with_reward, self.with_value = state['phi'], given + pools[0], pools[1]

    def reference(self, demo: Demonstration) -> int | dict[str, Any]:
        """Return a reference to an episode for a checkpoint: its index in the pools, or all of it if it was dropped."""
        everything = self.with_reward + self.with_value
        return everything.index(demo) if demo in everything else _state_of(demo)

    def referred_to(self, reference: int | dict[str, Any]) -> Demonstration:
        """Return the episode of a :meth:`reference`; call it after :meth:`load`."""
        if isinstance(reference, dict):
            return self._demonstration(reference)
        return (self.with_reward + self.with_value)[reference]

    def steps(self, leaves: list[Tensor]) -> Any:
        """Return time steps and actions from their flat ``leaves``."""
        tree: Any = nest.structure(self.with_reward[0].steps)  # a given episode, which is never dropped
        return tree.unflatten(leaves)

    def _demonstration(self, state: dict[str, Any]) -> Demonstration:
        return Demonstration(self.steps(state['leaves']), state['score'], state['max_value'])


def _state_of(demo: Demonstration) -> dict[str, Any]:
    return {'leaves': nest.flatten(demo.steps), 'score': demo.score, 'max_value': demo.max_value}


class Slots:
    """Environments that each replay episodes of the pools one after the other.

    Args:
        pools: draws the episodes.
        count: number of slots.
        state: a state of :meth:`state` to continue from; ``None``: begin with newly drawn episodes.
    """

    def __init__(self, pools: Pools, count: int, state: dict[str, Any] | None = None):
        self._pools = pools
        self._pieces: list[list[tuple[Demonstration, int, int]]] = []
        if state is not None:
            self._current = [pools.referred_to(x) for x in state['current']]
            self._position, self._highest = list(state['position']), list(state['highest'])
            return
        self._current = [pools.draw() for _ in range(count)]
        self._position = [0] * count
        self._highest = [-float('inf')] * count  # maximum value of the current episode

    def state(self) -> dict[str, Any]:
        """Return the position of each slot, for a checkpoint."""
        return {'current': [self._pools.reference(x) for x in self._current], 'position': list(self._position),
                'highest': list(self._highest)}

    def next_steps(self, length: int) -> tuple[TimeStep, NestedTensor]:
        """Return time steps and actions ``[count, length, ...]``; the last column is the first of the next call."""
        self._pieces = [self._advance(slot, length) for slot in range(len(self._current))]
        rows = [[nest.map_structure(lambda x, a=a, b=b: x[a:b], demo.steps) for demo, a, b in pieces]
                for pieces in self._pieces]
        return nest.stack([nest.map_structure(lambda *x: torch.cat(x), *row) for row in rows])

    def _advance(self, slot: int, length: int) -> list[tuple[Demonstration, int, int]]:
        pieces, missing = [], length
        while missing:
            demo, start = self._current[slot], self._position[slot]
            end = min(start + missing, demo.length)
            pieces.append((demo, start, end))
            missing -= end - start
            if missing:
                self._current[slot], self._position[slot] = self._pools.draw(), 0
            else:
                self._position[slot] = end - 1  # the next call begins with this step
        return pieces

    def note_values(self, values: Tensor) -> None:
        """Store the values ``[count, length]`` of the steps of the last :meth:`next_steps`."""
        for slot, pieces in enumerate(self._pieces):
            column = 0
            for demo, start, end in pieces:
                if start == 0:
                    self._highest[slot] = -float('inf')
                highest = float(values[slot, column:column + end - start].max())
                self._highest[slot] = max(self._highest[slot], highest)
                column += end - start
                if end == demo.length:
                    demo.max_value = self._highest[slot]


class EpisodeTracker:
    """Splits unrolls into episodes.

    Args:
        count: B, the number of environments.
    """

    def __init__(self, count: int):
        self.count = count
        self._parts: list[list[tuple[TimeStep, NestedTensor]]] = [[] for _ in range(count)]
        self._highest = [-float('inf')] * count

    def state(self) -> dict[str, Any]:
        """Return the running episodes, for a checkpoint."""
        return {'highest': list(self._highest), 'parts': [[nest.flatten(x) for x in row] for row in self._parts]}

    def load(self, state: dict[str, Any], steps: Callable[[list[Tensor]], Any]) -> None:
        """Restore a state of :meth:`state`; ``steps`` builds time steps and actions from their leaves."""
        self._highest, self._parts = list(state['highest']), [[steps(x) for x in row] for row in state['parts']]

    def add(self, steps: tuple[TimeStep, NestedTensor], values: Tensor) -> list[Demonstration]:
        """Add steps ``[B, T, ...]`` that follow the previous ones, and return the episodes that end in them.

        Args:
            steps: time steps and actions.
            values: ``[B, T]``.
        """
        found = []
        is_last = steps[0].step_type == StepType.LAST
        for row in range(len(values)):
            start = 0
            for end in [*(is_last[row].nonzero().flatten() + 1).tolist(), values.shape[1]]:
                if end == start:
                    continue
                piece = nest.map_structure(lambda x, row=row, a=start, b=end: x[row, a:b].clone(), steps)
                if piece[0].step_type[0] == StepType.FIRST:  # the running episode was abandoned, as by a restart
                    self._parts[row], self._highest[row] = [], -float('inf')
                self._parts[row].append(piece)
                self._highest[row] = max(self._highest[row], float(values[row, start:end].max()))
                if is_last[row, end - 1]:
                    found += self._completed(row)
                start = end
        return found

    def _completed(self, row: int) -> list[Demonstration]:
        steps = nest.map_structure(lambda *x: torch.cat(x), *self._parts[row])
        highest, self._parts[row], self._highest[row] = self._highest[row], [], -float('inf')
        if steps[0].step_type[0] != StepType.FIRST:  # its beginning is missing
            return []
        return [Demonstration(steps, score_of(steps[0]), highest)]
