"""Learner of the MuZero model; documented as part of :mod:`alfx.algorithms.muzero_representation_learner`.

:mod:`alfx.algorithms.muzero.targets` computes the targets of the model.
"""
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from alfx import context, nest
from alfx.algorithms.base.traceable_layers import is_traceable
from alfx.algorithms.data_transformer import DataTransformer, create_data_transformer
from alfx.algorithms.mcts_models import MCTSModel, ModelOutput, ModelState
from alfx.algorithms.muzero import argument_checks
from alfx.algorithms.muzero.expressions import function_from_text
from alfx.algorithms.muzero.model_targets import HeldSteps
from alfx.algorithms.muzero.reanalysis import Reanalyzer, inference, search_observation_spec, time_steps_at
from alfx.algorithms.muzero.targets import TargetMaker, TargetSettings
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.config import TrainerConfig
from alfx.data_structures import AlgStep, BatchInfo, LossInfo, TimeStep, namedtuple
from alfx.engine.capabilities import Capabilities
from alfx.gin_utils import Count, Fraction, Positive, Range, configurable
from alfx.tensor_specs import BoundedTensorSpec, NestedTensor, NestedTensorSpec, TensorSpec
from alfx.utils.target_updater import TargetUpdater

_DOCUMENTED = 'alfx.algorithms.muzero_representation_learner'
_MOST_STEPS = 10_000  # larger numbers take hours or all memory for one update

MuzeroInfo = namedtuple('MuzeroInfo', ['action', 'value', 'target', 'loss'], default_value=())
"""Training data of a step, ``[B, ...]``: ``action``, the actions of the R following steps, nest ``[B, R, ...]``;
``value``, the value found by a search when the step was stored, if there was one; ``target``, a ``ModelTarget`` of
``[B, R + 1, ...]``. After ``train_step`` only the ``loss`` is set, a ``LossInfo``."""


