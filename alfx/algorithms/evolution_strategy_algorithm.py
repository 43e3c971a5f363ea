"""Evolution strategies: a policy learns from the returns of perturbed copies of itself, without backpropagation.

Three strategies: OpenAI's (Salimans et al. 2017, arXiv:1703.03864), augmented random search (Mania et al. 2018,
arXiv:1803.07055) and separable natural evolution strategies (Wierstra et al. 2014, arXiv:1106.4487). An iteration is a
generation: each member of the population plays its episodes, several at once in the batch of environments
(:mod:`alfx.algorithms.evolution.population`), then the parameters are updated
(:mod:`alfx.algorithms.evolution.evolution`). The parameters of the policy are the mean of the population; they are
evaluated, played and saved. In distributed training the processes share the members and exchange only returns: each
process samples the noise of all members from the same seed. Statistics that normalize observations are frozen during a
generation, so that its members differ only in their parameters, and are updated with its steps afterwards.
"""
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from alfx import context, nest, summary
from alfx.algorithms.evolution import evolution
from alfx.algorithms.evolution.population import play_population
from alfx.algorithms.on_policy_algorithm import OnPolicyAlgorithm
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, Experience, LossInfo, TimeStep, namedtuple
from alfx.gin_utils import (ConfError, Count, Fraction, NonNegative, Positive, Range, check_value, configurable,
                            problem_at)
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.param_networks import StackedParameters
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils import dist_utils
from alfx.utils.running_stats import updated_at_the_end
from alfx.utils.schedulers import as_scheduler

EvolutionInfo = namedtuple('EvolutionInfo', ['action_distribution', 'returns'], default_value=())
"""``returns`` ``[N]`` of the members of a generation, or ``action_distribution`` of the policy in a step."""



