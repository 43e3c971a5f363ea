"""PPO+D: proximal policy optimization with demonstrations (Libardi et al. 2021, "Guided exploration with proximal
policy optimization using a single demonstration", arXiv:2007.03328).

This algorithm is for rewards so rare that exploration does not find them. It trains on demonstrated episodes in
addition to collected ones, as if the policy had chosen the demonstrated actions with probability 1 (section 3.1). Two
pools of episodes are replayed. The first pool holds episodes with reward: initially the demonstrations, later also
collected episodes with a return of at least ``reward_threshold``. The second pool holds other collected episodes, those
in which the value function predicts the highest values, so that the policy does not forget the way to the next reward.
rho and phi are the shares of the pools in all episodes; each collected success moves some of phi to rho.

Difference from the paper: there, an environment that is reset may continue with a replayed instead of a new episode.
Here ``B (rho + phi) / (1 - rho - phi)`` additional columns next to those of the B environments replay one episode after
another. The mixture is the same, and no environment waits.
"""
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from alfx import nest, summary
from alfx.algorithms.ppo_algorithm import PPOAlgorithm
from alfx.config import TrainerConfig
from alfx.data_structures import BatchInfo, Experience, TimeStep
from alfx.gin_utils import ConfError, Count, NonNegative, Range, configurable, problem_at, takes_arguments_of
from alfx.offline.demonstration_folders import DemonstrationFolders, demonstrations_in
from alfx.offline.demonstrations import dataset_names
from alfx.offline.pools import EpisodeTracker, Pools, Slots
from alfx.tensor_specs import TensorSpec

_Share = Annotated[float, Range(0, below=1)]