@configurable(module=_DOCUMENTED)
class LinearTdStepFunc:
    """Number of bootstrap steps that decreases with the age of a sample (Ye et al. 2021, arXiv:2111.00210, sec. 4.3).

    It decreases linearly from the maximum at age 0 to ``min_td_steps`` at ``max_bootstrap_age``, rounded.

    Args:
        max_bootstrap_age: positive, as a fraction of the training; older samples use ``min_td_steps``. With a value
            above 1, no sample reaches this age.
        min_td_steps: at least 1.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, max_bootstrap_age: Positive, min_td_steps: Count = 1):
        self._max_bootstrap_age, self._min_td_steps = max_bootstrap_age, min_td_steps

    def __call__(self, sample_age: Tensor, max_td_steps: int, current_max_age: float) -> Tensor:
        """Return the numbers of steps.

        Args:
            sample_age: float ``[B]``, in [0, 1].
            max_td_steps: number of steps at age 0.
            current_max_age: age of the oldest possible sample.

        Returns:
            Numbers of steps, int64 ``[B]``.
        """
        del current_max_age  # ages are fractions of the whole training, not of the part that is over
        fewest = min(self._min_td_steps, max_td_steps)
        share = (sample_age / self._max_bootstrap_age).clamp(0.0, 1.0)
        return (max_td_steps - (max_td_steps - fewest) * share).round().long()


@configurable(module=_DOCUMENTED)
class MuzeroRepresentationImpl(OffPolicyAlgorithm):
    """Learner that trains a model by unrolling it over stored steps.

    The replay buffer holds the rewards of the environment; only ``reward_transformer`` changes them.

    Args:
        observation_spec: nest of specs of the observation.
        action_spec: bounded spec of one action.
        model_ctor: creates an ``MCTSModel``; called with the arguments that it accepts of ``(observation_spec=,
            action_spec=, debug_summaries=)``, and with ``num_unroll_steps`` if it requires this argument and neither
            the conf nor a partial sets it.
        num_unroll_steps: R, the same as in the model.
        td_steps: n of the n-step values that are bootstrapped from stored values; -1: up to the end of the episode. No
            effect with ``reanalyze_ratio = 1``.
        discount: discount factor of the rewards.
        reward_spec: rank 0, or rank 1 for K rewards, which are summed with their weights.
        recurrent_gradient_scaling_factor: factor of the gradient of a latent state at the input of the dynamics.
        reward_transformer: called with rewards of any batch shape.
        calculate_priority: add priorities to the loss; ``None``: ``TrainerConfig.priority_replay``.
        train_reward_function: the same as in the model. Without it all rewards are treated as 0 except at the last step
            of an episode, and this reward is the value of steps at and after the end.
        train_game_over_function: the same as in the model.
        train_repr_prediction: the same as in the model.
        train_policy: the same as in the model; the search needs a policy.
        reanalyze_algorithm_ctor: creates the algorithm that reanalyzes, called with the arguments that it accepts of
            ``(observation_spec=, action_spec=, discount=, debug_summaries=, name=)``; only used if ``reanalyze_ratio >
            0``. An ``MCTSAlgorithm`` receives the latent state as observation, and a slowly updated copy of the model.
            Any other algorithm with an argument 'model' also receives the copy. Other algorithms receive the
            observations of the environment, unlike in ALF, because they are not trained here, but loaded from their
            ``checkpoint``.
        reanalyze_ratio: share of each batch whose values and policies are reanalyzed.
        reanalyze_td_steps: n of the values of that share; -1 is not supported.
        reanalyze_td_steps_func: called as ``(sample_age, reanalyze_td_steps, current_max_age)``, returns n for each
            sample, from 1 to ``reanalyze_td_steps``; ages ``[B]`` are fractions of the training.
        reanalyze_batch_size: number of steps reanalyzed at once; ``None``: all steps of a batch.
        full_reanalyze: bootstrap from values found by search instead of values predicted by the model.
        priority_func: called with the ``LossInfo`` ``[T, B]``, returns priorities ``[B]``. A string is interpreted by
            :mod:`alfx.algorithms.muzero.expressions`, which supports only arithmetic.
        data_transformer_ctor: creates the data transformer of the training data; ``None``: the transformer of the run.
        data_augmenter: called with training observations, ``[B, T, ...]``, or ``[B, T * (R + 1), ...]`` with
            ``train_repr_prediction``.
        target_update_tau: fraction by which each update of the copy moves it towards the model; 1 copies the model.
        target_update_period: number of updates between two updates of the copy.
        config: configuration of the run.
        enable_amp: on a GPU, evaluate and reanalyze in 16 bits.
        random_action_after_episode_end: unroll with random actions after the end, instead of the last action.
        optimizer: optimizes the parameters of the model.
        checkpoint: as in ``Algorithm``.
        debug_summaries: write more summaries.
        name: name of this algorithm.

    Raises:
        ConfError: a data transformer changes data that has to be looked up unchanged.
        ValueError: an argument is out of range or disagrees with the model.
    """

    def __init__(self, observation_spec: NestedTensorSpec, action_spec: BoundedTensorSpec,
                 model_ctor: Callable[..., MCTSModel], num_unroll_steps: Annotated[int, Range(0, _MOST_STEPS)],
                 td_steps: Annotated[int, Range(-1, _MOST_STEPS)], discount: Fraction,
                 reward_spec: TensorSpec = TensorSpec(()), recurrent_gradient_scaling_factor: Fraction = 0.5,
                 reward_transformer: Callable[[Tensor], Tensor] | None = None, calculate_priority: bool | None = None,
                 train_reward_function: bool = True, train_game_over_function: bool = True,
                 train_repr_prediction: bool = False, train_policy: bool = True,
                 reanalyze_algorithm_ctor: Callable[..., Any] | None = None, reanalyze_ratio: Fraction = 0.0,
                 reanalyze_td_steps: Annotated[int, Range(1, _MOST_STEPS)] = 5,
                 reanalyze_td_steps_func: Callable[..., Tensor] | None = None,
                 reanalyze_batch_size: Count | None = None, full_reanalyze: bool = False,
                 priority_func: Callable[[LossInfo], Tensor] |
                 str = "lambda loss_info: loss_info.extra['value'].sqrt().sum(dim=0)",
                 data_transformer_ctor: Callable[..., Any] | Sequence[Callable[..., Any]] | None = None,
                 data_augmenter: Callable[[NestedTensor], NestedTensor] | None = None,
                 target_update_tau: Fraction = 1.0, target_update_period: Count = 1000,
                 config: TrainerConfig | None = None, enable_amp: bool = True,
                 random_action_after_episode_end: bool = False, optimizer: Any = None, checkpoint: str | None = None,
                 debug_summaries: bool = False, name: str = 'MuzeroRepresentationImpl'):
        if td_steps == 0:
            raise ValueError(f'{name}.td_steps: expected at least 1, or -1, found 0')
        settings = TargetSettings(num_unroll_steps, discount, self._scalar_reward, train_reward_function, td_steps,
                                  reanalyze_ratio, reanalyze_td_steps, reanalyze_td_steps_func, full_reanalyze)
        argument_checks.check_reanalysis(name, settings, reanalyze_algorithm_ctor)
        super().__init__(observation_spec=observation_spec, action_spec=action_spec, train_state_spec=(),
                         reward_spec=reward_spec, config=config, optimizer=optimizer, checkpoint=checkpoint,
                         debug_summaries=debug_summaries, name=name)
        make_model = functools.partial(_make_model, model_ctor, num_unroll_steps, observation_spec=observation_spec,
                                       action_spec=action_spec, debug_summaries=debug_summaries)
        self._model = make_model()
        trains = dict(train_reward_function=train_reward_function, train_game_over_function=train_game_over_function,
                      train_repr_prediction=train_repr_prediction, train_policy=train_policy)
        argument_checks.check_model(name, self._model, num_unroll_steps, trains)
        self._settings, self._trains = settings, trains
        self._gradient_scale = recurrent_gradient_scaling_factor
        self._reward_transformer = reward_transformer
        if isinstance(priority_func, str):
            priority_func = function_from_text(priority_func, f'{name}.priority_func')
        if calculate_priority is None:
            calculate_priority = config is not None and config.priority_replay
        self._priority_func = priority_func if calculate_priority else None
        self._own_transformer: DataTransformer | None = None
        if data_transformer_ctor is not None:
            self._own_transformer = create_data_transformer(data_transformer_ctor, context.get_raw_observation_spec())
        self._data_augmenter = data_augmenter
        self._random_action_after_episode_end = random_action_after_episode_end
        self._enable_amp = enable_amp
        self._reanalyze_batch_size = reanalyze_batch_size
        self._has_searched = False
        self._saved_replay: Any = None
        self._target_maker: TargetMaker | None = None
        self._reanalyze_algorithm: Any = None
        self._target_model: Any = None
        self._update_target_model: TargetUpdater | None = None
        if reanalyze_algorithm_ctor is not None and reanalyze_ratio:
            self._make_reanalyze_algorithm(reanalyze_algorithm_ctor, make_model)
        if self._target_model is not None:
            self._update_target_model = TargetUpdater(self._model, self._target_model, target_update_tau,
                                                      target_update_period)

    def _make_reanalyze_algorithm(self, ctor: Callable[..., Any], make_model: Callable[[], Any]) -> None:
        made: Any = inspect.unwrap(ctor.func if isinstance(ctor, functools.partial) else ctor)
        if not inspect.isclass(made):
            made = inspect.get_annotations(made, eval_str=True).get('return')
        spec = self._observation_spec
        if hasattr(made, 'set_model'):
            spec = search_observation_spec(self._model, spec)
        arguments: dict[str, Any] = dict(observation_spec=spec, action_spec=self._action_spec,
                                         discount=self._settings.discount, debug_summaries=self._debug_summaries,
                                         name=f'{self._name}.reanalyze')
        if 'model' in inspect.signature(ctor).parameters:
            arguments['model'] = self._target_model = make_model()
        self._reanalyze_algorithm = ctor(**_accepted(ctor, arguments))
        if hasattr(self._reanalyze_algorithm, 'set_model'):
            if self._target_model is None:
                self._target_model = make_model()
            self._reanalyze_algorithm.set_model(self._target_model)  # owned by this algorithm only

    # Properties and configuration ------------------------------------------------------------------------------

    @property
    def model(self) -> MCTSModel:
        """Learned model."""
        return self._model

    @property
    def output_spec(self) -> NestedTensorSpec:
        """Spec of the representation."""
        return self._model.repr_spec

    @property
    def data_transformer(self) -> Any:
        """Data transformer of this learner, or of the run."""
        return super().data_transformer if self._own_transformer is None else self._own_transformer

    def track_search(self) -> None:
        """Expect stored steps to contain the infos and states of a search, at :attr:`path`."""
        self._has_searched = True

    def own_capabilities(self) -> Capabilities:
        """Return the capabilities; updates are traceable unless a layer draws random numbers or keeps statistics."""
        return super().own_capabilities()._replace(traceable_update=is_traceable(self), trains_sequences_at_once=True)

    def _capabilities_of_parts(self) -> dict[Any, Capabilities]:
        """Return no parts, because the algorithm that reanalyzes takes no part in an update."""
        return {}

    def _trainable_attributes_to_ignore(self) -> list[str]:
        return ['_target_model', '_reanalyze_algorithm']

    def check_config(self, config: TrainerConfig) -> None:
        """Reject a run in which the targets cannot be looked up in the replay buffer.

        Raises:
            ConfError: names the setting to change.
        """
        transformer = self.data_transformer
        argument_checks.check_transformer(self._name, transformer, self._own_transformer is not None,
                                          self._has_searched)
        argument_checks.check_stored(self._settings, self._trains['train_policy'], self._has_searched,
                                     self._stores_states,
                            self._reanalyze_algorithm)
        looks_up = self._reanalyze_algorithm is not None or self._trains['train_repr_prediction']
        if looks_up and transformer is not None:
            argument_checks.check_observations(self._name, transformer.transformed_observation_spec,
                                               self._observation_spec)

    @property
    def _stores_states(self) -> bool:
        return self._has_searched and self.use_rollout_state

    # Steps -----------------------------------------------------------------------------------------------------

    def predict_step(self, time_step: TimeStep, state: NestedTensor) -> AlgStep:
        """Return the representation ``[B, ...]``."""
        with inference(self._model, self._enable_amp):
            latent = self._model.initial_representation(time_step.observation)
        return AlgStep(latent, state)

    def rollout_step(self, time_step: TimeStep, state: NestedTensor) -> AlgStep:
        """Return the representation ``[B, ...]`` without info."""
        return AlgStep(self._model.initial_representation(time_step.observation), state)

    def train_step(self, exp: TimeStep, state: NestedTensor, rollout_info: Any) -> AlgStep:
        """Unroll the model over the following actions.

        Args:
            exp: ``[B, ...]``.
            state: ``()``.
            rollout_info: a ``MuzeroInfo`` from :meth:`preprocess_experience`.

        Returns:
            The representation ``[B, ...]``, and a ``MuzeroInfo`` with the loss.
        """
        model, target = self._model, rollout_info.target
        latent = model.initial_representation(exp.observation)
        output = model.initial_predict(latent)
        outputs = [_for_loss(output)]
        for i in range(self._settings.num_unroll_steps):
            before = output.state._replace(state=_scaled_gradient(output.state.state, self._gradient_scale))
            output = model.recurrent_inference(before, nest.map_structure(lambda x, i=i: x[:, i], rollout_info.action))
            outputs.append(_for_loss(output))
        if self._trains['train_repr_prediction']:
            target = target._replace(observation=self._represented(target.observation))
        loss_info = model.calc_loss(nest.stack(outputs, dim=1), target)
        # LAST steps are not trained on, so they get no priority either
        return AlgStep(latent, state, MuzeroInfo(loss=nest.map_structure(lambda x: x * ~exp.is_last(), loss_info)))

    def _represented(self, observation: NestedTensor) -> Tensor:
        """Return latent states ``[B, R + 1, ...]`` of observations ``[B, R + 1, ...]``, without gradient."""
        outer = nest.get_nest_shape(observation)[:2]
        with torch.no_grad():
            latent = self._model.initial_representation(nest.map_structure(lambda x: x.flatten(0, 1), observation))
        return latent.unflatten(0, outer)

    def calc_loss(self, info: Any) -> LossInfo:
        """Return the losses ``[T, B]`` of the steps, with priorities ``[B]`` if requested."""
        loss_info = info.loss
        if self._priority_func is None:
            return loss_info
        with torch.no_grad():
            return loss_info._replace(priority=self._priority_func(loss_info))

    def after_update(self, root_inputs: TimeStep, info: NestedTensor) -> None:
        """Move the target model, which reanalyzes, towards the trained model."""
        if self._update_target_model is not None:
            self._update_target_model()

    # Targets ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def preprocess_experience(self, root_inputs: TimeStep, rollout_info: Any,
                              batch_info: BatchInfo) -> tuple[TimeStep, Any]:
        """Look up the steps after each step ``[B, T]`` of a batch.

        Returns:
            ``root_inputs``, possibly augmented, and a ``MuzeroInfo``.
        """
        buffer = batch_info.replay_buffer
        if not buffer.keep_episodic_info:
            buffer.keep_episodic_info = True
        if self._target_maker is None:
            self._target_maker = self._make_target_maker()
        target, steps = self._target_maker.targets(batch_info, root_inputs.step_type.shape[1])
        if self._trains['train_repr_prediction']:
            target = target._replace(observation=self._observations(steps))
            if self._data_augmenter is not None:
                first = nest.map_structure(lambda x: x[:, :, 0], target.observation)
                root_inputs = root_inputs._replace(observation=first)
        elif self._data_augmenter is not None:
            root_inputs = root_inputs._replace(observation=self._data_augmenter(root_inputs.observation))
        value = rollout_info.value if self._has_searched else ()
        return root_inputs, MuzeroInfo(action=self._actions(steps), value=value, target=target)

    def _make_target_maker(self) -> TargetMaker:
        info_path, state_path = (f'{field}.{self.path}' if self.path else field for field in ('rollout_info', 'state'))
        reanalyzer = None
        if self._reanalyze_algorithm is not None:
            is_search = hasattr(self._reanalyze_algorithm, 'set_model')
            reanalyzer = Reanalyzer(self._reanalyze_algorithm, self._target_model if is_search else None,
                                    self.transform_experience, self._reanalyze_batch_size,
                                    state_path if self._stores_states else None, self._enable_amp)
        return TargetMaker(self._settings, info_path if self._has_searched else None, reanalyzer)

    def _scalar_reward(self, reward: Tensor) -> Tensor:
        """Convert rewards of the environment, ``[...]`` or ``[..., K]``, to scalar rewards ``[...]``."""
        if self._reward_transformer is not None:
            reward = self._reward_transformer(reward)
        return reward if self._reward_weights is None else (reward * self._reward_weights).sum(-1)

    def _observations(self, steps: HeldSteps) -> NestedTensor:
        """Return the observations of the steps, nest ``[B, T, R + 1, ...]``, possibly augmented."""
        shape = steps.positions.shape
        found: Any = time_steps_at(steps.buffer, self.transform_experience, steps.env_ids.expand(shape).flatten(),
                                   steps.positions.flatten()).observation
        if self._data_augmenter is not None:
            found = self._data_augmenter(nest.map_structure(lambda x: x.unflatten(0, (shape[0], -1)), found))
            found = nest.map_structure(lambda x: x.flatten(0, 1), found)
        return nest.map_structure(lambda x: x.unflatten(0, shape), found)

    def _actions(self, steps: HeldSteps) -> NestedTensor:
        """Return the actions to unroll with, nest ``[B, T, R, ...]``."""
        actions = steps.actions()
        if not self._random_action_after_episode_end:
            return actions
        after_end = steps.at_end[..., :-1]
        drawn = self._action_spec.sample(after_end.shape).to(after_end.device)
        return torch.where(after_end.reshape(*after_end.shape, *[1] * self._action_spec.ndim), drawn, actions)

    # Own replay buffer -----------------------------------------------------------------------------------------

    def build_replay_buffer(self, experience_spec: NestedTensorSpec) -> None:
        """Create the replay buffer; a resumed run restores its contents."""
        super().build_replay_buffer(experience_spec)
        if self._saved_replay is not None and self._replay_buffer is not None:
            self._replay_buffer.load_state_dict(self._saved_replay)
            self._saved_replay = None

    def get_extra_state(self) -> dict[str, Any]:
        """Return the extra state, including loaded contents of a replay buffer that does not exist yet."""
        state = super().get_extra_state()
        return state if self._saved_replay is None else {**state, 'replay_buffer': self._saved_replay}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the extra state; keep contents of the replay buffer until the first steps create it."""
        super().set_extra_state(state)
        if self._replay_buffer is None:
            self._saved_replay = state.get('replay_buffer')


