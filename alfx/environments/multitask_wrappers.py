"""Wrappers that join environments or switch between tasks, exported by :mod:`alfx.environments.alf_wrappers`."""
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from alfx import context, nest
from alfx.data_structures import StepType, TimeStep
from alfx.environments.alf_environment import AlfEnvironment, EnvironmentAsAnother
from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.seeding import batch_seed, derived_seed
from alfx.environments.wrapper_base import _MODULE, AlfEnvironmentBaseWrapper
from alfx.gin_utils import configurable
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, TensorSpec


class _MultiEnvironment(EnvironmentAsAnother):
    """Base class of environments that contain several environments with equal specs, those of the first."""

    def __init__(self, envs: Sequence[AlfEnvironment]):
        if not envs:
            raise EnvironmentLoadError(f'{type(self).__name__}: expected at least one environment')
        self._envs = list(envs)
        self._env = first = envs[0]
        for i, env in enumerate(self._envs):
            if env.time_step_spec() != first.time_step_spec():
                raise EnvironmentLoadError(f'{type(self).__name__}: environment {i} has different specs: '
                                           f'expected {first.time_step_spec()}, found {env.time_step_spec()}')

    def _seed(self, seed: int | None) -> None:
        for i, env in enumerate(self._envs):
            env.seed(derived_seed(seed, i))

    def step(self, action: NestedTensor) -> TimeStep:
        time_step = super().step(action)
        self.add_final_infos(self.final_infos().values())
        return time_step

    def request_reset(self, mask: torch.Tensor) -> None:
        known = self.final_infos()
        self._end_episodes(mask)
        self.add_final_infos(info for i, info in self.final_infos().items() if i not in known)

    def _end_episodes(self, mask: torch.Tensor) -> None:
        """End the episodes of the environments in ``mask``, bool ``[B]``."""
        raise NotImplementedError

    def get_state(self) -> Any:
        states = [env.get_state() for env in self._envs]
        return None if any(state is None for state in states) else {'envs': states, **self._own_state()}

    def set_state(self, state: Any) -> None:
        for env, saved in zip(self._envs, state['envs'], strict=True):
            env.set_state(saved)
        self._set_own_state(state)

    def _own_state(self) -> dict[str, Any]:
        current = None if self._current is None else nest.map_structure(torch.clone, self._current)
        return {'current': current, 'final_infos': self.latest_final_infos()}

    def _set_own_state(self, state: dict[str, Any]) -> None:
        current = state['current']
        self._current = None if current is None else nest.map_structure(torch.clone, current)
        self._set_final_infos(state)

    def close(self) -> None:
        for env in self._envs:
            env.close()


class BatchEnvironmentWrapper(_MultiEnvironment):
    """Joins several environments into one batch; they are stepped one after the other.

    Args:
        envs: environments with equal specs, each of any batch size. ``env_id`` numbers all of them from 0.
    """

    def __init__(self, envs: Sequence[AlfEnvironment]):
        super().__init__(envs)
        self._sizes = [env.batch_size for env in envs]
        self._env_ids = torch.arange(sum(self._sizes))

    def _seed(self, seed: int | None) -> None:
        first = context.first_environment() // self._sizes[0]
        with context.environments_from(0):  # each of them already has its own seed
            for i, env in enumerate(self._envs):
                env.seed(derived_seed(seed, first + i))

    @property
    def batch_size(self) -> int:
        return sum(self._sizes)

    def final_infos(self) -> dict[int, dict[str, float]]:
        firsts = itertools.accumulate(self._sizes, initial=0)
        return {first + i: info for first, env in zip(firsts, self._envs) for i, info in env.final_infos().items()}

    def _joined(self, time_steps: Sequence[TimeStep]) -> TimeStep:
        return nest.map_structure(lambda *parts: torch.cat(parts), *time_steps)._replace(env_id=self._env_ids)

    def _reset(self) -> TimeStep:
        return self._joined([env.reset() for env in self._envs])

    def _step(self, action: NestedTensor) -> TimeStep:
        leaves, structure = nest.flatten_with_structure(action)
        parts = zip(*(leaf.split(self._sizes) for leaf in leaves))
        return self._joined([env.step(structure.unflatten(part)) for env, part in zip(self._envs, parts)])

    def _end_episodes(self, mask: torch.Tensor) -> None:
        for env, part in zip(self._envs, mask.split(self._sizes)):
            env.request_reset(part)