@configurable
class EvolutionStrategyAlgorithm(OnPolicyAlgorithm):
    """Policy whose parameters move towards the members of a population with high returns.

    ``TrainerConfig.unroll_length`` has no effect: an iteration is as long as the episodes of a generation.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: nest of ``BoundedTensorSpec``.
        reward_spec: spec of rank 0, or of rank 1 for a K-dimensional reward; returns are then sums weighted by
            ``reward_weights``.
        actor_network_ctor: called as ``(input_tensor_spec=, action_spec=)``; creates a network that outputs actions, or
            distributions, whose most likely action is taken.
        num_agents: number N of members of the population; even with ``antithetic``.
        sigma: standard deviation of the members' parameters, a number or a scheduler. For 'snes' the initial value.
        num_episodes: number of episodes of each member in a generation, whose returns are averaged.
        strategy: 'openai', 'ars' (with the fitness of its paper; needs ``antithetic``) or 'snes', which learns a
            separate standard deviation for each parameter.
        fitness_shaping: for 'openai', transformation of the returns: 'centered_rank', 'standardized' or 'raw'.
        antithetic: sample members in pairs, on opposite sides of the mean.
        num_best: for 'ars', number of directions used; ``None``: all.
        sigma_learning_rate: learning rate of sigma for 'snes'; ``None``: ``(3 + log D) / (5 sqrt D)`` for D parameters.
        weight_decay: this fraction of the parameters is subtracted from the gradient.
        is_stochastic: members sample their actions from the distributions.
        reward_weights: K weights of the reward dimensions; ``None``: all 1.
        epsilon_greedy: in evaluation, the probability of sampling an action instead of taking the most likely one;
            ``None``: ``config.epsilon_greedy``, or 0 without a config.
        env: batched environment, for the root algorithm.
        config: configuration, for the root algorithm.
        optimizer: updates all parameters by the estimated gradient. The papers of 'snes' and 'ars' use ``SGD``,
            for 'snes' with learning rate 1.
        checkpoint: as in ``Algorithm``.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        ConfError: an argument is out of range or contradicts another.
    """

    updates_are_traceable = False

    _seed: Tensor
    _generation: Tensor
    _log_sigma: Tensor

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: NestedTensorSpec,
                 reward_spec: TensorSpec = TensorSpec(()),
                 actor_network_ctor: Callable[..., Any] = ActorDistributionNetwork,
                 num_agents: Annotated[int, Range(minimum=2)] = 30, sigma: Positive | Callable[[], float] = 0.1,
                 num_episodes: Count = 1, strategy: Literal['openai', 'ars', 'snes'] = 'openai',
                 fitness_shaping: Literal['centered_rank', 'standardized', 'raw'] = 'centered_rank',
                 antithetic: bool = True, num_best: int | None = None, sigma_learning_rate: Positive | None = None,
                 weight_decay: NonNegative = 0.0, is_stochastic: bool = False,
                 reward_weights: list[float] | None = None, epsilon_greedy: Fraction | None = None, env: Any = None,
                 config: TrainerConfig | None = None, optimizer: Any = None, checkpoint: str | None = None,
                 debug_summaries: bool = False, name: str = 'EvolutionStrategyAlgorithm'):
        network = actor_network_ctor(input_tensor_spec=observation_spec, action_spec=action_spec)
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, reward_spec=reward_spec,
                         train_state_spec=network.state_spec, reward_weights=reward_weights, env=env, config=config,
                         optimizer=optimizer, checkpoint=checkpoint, debug_summaries=debug_summaries, name=name)
        self._check_arguments(num_agents, strategy, fitness_shaping, antithetic, num_best, sigma_learning_rate)
        self.set_epsilon_greedy(epsilon_greedy)
        self._actor_network = network
        self._members = [StackedParameters(network, 1)]  # in a list to keep it out of checkpoints
        self._num_agents, self._num_episodes = num_agents, num_episodes
        self._strategy, self._antithetic = strategy, antithetic
        self._fitness = evolution.FITNESS[fitness_shaping]
        self._num_best = num_best or num_agents // 2
        self._weight_decay, self._is_stochastic = weight_decay, is_stochastic
        self._sigma = as_scheduler(sigma)
        size = self._members[0].param_length
        self._sigma_rate = evolution.default_sigma_rate(size) if sigma_learning_rate is None else sigma_learning_rate
        self.register_buffer('_seed', torch.randint(2**31, ()))
        self.register_buffer('_generation', torch.zeros((), dtype=torch.int64))
        self.register_buffer('_log_sigma', torch.full((size, ), float(self._sigma())).log() if strategy == 'snes'
                             else torch.zeros(0))

    @classmethod
    def _check_arguments(cls, num_agents: int, strategy: str, fitness_shaping: str, antithetic: bool,
                         num_best: int | None, sigma_learning_rate: float | None) -> None:
        check_value(cls.__name__, 'num_best', num_best, int, minimum=1, maximum=num_agents // 2, optional=True)
        wrong = [(num_best is not None and strategy != 'ars', 'num_best', "has an effect only with strategy = 'ars'"),
                 (sigma_learning_rate is not None and strategy != 'snes', 'sigma_learning_rate',
                  "has an effect only with strategy = 'snes'"),
                 (fitness_shaping != 'centered_rank' and strategy != 'openai', 'fitness_shaping',
                  "has an effect only with strategy = 'openai'"),
                 (strategy == 'ars' and not antithetic, 'antithetic', "= False is not supported with strategy = 'ars'"),
                 (antithetic and num_agents % 2 > 0, 'num_agents', f'= {num_agents} is odd, but members come in pairs')]
        problems = [problem_at(cls.__name__, field, message, 'change one of the two')
                    for is_wrong, field, message in wrong if is_wrong]
        if problems:
            raise ConfError(problems)

    supports_action_mask = True

    def check_config(self, config: TrainerConfig) -> None:
        """Reject settings that evolution strategies do not support.

        Raises:
            ConfError: other processes would act, the members cannot be distributed evenly over the processes, or
                rewards are transformed.
        """
        super().check_config(config)
        field = config.async_actor_field
        if field:
            raise ConfError([problem_at('TrainerConfig', field, f'= {getattr(config, field)!r} '
                                        f'is not supported by {self._name}, because its members act in this process',
                                        'remove it, and train in several processes: --num_processes 2')])
        changes_rewards = [type(t).__name__ for t in getattr(config.data_transformer, 'modules', tuple)()
                           if getattr(t, 'changes_rewards', False)]
        if changes_rewards:
            raise ConfError([problem_at('TrainerConfig', 'data_transformer_ctor', f'has {changes_rewards[0]}, but '
                                        f'{self._name} maximizes the returns of the environment', 'remove it: the '
                                        "scale of returns has no effect, unless fitness_shaping = 'raw'")])
        if self._num_agents % context.num_ranks():
            raise ConfError([problem_at(type(self).__name__, 'num_agents', f'= {self._num_agents} members cannot be '
                                        f'distributed evenly over {context.num_ranks()} processes', 'make it a '
                                        'multiple of the number of processes')])

    # Acting ----------------------------------------------------------------------------------------------------

    def predict_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Return the action of the mean of the population, or a sampled one with probability ``epsilon_greedy``."""
        output, state = self._actor_network(inputs.observation, state)
        if not _has_distributions(output):
            return AlgStep(output, state, EvolutionInfo())
        output = dist_utils.mask_actions(output, inputs.action_mask)
        return AlgStep(dist_utils.epsilon_greedy_sample(output, self._epsilon_greedy), state,
                       EvolutionInfo(action_distribution=output))

    def rollout_step(self, inputs: TimeStep, state: NestedTensor) -> AlgStep:
        """Call :meth:`predict_step`; used only outside of a generation."""
        return self.predict_step(inputs, state)

    def _act(self, members: Tensor, inputs: TimeStep, state: NestedTensor, policy: Tensor
             ) -> tuple[NestedTensor, NestedTensor]:
        """Return actions in the environments ``[B]`` of the members ``[N + 1, D]``, of which the last one is the
        mean."""
        network = self._members[0]
        if self._acting is None or not torch.equal(policy, self._acting):
            network.set_parameters(members[policy])
            self._acting = policy
        one = nest.map_structure(lambda x: x.unsqueeze(0), (inputs.observation, state))
        output, state = nest.map_structure(lambda x: x.squeeze(0), network(*one))
        if not _has_distributions(output):
            return output, state
        output = dist_utils.mask_actions(output, inputs.action_mask)
        if self._is_stochastic:
            return dist_utils.sample_action_distribution(output), state
        return nest.map_structure(dist_utils.get_mode, output, is_leaf=nest.is_distribution), state

    _acting: Tensor | None = None  # policies whose parameters the network currently has

    # A generation ----------------------------------------------------------------------------------------------

    def noise(self) -> Tensor:
        """Sample the noise of this generation, float32 ``[N, D]``, the same in all processes; pairs are ``i, i + N /
        2``."""
        generator = torch.Generator().manual_seed((int(self._seed) * 1_000_003 + int(self._generation)) % 2**63)
        count = self._num_agents // 2 if self._antithetic else self._num_agents
        noise = torch.randn(count, self._members[0].param_length, generator=generator).to(self.device)
        return torch.cat((noise, -noise)) if self._antithetic else noise

    def sigma(self) -> Tensor:
        """Return the standard deviation of the parameters, ``[]`` or for 'snes' ``[D]``."""
        return self._log_sigma.exp() if self._strategy == 'snes' else torch.as_tensor(self._sigma(), device=self.device)

    def unroll(self, unroll_length: int) -> Experience:
        """Play a generation.

        Args:
            unroll_length: not used.

        Returns:
            Experience with the returns ``[N]`` of all members as info.
        """
        with torch.no_grad():
            mean, noise = self._mean(), self.noise()
            ranks = context.get_ranks()
            own = slice(None) if ranks is None else slice(ranks.rank, None, ranks.size)
            members = torch.cat((mean + self.sigma() * noise, mean.unsqueeze(0)))
            members, self._acting = torch.cat((members[:-1][own], members[-1:])), None
            count = len(members) - 1
            steps: list[TimeStep] = []
            initial_state = self.get_initial_rollout_state(self._env.batch_size)
            with updated_at_the_end():
                played = play_population(partial(self._act, members), self, self._env, count, self._num_episodes,
                                         initial_state, lambda step: steps.append(TimeStep(
                                             step_type=step.step_type, reward=step.reward, discount=step.discount,
                                             env_info=step.env_info)))
            self.observe_unroll(nest.stack(steps))
            returns = played.returns.to(self.device)
            if self._reward_weights is not None:
                returns = returns @ self._reward_weights
            # members are interleaved over ranks
            returns = context.cat_over_ranks(returns.mean(1).unsqueeze(1), 1).flatten()
        return Experience(rollout_info=EvolutionInfo(returns=returns))

    def train_from_unroll(self, experience: Experience, train_info: NestedTensor) -> int:
        """Update the mean of the population, and for 'snes' its standard deviations.

        Returns:
            The number of members.
        """
        with torch.no_grad():
            returns, noise, sigma = experience.rollout_info.returns, self.noise(), self.sigma()
            ascent = self._ascent(returns, noise, sigma)
            mean = self._mean()
            self._step(self._weight_decay * mean - ascent)
            self._generation += 1
            if context.should_record_summaries():
                self._summarize(returns, ascent, mean)
        return self._num_agents

    def _ascent(self, returns: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
        """Return the direction ``[D]`` in which to move the mean."""
        if self._strategy == 'ars':
            return evolution.augmented_random_search(returns.view(2, -1), noise[:len(noise) // 2], self._num_best)
        if self._strategy == 'openai':
            return evolution.gradient_estimate(self._fitness(returns), noise, float(sigma))
        utility = evolution.utilities(returns)
        self._log_sigma += 0.5 * self._sigma_rate * (utility @ (noise.square() - 1))
        return sigma * (utility @ noise)

    def _mean(self) -> Tensor:
        """Return the parameters ``[D]`` of the policy."""
        return parameters_to_vector(self._actor_network.parameters()).detach()

    def _step(self, gradient: Tensor) -> None:
        """Take an optimizer step against ``gradient`` ``[D]``."""
        start, optimizers = 0, self.optimized_parameters()[0]
        for param in self._actor_network.parameters():
            param.grad = gradient[start:start + param.numel()].view_as(param).clone()
            start += param.numel()
        for optimizer in optimizers:
            optimizer.step()

    def calc_loss(self, info: Any) -> LossInfo:
        """Raise an error: returns are maximized, there is no loss.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f'{self._name} has no loss')

    def _summarize(self, returns: Tensor, ascent: Tensor, mean: Tensor) -> None:
        with summary.scope('es'):
            for what, value in (('fitness_mean', returns.mean()), ('fitness_max', returns.max()),
                                ('fitness_min', returns.min()), ('gradient_norm', ascent.norm()),
                                ('parameter_norm', mean.norm()), ('sigma', self.sigma().mean())):
                summary.scalar(what, value)


def _has_distributions(output: Any) -> bool:
    return any(nest.is_distribution(leaf) for leaf in nest.flatten(output, nest.is_distribution))