def _make_model(ctor: Callable[..., MCTSModel], num_unroll_steps: int, **arguments: Any) -> MCTSModel:
    """Create a model; ``num_unroll_steps`` is passed if nothing else sets it, so a conf need not set it twice."""
    arguments = _accepted(ctor, arguments)
    try:
        return ctor(**arguments)
    except TypeError as error:
        if not re.search(r"missing .*'num_unroll_steps'", str(error)):
            raise
    return ctor(num_unroll_steps=num_unroll_steps, **arguments)


def _accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return those of ``arguments`` that ``function`` accepts."""
    parameters = inspect.signature(getattr(function, 'func', function)).parameters
    accepts_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in arguments.items() if accepts_all or name in parameters}


def _for_loss(output: Any) -> Any:
    """Return the fields of a ``ModelOutput`` that the loss uses."""
    return ModelOutput(state=ModelState(state=output.state.state), action_distribution=output.action_distribution,
                       game_over_logit=output.game_over_logit, value_pred=output.value_pred,
                       reward_pred=output.reward_pred)


def _scaled_gradient(x: Tensor, scale: float) -> Tensor:
    """Return ``x`` with its gradient multiplied by ``scale``."""
    return x if scale == 1.0 else scale * x + (1.0 - scale) * x.detach()