@configurable
class PpodAlgorithm(PPOAlgorithm):
    """PPO with two pools of replayed episodes; see the module docstring.

    Args:
        reward_spec: rank 0.
        demonstrations: datasets with demonstrations, as in ``TrainerConfig.offline_buffer_dir``.
        rho: initial share of episodes with reward among all training episodes.
        phi: initial share of collected episodes without reward; ``rho + phi`` is below 1.
        alpha: episodes without reward are sampled in proportion to the power ``alpha`` of their highest value.
        capacity: number of episodes in both pools; demonstrations are never dropped.
        reward_threshold: a collected episode with at least this return counts as an episode with reward; ``None``: the
            lowest return of a demonstration.
        supplementary_demos_dir: folder to which datasets can be added during training. The episodes of a new dataset
            are added to the pools like collected ones.
        target_agent_demos_dir: dataset that is written during training: the collected episodes with reward that have
            the highest returns. It can be used as ``demonstrations`` of another run.
        num_agent_demos_to_save: number of episodes in that dataset.
        save_demos_every: number of unrolls between two writes of that dataset.
        kwargs: arguments of :class:`~alfx.algorithms.ppo_algorithm.PPOAlgorithm`; its networks are not recurrent.

    Raises:
        ConfError: there are no demonstrations, a share is out of range, the reward is multi-dimensional, or a network
            is recurrent.
    """

    @takes_arguments_of(PPOAlgorithm, defaults={'name': 'PpodAlgorithm'}, after={'demonstrations': 'reward_spec'})
    def __init__(self, reward_spec: TensorSpec, demonstrations: str | Sequence[str] = (), rho: _Share = 0.1,
                 phi: _Share = 0.3, alpha: NonNegative = 10.0, capacity: Count = 51,
                 reward_threshold: float | None = None, supplementary_demos_dir: str | None = None,
                 target_agent_demos_dir: str | None = None, num_agent_demos_to_save: Count = 10,
                 save_demos_every: Count = 10, **kwargs: Any):
        super().__init__(reward_spec=reward_spec, **kwargs)
        owner = type(self).__name__
        self._demonstrations = dataset_names(demonstrations, owner)
        if not 0 < rho + phi < 1:
            raise ConfError([problem_at(owner, 'rho', f'= {rho} with phi = {phi}: expected shares whose sum is above 0 '
                                        'and below 1', 'leave them out')])
        if reward_spec.ndim:
            raise ConfError([problem_at(owner, 'demonstrations', 'are ranked by one return, but the reward has '
                                        f'{reward_spec.numel} dimensions', 'use PPOAlgorithm')])
        if nest.flatten(self.train_state_spec):
            raise ConfError([problem_at(owner, 'actor_network_ctor', 'or value_network_ctor creates a recurrent '
                                        'network, whose states demonstrations do not contain',
                                        'choose networks that are not recurrent')])
        self._rho_and_phi, self._alpha, self._capacity, self._threshold = (rho, phi), alpha, capacity, reward_threshold
        self._folders = DemonstrationFolders(owner, supplementary_demos_dir, target_agent_demos_dir,
                                             num_agent_demos_to_save, save_demos_every)
        self._pools: Pools | None = None
        self._slots: Slots | None = None
        self._tracker: EpisodeTracker | None = None
        self._num_replayed = 0  # replayed columns at the end of the batch
        self._state_to_load: dict[str, Any] | None = None

    def check_config(self, config: TrainerConfig) -> None:
        """Reject configurations that do not train on whole unrolls.

        Raises:
            ConfError: training would sample from a replay buffer.
        """
        super().check_config(config)
        if not config.trains_on_whole_unrolls:
            raise ConfError([problem_at('TrainerConfig', 'whole_replay_buffer_training', 'and clear_replay_buffer must '
                                        f'be True for {self._name}, which trains on unrolls', 'set them to True')])

    def get_extra_state(self) -> dict[str, Any]:
        """Return the extra state with the collected episodes of the pools and the positions of unfinished episodes."""
        own = self._state_to_load
        if self._pools is not None:
            own = {**self._pools.state(), 'folders': self._folders.state()}
            if self._slots is not None and self._tracker is not None:
                own |= {'slots': self._slots.state(), 'under_way': self._tracker.state()}
        return super().get_extra_state() if own is None else {**super().get_extra_state(), 'demonstrations': own}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the state of :meth:`get_extra_state`."""
        super().set_extra_state(state)
        self._state_to_load, self._slots, self._tracker = state.get('demonstrations'), None, None
        if self._pools is not None:
            self._load(self._pools)

    def _load(self, pools: Pools) -> None:
        state = self._state_to_load
        if state is None:
            return
        pools.load(state)
        if 'folders' in state:  # checkpoints of earlier versions have none
            self._folders.load(state['folders'])
        if 'slots' in state:
            self._slots = Slots(pools, 0, state['slots'])
            self._tracker = EpisodeTracker(len(state['under_way']['parts']))
            self._tracker.load(state['under_way'], pools.steps)

    def prepare(self, root: Any) -> None:
        """Read the demonstrations.

        Raises:
            ConfError: a dataset is missing or does not match, or a data transformer stacks observations.
        """
        env, transformer = root.environment, root.data_transformer
        if transformer is not None and transformer.stack_size > 1:
            raise ConfError([problem_at('TrainerConfig', 'data_transformer_ctor', 'stacks the observations of several '
                                        f'steps, but the demonstrations of {self._name} hold single observations',
                                        'stack them in the environment')])
        self._folders.check()
        given = demonstrations_in(self._demonstrations, env, is_given=True)
        self._pools = Pools(given, *self._rho_and_phi, self._alpha, self._capacity, self._threshold)
        self._load(self._pools)

    @torch.no_grad()
    def demonstration_batch(self, root: Any, collected: Experience, transformed: Experience) -> Experience:
        """Return the steps of replayed episodes ``[S, T, ...]``, after adding collected episodes to the pools."""
        own, (batch, length) = (_kept(collected.time_step), collected.action), collected.step_type.shape
        if self._pools is None:  # this algorithm is the root, whose prepare is not called by a parent
            self.prepare(root)
        assert self._pools is not None
        if self._slots is None or self._tracker is None or self._tracker.count != batch:
            share = sum(self._rho_and_phi)
            self._slots = Slots(self._pools, max(1, round(batch * share / (1 - share))))
            self._tracker = EpisodeTracker(batch)
        pools, slots, tracker = self._pools, self._slots, self._tracker
        values = self._values(transformed.time_step)
        for episode in tracker.add(nest.map_structure(lambda x: x[:, :-1].cpu(), own), values[:, :-1].cpu()):
            pools.add(episode)  # the last column is dropped: the next unroll starts with it
        for episode in self._folders.new_episodes(root.environment):
            pools.add(episode)
        self._folders.save_best(pools, root.environment)
        time_step, action = slots.next_steps(length)
        count = len(time_step.step_type)
        template = nest.map_structure(lambda x: x.new_zeros(count, *x.shape[1:]), collected)
        replayed = template._replace(action=action, time_step=template.time_step._replace(
            **{name: x for name, x in time_step._asdict().items() if nest.flatten(x)}))
        replayed = root.transform_batch(replayed, BatchInfo(), ())
        slots.note_values(self._values(replayed.time_step).cpu())
        self._num_replayed = count
        for name, value in (('reward', len(pools.with_reward)), ('value', len(pools.with_value)), ('rho', pools.rho),
                            ('phi', pools.phi)):
            summary.scalar(f'{self._name}/demonstrations/{name}', value)
        return replayed._replace(rollout_info=self._info_of_replay(root, replayed, transformed.rollout_info))

    def _info_of_replay(self, root: Any, replayed: Experience, collected: Any) -> Any:
        """Compute the rollout info of replayed steps, in the structure of the infos ``collected`` by ``root``."""
        shape = replayed.step_type.shape
        rows = nest.map_structure(lambda x: x.flatten(0, 1), replayed.time_step)
        info = self.collect_step(rows, self._no_state).info
        info = nest.map_structure(lambda x: x.unflatten(0, shape), info)._replace(action=replayed.action)
        if root is not self:
            others = [name for name in collected._fields if name != 'rl' and nest.flatten(getattr(collected, name))]
            if others:
                raise ConfError([problem_at('Agent', 'rl_algorithm_cls', f'= @{type(self).__name__} cannot be combined '
                                            f'with parts that store an info of each step; found {", ".join(others)}',
                                            'leave that part out')])
            info = collected._replace(rl=info)
        return info

    def preprocess_experience(self, root_inputs: TimeStep, rollout_info: Any,
                              batch_info: BatchInfo) -> tuple[TimeStep, Any]:
        """Preprocess as in PPO, with probability 1 for replayed actions."""
        if self._pools is None:  # only an agent passes on the calls that read and replay the demonstrations
            raise ConfError([problem_at(type(self).__name__, 'demonstrations', 'are not replayed inside of another '
                                        'algorithm', 'make it Agent.rl_algorithm_cls or TrainerConfig.algorithm_ctor')])
        root_inputs, info = super().preprocess_experience(root_inputs, rollout_info, batch_info)
        if self._num_replayed:
            log_prob: Tensor = info.rollout_log_prob.clone()
            log_prob[-self._num_replayed:] = 0.0
            info = info._replace(rollout_log_prob=log_prob)
        return root_inputs, info


def _kept(time_step: TimeStep) -> TimeStep:
    """Return a time step with only the fields that a demonstration contains."""
    return TimeStep(step_type=time_step.step_type, reward=time_step.reward, discount=time_step.discount,
                    observation=time_step.observation, prev_action=time_step.prev_action)