class MultitaskWrapper(_MultiEnvironment):
    """Several tasks, one of which is active: a batch of 1 whose action also chooses the next task.

    The action is ``{'task_id': [1], 'action': ...}``. ``task_id`` is used at LAST only, where it chooses the task of
    the next episode; ``action`` is used everywhere else. ``env_info`` contains the active 'task_id'. For a larger
    batch, join several of these with :class:`BatchEnvironmentWrapper`.

    Args:
        envs: one environment for each task, of batch size 1, with equal specs.
        task_names: name of each task.
        env_id: ``TimeStep.env_id``; the first episode has task ``env_id % num_tasks``.
    """

    def __init__(self, envs: Sequence[AlfEnvironment], task_names: Sequence[str], env_id: int | None = None):
        super().__init__(envs)
        if len(task_names) != len(envs) or any(env.batch_size != 1 for env in envs):
            raise EnvironmentLoadError('MultitaskWrapper: expected one name for each environment of batch size 1, '
                                       f'found {len(task_names)} names and batch sizes '
                                       f'{[env.batch_size for env in envs]}; join several MultitaskWrappers with '
                                       'BatchEnvironmentWrapper for a larger batch')
        inner = envs[0].env_info_spec()
        if inner != () and not isinstance(inner, dict):
            raise EnvironmentLoadError(f'MultitaskWrapper: expected env_info to be a dict or (), found {inner}')
        self._info_spec = {**(inner or {}), 'task_id': TensorSpec((), torch.int64)}
        self._task_names = list(task_names)
        self._env_id = torch.tensor([env_id or 0])
        self._task = self._first_task = (env_id or 0) % len(envs)

    def _seed(self, seed: int | None) -> None:
        super()._seed(seed)
        self._task = self._first_task

    @classmethod
    def load(cls, load_fn: Callable[..., AlfEnvironment], environment_name: Sequence[str], env_id: int | None = None,
             **kwargs: Any) -> 'MultitaskWrapper':
        """Create a wrapper with one task for each environment name.

        Args:
            load_fn: creates an environment of batch size 1 from a name.
            environment_name: the names.
            env_id: see the class.
            **kwargs: further arguments of ``load_fn``.
        """
        return cls([load_fn(name, **kwargs) for name in environment_name], environment_name, env_id)

    @property
    def batch_size(self) -> int:
        return 1

    @property
    def num_tasks(self) -> int:
        return len(self._envs)

    def get_num_tasks(self) -> int:
        """Return the number of tasks."""
        return self.num_tasks

    @property
    def task_names(self) -> list[str]:
        return self._task_names

    def action_spec(self) -> NestedTensorSpec:
        return {'action': super().action_spec(), 'task_id': BoundedTensorSpec((), torch.int64, 0, len(self._envs) - 1)}

    def env_info_spec(self) -> NestedTensorSpec:
        return self._info_spec

    def final_infos(self) -> dict[int, dict[str, float]]:
        return self._envs[self._task].final_infos()

    def _outer(self, time_step: TimeStep, task_id: torch.Tensor) -> TimeStep:
        info = {**(time_step.env_info or {}), 'task_id': torch.tensor([self._task])}
        prev_action = {'action': time_step.prev_action, 'task_id': torch.where(time_step.is_first(), 0, task_id.cpu())}
        return time_step._replace(env_info=info, prev_action=prev_action, env_id=self._env_id)

    def _reset(self) -> TimeStep:
        return self._outer(self._envs[self._task].reset(), torch.zeros(1, dtype=torch.int64))

    def _step(self, action: NestedTensor) -> TimeStep:
        assert self._current is not None
        env = self._envs[self._task]
        if not bool(self._current.is_last()):
            return self._outer(env.step(action['action']), action['task_id'])
        task = int(action['task_id'])
        if not 0 <= task < len(self._envs):
            raise ValueError(f'task_id: expected a number from 0 to {len(self._envs) - 1}, found {task}')
        self._task = task
        return self._outer(self._envs[task].reset(), action['task_id'])

    def _end_episodes(self, mask: torch.Tensor) -> None:
        self._envs[self._task].request_reset(mask)
        if self._current is not None and mask.any():
            # the caller marks its own copy LAST; without this, the next step would ignore the chosen task
            self._current = self._current._replace(step_type=torch.full_like(self._current.step_type, StepType.LAST))

    def _own_state(self) -> dict[str, Any]:
        return {**super()._own_state(), 'task': self._task}

    def _set_own_state(self, state: dict[str, Any]) -> None:
        super()._set_own_state(state)
        self._task = state['task']

    def render(self, mode: str = 'rgb_array') -> np.ndarray | None:
        return self._envs[self._task].render(mode)


@configurable(module=_MODULE)
class CurriculumWrapper(AlfEnvironmentBaseWrapper):
    """Chooses tasks by the agent's learning progress.

    The score of an episode is its mean reward per step. For each task two moving averages of scores are kept, a fast
    one (current) and a slow one (past); their difference is the progress. The next episode of an environment has task k
    with a probability proportional to ``1 + (f - 1) * max(progress_k, 0) / max_j progress_j``; f rises from 1 to
    ``progress_favor`` during the first ``warmup_period * num_tasks`` episodes. ``env_info`` contains counts,
    probabilities and current scores of the tasks at LAST and zeros elsewhere, so that the sum over an episode is the
    value at its end. An episode that a wrapper outside of this one truncates has zeros at LAST, too.

    Args:
        env: :class:`MultitaskWrapper` or a batch of them.
        progress_favor: how much more likely the task with the fastest progress is than a task without progress.
        current_score_update_rate: weight of a new episode in the fast average.
        past_score_update_rate: weight of a new episode in the slow average.
        warmup_period: episodes per task until ``progress_favor`` is reached.
    """

    _STATE = ('_sums', '_lengths', '_current_score', '_past_score', '_counts', '_generator', '_next')

    def __init__(self, env: AlfEnvironment, progress_favor: float = 10.0, current_score_update_rate: float = 1e-3,
                 past_score_update_rate: float = 5e-4, warmup_period: int = 100):
        super().__init__(env)
        if not isinstance(env.action_spec(), dict) or set(env.action_spec()) != {'action', 'task_id'}:
            raise EnvironmentLoadError('CurriculumWrapper: expected a MultitaskWrapper or a batch of them, found the '
                                       f'action spec {env.action_spec()}')
        if env.reward_spec().shape:
            raise EnvironmentLoadError('CurriculumWrapper: expected scalar rewards; put ScalarRewardWrapper inside')
        tasks = env.num_tasks
        self._favor, self._warmup = progress_favor, max(1, warmup_period * tasks)
        self._rates = current_score_update_rate, past_score_update_rate
        self._sums, self._lengths = np.zeros(self.batch_size), np.zeros(self.batch_size)
        self._current_score, self._past_score = np.zeros(tasks), np.zeros(tasks)
        self._counts = np.zeros(tasks, np.int64)
        self._generator = np.random.default_rng()
        self._next = torch.zeros(self.batch_size, dtype=torch.int64)
        vector = TensorSpec((tasks, ))
        self._info_spec = {**env.env_info_spec(), 'curriculum_task_count': vector, 'curriculum_task_prob': vector,
                           'curriculum_task_score': vector}

    def action_spec(self) -> NestedTensorSpec:
        return self._env.action_spec()['action']

    def env_info_spec(self) -> NestedTensorSpec:
        return self._info_spec

    def _seed(self, seed: int | None) -> None:
        super()._seed(seed)
        self._generator = np.random.default_rng(batch_seed(seed, 2))
        for values in (self._current_score, self._past_score, self._counts):
            values[:] = 0

    def task_probabilities(self) -> np.ndarray:
        """Return the probability that each task is chosen next, ``[num_tasks]``."""
        progress = np.maximum(self._current_score - self._past_score, 0)
        favor = 1 + (self._favor - 1) * min(1.0, self._counts.sum() / self._warmup)
        weights = 1 + (favor - 1) * progress / max(progress.max(), 1e-30)
        return weights / weights.sum()

    def _inner(self, action: NestedTensor) -> NestedTensor:
        return {'action': action, 'task_id': self._next}

    def _outer(self, time_step: TimeStep, action: NestedTensor | None) -> TimeStep:
        probabilities = self.task_probabilities()
        columns = {'curriculum_task_count': self._counts, 'curriculum_task_prob': probabilities,
                   'curriculum_task_score': self._current_score}
        last = time_step.is_last()[:, None]
        info = {key: torch.where(last, torch.from_numpy(value.astype(np.float32)), 0.0)
                for key, value in columns.items()}
        return time_step._replace(env_info={**time_step.env_info, **info}, prev_action=time_step.prev_action['action'])

    def _step(self, action: NestedTensor) -> TimeStep:
        time_step = self._env.step(self._inner(action))
        step_type = time_step.step_type.numpy()
        first, last = step_type == StepType.FIRST, step_type == StepType.LAST
        self._sums[first], self._lengths[first] = 0, 0
        self._sums += time_step.reward.numpy()
        self._lengths += ~first
        self._finish(last, time_step)
        return self._outer(time_step, action)

    def request_reset(self, mask: torch.Tensor) -> None:
        super().request_reset(mask)
        if self._current is not None:
            self._finish((mask & ~self._current.is_last()).numpy(), self._current)

    def _finish(self, last: np.ndarray, time_step: TimeStep) -> None:
        """Score the episodes that end with ``time_step``, bool ``[B]``, and choose the tasks of the next ones."""
        if last.any():
            tasks = time_step.env_info['task_id'].numpy()
            for i in np.flatnonzero(last):
                self._update_scores(int(tasks[i]), self._sums[i] / max(self._lengths[i], 1))
            chosen = self._generator.choice(len(self._counts), size=self.batch_size, p=self.task_probabilities())
            self._next = torch.from_numpy(np.where(last, chosen, self._next.numpy()))

    def _reset(self) -> TimeStep:
        self._sums[:], self._lengths[:] = 0, 0
        return super()._reset()

    def _update_scores(self, task: int, score: float) -> None:
        if self._counts[task] == 0:
            self._current_score[task] = self._past_score[task] = score
        self._current_score[task] += self._rates[0] * (score - self._current_score[task])
        self._past_score[task] += self._rates[1] * (score - self._past_score[task])
        self._counts[task] += 1
