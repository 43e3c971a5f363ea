"""MuZero and the learner of its model: training data, reanalysis, errors, and exact resumption of runs."""
import copy
from functools import partial

import pytest
import torch
from helpers.agents import ALGORITHMS, make_agent

from alfx import context, gin_utils, nest
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.data_transformer import RewardScaling, UntransformedTimeStep, create_data_transformer
from alfx.algorithms.encoding_algorithm import EncodingAlgorithm
from alfx.algorithms.mcts_algorithm import MCTSAlgorithm, VisitSoftmaxTemperatureByMoves
from alfx.algorithms.mcts_models import (ModelTarget, SimpleMCTSModel, create_simple_dynamics_net,
                                         create_simple_encoding_net, create_simple_prediction_net)
from alfx.algorithms.muzero_algorithm import MuzeroAlgorithm
from alfx.algorithms.muzero_representation_learner import (LinearTdStepFunc, MuzeroRepresentationImpl,
                                                           MuzeroRepresentationLearner,
                                                           MuzeroRepresentationTrainingOptions)
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.algorithms.ppo_algorithm import PPOAlgorithm
from alfx.environments.board_games import BoardGame, Rules
from alfx.gin_utils import ConfError
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.value_networks import ValueNetwork
from alfx.optimizers import Adam
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec

R = 3
SMALL = dict(encoding_net_ctor=partial(create_simple_encoding_net, latent_size=8, fc_layer_params=(16, )),
             dynamics_net_ctor=partial(create_simple_dynamics_net, fc_layer_params=(16, )),
             prediction_net_ctor=partial(create_simple_prediction_net, fc_layer_params=(16, )))
SAMPLED = {'continuous': 4}
OFF_POLICY = dict(whole_replay_buffer_training=False, clear_replay_buffer=False, replay_buffer_length=64)


def search_ctor(**args):
    return partial(MCTSAlgorithm, **{**dict(
        num_simulations=6, root_dirichlet_alpha=0.5, root_exploration_fraction=0.25, pb_c_init=1.25, pb_c_base=19652,
        is_two_player_game=False, visit_softmax_temperature_fn=VisitSoftmaxTemperatureByMoves()), **args})


def model_ctor(environment='discrete', **args):
    return partial(SimpleMCTSModel, **{**dict(num_unroll_steps=R, num_sampled_actions=SAMPLED.get(environment)),
                                       **SMALL, **args})


def learner_ctor(environment='discrete', model_args=None, **args):
    return partial(MuzeroRepresentationImpl, **{**dict(
        model_ctor=model_ctor(environment, **(model_args or {})), num_unroll_steps=R, td_steps=2), **args})


def muzero(environment='discrete', search_args=None, model_args=None, config_args=None, agent_args=None,
           muzero_args=None, **learner_args):
    rl = partial(MuzeroAlgorithm, discount=0.9, mcts_algorithm_ctor=search_ctor(**(search_args or {})),
                 representation_learner_ctor=learner_ctor(environment, model_args, **learner_args),
                 **(muzero_args or {}))
    agent, env = make_agent('ppo', environment, rl_algorithm_cls=rl, mini_batch_length=1, unroll_length=8,
                            config_args={**OFF_POLICY, **(config_args or {})}, **(agent_args or {}))
    return agent, env


def make_agent_of(rl, env, config):
    agent = Agent(env.observation_spec(), env.action_spec(), env.reward_spec(), env=env, config=config,
                  optimizer=Adam(lr=1e-2), rl_algorithm_cls=rl)
    agent.set_path('')
    agent.finalize()
    return agent


def learner_of(agent):
    return agent.policy._representation_learner


def processed(agent, count=12, length=1):
    """Return a batch prepared for training, and its batch info."""
    experience, info = agent.replay_buffer.get_batch(count, length)
    return agent.learner.batches.processed(experience, info), info


def first_of(batch):
    """Return the arguments of ``train_step`` for the first steps of a batch."""
    return nest.map_structure(lambda x: x[:, 0], (batch.time_step, (), batch.rollout_info.rl))


@pytest.mark.parametrize('environment', ['discrete', 'continuous', 'nested observation', 'vector reward'])
@pytest.mark.parametrize('reanalyze_ratio', [0.0, 0.5, 1.0])
def test_it_trains_with_every_kind_of_environment(environment, reanalyze_ratio):
    args = dict(reanalyze_algorithm_ctor=search_ctor()) if reanalyze_ratio else {}
    agent, _ = muzero(environment, reanalyze_ratio=reanalyze_ratio, config_args={'priority_replay': True}, **args)
    before = {name: p.clone() for name, p in agent.named_parameters() if 'target' not in name}
    for _ in range(3):
        agent.train_iter()
    changed = [name for name, p in before.items() if not torch.equal(p, agent.get_parameter(name))]
    assert changed and all(torch.isfinite(p).all() for p in agent.parameters())


@pytest.mark.parametrize('trained', ['train_reward_function', 'train_game_over_function', 'train_policy'])
def test_outputs_that_the_model_lacks_are_not_trained(trained):
    # The rewards of this environment are not outcomes of a game, so train_reward_function = False raises an error.
    args = {} if trained == 'train_reward_function' else {trained: False}
    agent, _ = muzero(model_args={trained: False}, **{**args, trained: False})
    if trained == 'train_reward_function':
        with pytest.raises(ValueError, match='train_reward_function = False'):
            agent.train_iter()
        return
    agent.train_iter()
    batch, _ = processed(agent)
    target = batch.rollout_info.rl.target
    step = learner_of(agent).train_step(*first_of(batch))
    assert trained.removeprefix('train_').removesuffix('_function') not in step.info.loss.extra
    assert isinstance(target, ModelTarget)


# The update ------------------------------------------------------------------------------------------------------


def test_the_loss_of_an_unroll_worked_out_by_hand():
    agent, _ = muzero(recurrent_gradient_scaling_factor=1.0)
    agent.train_iter()
    batch, _ = processed(agent)
    inputs, _, info = first_of(batch)
    learner, model, target = learner_of(agent), learner_of(agent).model, info.target
    loss = learner.train_step(inputs, (), info).info.loss.loss
    output = model.initial_predict(model.initial_representation(inputs.observation))
    expected = torch.zeros(len(loss))
    for i in range(R + 1):
        weight = 1.0 if i == 0 else 1 / R
        policy = -(target.action_policy[:, i] * output.action_distribution.logits.log_softmax(-1)).sum(-1)
        p = output.game_over_logit.sigmoid()
        over = -torch.where(target.game_over[:, i], p, 1 - p).log()
        expected += weight * ((output.value - target.value[:, i])**2 + (output.reward - target.reward[:, i])**2
                              + policy + over)
        if i < R:
            output = model.recurrent_inference(output.state, info.action[:, i])
    torch.testing.assert_close(loss, expected * ~inputs.is_last())


def test_the_gradient_into_the_dynamics_is_scaled():
    """Scale the gradient by 1/2 per step: a loss at the last step only reaches the encoder with the factor (1/2)^R."""
    agent, _ = muzero(recurrent_gradient_scaling_factor=1.0)
    agent.train_iter()
    batch, _ = processed(agent)
    inputs, _, info = first_of(batch)
    learner = learner_of(agent)
    learner.model._step_weights[:-1] = 0.0
    encoder = list(learner.model._representation_net.parameters())

    def gradients(scale):
        learner._gradient_scale = scale
        return torch.autograd.grad(learner.train_step(inputs, (), info).info.loss.loss.sum(), encoder)

    for unscaled, scaled in zip(gradients(1.0), gradients(0.5)):
        torch.testing.assert_close(scaled, unscaled * 0.5**R)


def test_future_latent_states_are_learned_without_gradient_of_the_target():
    agent, _ = muzero(train_repr_prediction=True, model_args=dict(train_repr_prediction=True))
    agent.train_iter()
    batch, info = processed(agent)
    target = batch.rollout_info.rl.target
    assert target.observation.shape[:3] == (12, 1, R + 1)
    torch.testing.assert_close(target.observation[:, 0, 0], batch.time_step.observation[:, 0])
    later = agent.replay_buffer.steps_to_episode_end(info.positions, info.env_ids).clamp(max=2)
    expected = agent.replay_buffer.get_field('time_step.observation', info.env_ids, info.positions + later)
    torch.testing.assert_close(target.observation[:, 0, 2], expected)
    step = learner_of(agent).train_step(*first_of(batch))
    assert 'repr' in step.info.loss.extra


def test_observations_are_augmented_together():
    seen = []

    def augmenter(observation):
        seen.append(tuple(observation.shape))
        return observation + 100

    for repr_prediction, shape in ((False, (12, 1, 1)), (True, (12, R + 1, 1))):
        agent, _ = muzero(data_augmenter=augmenter, train_repr_prediction=repr_prediction,
                          model_args=dict(train_repr_prediction=repr_prediction))
        agent.train_iter()
        batch, _ = processed(agent)
        assert seen[-1] == shape
        assert batch.time_step.observation.min() > 90
        if repr_prediction:
            assert batch.rollout_info.rl.target.observation.min() > 90


def test_actions_behind_the_end_are_those_before_or_random():
    for is_random in (False, True):
        agent, _ = muzero(random_action_after_episode_end=is_random)
        for _ in range(4):
            agent.train_iter()
        torch.manual_seed(1)
        batch, _ = processed(agent, count=200)
        info = batch.rollout_info.rl
        behind = info.target.beyond_episode_end[:, 0, 2:] & info.target.beyond_episode_end[:, 0, 1:-1]
        differ = (info.action[:, 0, 1:] != info.action[:, 0, :-1])[behind]
        assert bool(differ.any()) == is_random


def test_priorities_come_from_the_priority_function():
    agent, _ = muzero(config_args={'priority_replay': True},
                      priority_func="lambda loss_info: loss_info.extra['value'].amax(0) + 3")
    agent.train_iter()
    batch, _ = processed(agent)
    time_major = nest.map_structure(lambda x: x.transpose(0, 1), batch)
    info = agent.learner.losses.train_info(time_major)
    loss_info = agent.calc_loss(info)
    torch.testing.assert_close(loss_info.priority, loss_info.extra['rl']['value'][0] + 3)
    assert muzero(calculate_priority=False)[0]._rl_algorithm._representation_learner._priority_func is None


def test_last_steps_have_no_priority():
    agent, _ = muzero(config_args={'priority_replay': True})
    for _ in range(4):
        agent.train_iter()
    torch.manual_seed(0)
    batch, _ = processed(agent, count=64)
    is_last = batch.time_step.is_last()[:, 0]
    assert bool(is_last.any()) and not bool(is_last.all())
    info = agent.learner.losses.train_info(nest.map_structure(lambda x: x.transpose(0, 1), batch))
    priority = agent.calc_loss(info).priority
    assert bool((priority[is_last] == 0).all()) and bool((priority[~is_last] > 0).all())


# Reanalysis ------------------------------------------------------------------------------------------------------

NO_NOISE = dict(root_exploration_fraction=0.0)


def collected(**args):
    """Return an agent that has stored some steps but has not trained."""
    args = dict(search_args=NO_NOISE, reanalyze_algorithm_ctor=search_ctor(**NO_NOISE), reanalyze_ratio=1.0) | args
    agent, env = muzero(config_args={'initial_collect_steps': 1000}, **args)
    for _ in range(3):
        agent.train_iter()
    return agent


def all_steps(agent):
    _, info = agent.replay_buffer.gather_all()
    size = int(agent.replay_buffer.current_size[0])
    return info._replace(env_ids=info.env_ids.repeat_interleave(size),
                         positions=torch.arange(size).repeat(len(info.env_ids)))


def targets(agent, info=None):
    learner = learner_of(agent)
    learner._target_maker = learner._make_target_maker()
    agent.replay_buffer.keep_episodic_info = True
    return learner._target_maker.targets(all_steps(agent) if info is None else info, 1)[0]


def test_reanalysis_with_equal_weights_and_no_noise_finds_stored_results():
    agent = collected(full_reanalyze=True, reanalyze_td_steps=2, td_steps=2)
    anew = targets(agent)
    learner = learner_of(agent)
    learner._settings = learner._settings._replace(reanalyze_ratio=0.0)
    stored = targets(agent)
    for name in ('value', 'action_policy', 'reward'):
        torch.testing.assert_close(getattr(anew, name), getattr(stored, name), rtol=0, atol=1e-5)


def test_reanalyzing_parts_of_a_batch_matches_the_whole():
    expected = targets(collected())
    torch.testing.assert_close(targets(collected(reanalyze_batch_size=7)), expected)


def test_values_behind_the_unroll_come_from_the_model_or_from_a_search():
    agent = collected(reanalyze_td_steps=R + 1)
    learner = learner_of(agent)
    values = targets(agent).value[:, 0, 0]
    maker, info = learner._target_maker, all_steps(agent)
    steps = maker.targets(info, 1)[1]
    bootstrap = maker._reanalyzer.values(agent.replay_buffer, info.env_ids, steps.further(R + 1)[:, 0, -1])
    observation = agent.replay_buffer.get_field('time_step.observation', info.env_ids, steps.further(R + 1)[:, 0, -1])
    model = learner._target_model
    torch.testing.assert_close(bootstrap, model.initial_predict(model.initial_representation(observation)).value)
    reward, discount, _ = maker._rewards(steps, R + 1)
    reward, discount = reward[:, 0], discount[:, 0]
    expected = sum(discount[:, 1:k].prod(-1) * reward[:, k] for k in range(1, R + 2))
    expected = expected + discount[:, 1:R + 2].prod(-1) * bootstrap
    expected = torch.where(steps.at_end[:, 0, 0] & steps.is_terminated[:, 0], 0.0, expected)
    torch.testing.assert_close(values, expected)


def test_half_of_the_rows_are_reanalyzed():
    agent = collected(reanalyze_ratio=0.5, td_steps=1, reanalyze_td_steps=1, full_reanalyze=True)
    with torch.no_grad():
        for p in learner_of(agent)._target_model.parameters():
            p.add_(0.3)
    mixed = targets(agent).value
    learner = learner_of(agent)
    learner._settings = learner._settings._replace(reanalyze_ratio=0.0)
    differs = (mixed != targets(agent).value).flatten(1).any(1)
    continues = ~targets(agent).game_over[:, 0, 0]
    assert abs(int(differs.sum()) - int(continues.sum()) / 2) <= 0.25 * len(differs) and int(differs.sum())


def test_the_model_that_reanalyzes_follows_at_its_period():
    agent, _ = muzero(reanalyze_algorithm_ctor=search_ctor(), reanalyze_ratio=1.0, target_update_period=4)
    learner = learner_of(agent)
    pairs = list(zip(learner.model.parameters(), learner._target_model.parameters()))
    agent.train_iter()  # two updates
    assert not all(torch.equal(a, b) for a, b in pairs)
    agent.train_iter()
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not any(b.requires_grad for _, b in pairs)


# How constructors are called -------------------------------------------------------------------------------------


OBSERVATION, ACTION = TensorSpec((3, )), BoundedTensorSpec((), torch.int64, 0, 2)


def impl(model_ctor=partial(SimpleMCTSModel, **SMALL), **args):
    return MuzeroRepresentationImpl(OBSERVATION, ACTION, **{**dict(
        model_ctor=model_ctor, num_unroll_steps=2, td_steps=3, discount=0.9), **args})


def a_model(observation_spec, action_spec, num_unroll_steps, debug_summaries):
    return SimpleMCTSModel(observation_spec, action_spec, num_unroll_steps, debug_summaries=debug_summaries, **SMALL)


@pytest.mark.parametrize('ctor', [
    partial(SimpleMCTSModel, **SMALL), partial(SimpleMCTSModel, num_unroll_steps=2, **SMALL), a_model,
    lambda **args: SimpleMCTSModel(**args, **SMALL), lambda: SimpleMCTSModel(OBSERVATION, ACTION, 2, **SMALL),
    lambda observation_spec, action_spec: SimpleMCTSModel(observation_spec, action_spec, 2, **SMALL)])
def test_a_model_receives_the_number_of_unroll_steps_if_it_needs_it(ctor):
    assert impl(ctor, reanalyze_ratio=1.0, reanalyze_algorithm_ctor=search_ctor())._target_model.num_unroll_steps == 2


@pytest.mark.parametrize('line, steps', [('', 2), ('SimpleMCTSModel.num_unroll_steps = 3', 3)])
def test_a_conf_need_not_set_the_unroll_steps_of_the_model(tmp_path, line, steps):
    (tmp_path / 'c.gin').write_text(f'MuzeroRepresentationImpl.model_ctor = @SimpleMCTSModel\n{line}\n')
    with gin_utils.loaded(str(tmp_path / 'c.gin')):
        learner = MuzeroRepresentationImpl(OBSERVATION, ACTION, num_unroll_steps=steps, td_steps=3, discount=0.9)
        assert learner.model.num_unroll_steps == steps
        assert gin_utils.mistakes_of_unused(gin_utils.unused_bindings()) == []
    with pytest.raises(TypeError, match='wrong'):
        impl(partial(SimpleMCTSModel, wrong=3))


def test_an_algorithm_that_reanalyzes_receives_what_it_accepts():
    received = []

    def search(observation_spec, action_spec, discount, name) -> MCTSAlgorithm:
        received.append((observation_spec, discount, name))
        return search_ctor()(observation_spec=observation_spec, action_spec=action_spec, discount=discount)

    learner = impl(reanalyze_ratio=0.5, reanalyze_algorithm_ctor=search)
    assert received == [(learner.model.repr_spec, 0.9, 'MuzeroRepresentationImpl.reanalyze')]
    learner = impl(reanalyze_ratio=0.5, reanalyze_algorithm_ctor=search_ctor())
    assert learner._reanalyze_algorithm.observation_spec == learner.model.repr_spec != OBSERVATION
    learner = impl(reanalyze_ratio=0.5, reanalyze_algorithm_ctor=PPOAlgorithm)
    assert learner._reanalyze_algorithm.observation_spec == OBSERVATION


@pytest.mark.parametrize('arguments', [dict(reanalyze_algorithm_ctor=search_ctor()), dict(full_reanalyze=True),
                                       dict(reanalyze_td_steps_func=LinearTdStepFunc(1.2))])
def test_settings_of_reanalysis_are_logged_without_a_share_of_it(arguments, caplog):
    caplog.set_level('INFO', 'alfx')
    assert impl(reanalyze_ratio=0.0, **arguments)._reanalyze_algorithm is None
    assert [record.getMessage() for record in caplog.records] == [
        f'MuzeroRepresentationImpl.{argument} is not used: reanalyze_ratio is 0' for argument in arguments]


def test_td_steps_fall_to_an_age_beyond_the_training():
    # 10 - 9 * age / 1.2, rounded: 10 - 3.75, 10 - 7.5
    assert LinearTdStepFunc(max_bootstrap_age=1.2)(torch.tensor([0.5, 1.0]), 10, 1.0).tolist() == [6, 2]
    for age in (0.0, -1.0, float('nan')):
        with pytest.raises(ValueError, match='max_bootstrap_age must be a number > 0'):
            LinearTdStepFunc(age)


def test_td_steps_fall_with_age():
    function = LinearTdStepFunc(max_bootstrap_age=0.5, min_td_steps=1)
    # 5 - 4 * age / 0.5, rounded, and 1 for ages of 0.5 and above
    assert function(torch.tensor([0.0, 0.125, 0.25, 0.5, 0.9]), 5, 0.9).tolist() == [5, 4, 3, 1, 1]
    agent = collected(reanalyze_td_steps_func=lambda age, n, oldest: (n - 4 * age).round(), reanalyze_td_steps=5)
    context.update_progress('percent', 0.5)
    maker = learner_of(agent)._make_target_maker()
    info = all_steps(agent)
    last = int(agent.replay_buffer.current_pos[0])
    expected = [round(5 - 4 * 0.5 * (last - 1 - p) / last) for p in info.positions.tolist()]
    assert maker._td_steps(info).tolist() == expected


def test_another_algorithm_can_reanalyze():
    def teacher(observation_spec, action_spec, discount, debug_summaries, name):
        return ALGORITHMS['ppo'](observation_spec=observation_spec, action_spec=action_spec, name=name,
                                 actor_network_ctor=partial(ActorDistributionNetwork, fc_layer_params=(8, )),
                                 value_network_ctor=partial(ValueNetwork, fc_layer_params=(8, )))

    agent = collected(reanalyze_algorithm_ctor=teacher)
    found = targets(agent)
    info = all_steps(agent)
    observation = agent.replay_buffer.get_field('time_step.observation', info.env_ids, info.positions)
    distribution, _ = learner_of(agent)._reanalyze_algorithm.actor(observation)
    rows = ~found.game_over[:, 0, 0]
    torch.testing.assert_close(found.action_policy[rows, 0, 0], distribution.logits.softmax(-1)[rows])


# Two players -----------------------------------------------------------------------------------------------------


def tic_tac_toe(config_args=None, search_args=None, board_only=False, **learner_args):
    torch.manual_seed(0)
    context.reset()
    env = BoardGame(Rules(), 6, board_only=board_only)
    env.seed(0)
    env.reset()
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=8, mini_batch_size=16, mini_batch_length=1,
                           num_updates_per_train_iter=2, **OFF_POLICY, **(config_args or {}))
    game = dict(is_two_player_game=True, known_value_bounds=(-1, 1))
    rl = partial(MuzeroAlgorithm, discount=1.0, mcts_algorithm_ctor=search_ctor(**{**game, **(search_args or {})}),
                 representation_learner_ctor=learner_ctor(td_steps=-1, **learner_args))
    return make_agent_of(rl, env, config), env


@pytest.mark.parametrize('search_args, num_sampled_actions', [({}, None), ({}, 3), (dict(root_search='gumbel'), None),
                                                              (dict(root_search='gumbel'), 3)])
def test_no_impossible_move_is_made_and_learned(search_args, num_sampled_actions):
    reanalyze = search_ctor(is_two_player_game=True, **search_args)
    agent, _ = tic_tac_toe(search_args=search_args, model_args=dict(num_sampled_actions=num_sampled_actions),
                           reanalyze_algorithm_ctor=reanalyze, reanalyze_ratio=0.5)
    for _ in range(4):
        agent.train_iter()
    experience, info = agent.replay_buffer.gather_all()
    mask = experience.time_step.observation['valid_action_mask']
    continues = ~experience.time_step.is_last()
    assert mask.gather(-1, experience.action[..., None])[..., 0][continues].all()
    found = experience.rollout_info.rl
    invalid = ~mask_of_candidates(mask, found.candidate_actions) & continues[..., None]
    assert (found.candidate_action_policy[invalid] == 0).all()
    batch, info = processed(agent, count=64)
    target = nest.map_structure(lambda x: x[:, 0, 0] if x.ndim > 2 else x, batch.rollout_info.rl.target)
    mask = mask_of_candidates(batch.time_step.observation['valid_action_mask'][:, 0], target.action)
    assert (target.action_policy[~mask] == 0).all()


def mask_of_candidates(mask, candidates):
    """Return which of the candidates ``[..., K]`` are valid; with ``()``, all actions are candidates."""
    return mask if isinstance(candidates, tuple) else mask.gather(-1, candidates)


def test_reanalysis_needs_to_know_the_player_to_move():
    reanalyze = dict(reanalyze_algorithm_ctor=search_ctor(is_two_player_game=True), reanalyze_ratio=1.0)
    with pytest.raises(ConfError, match='whose turn it is.*\n.*use_rollout_state'):
        tic_tac_toe(board_only=True, **reanalyze)
    agent, _ = tic_tac_toe(board_only=True, config_args={'use_rollout_state': True}, **reanalyze)
    for _ in range(3):
        agent.train_iter()


# Invalid settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('args, message', [
    (dict(num_unroll_steps=4), 'num_unroll_steps: expected the value of the model, 3, found 4'),
    (dict(train_policy=False), 'train_policy: expected the value of the model, True, found False'),
    (dict(td_steps=0), 'td_steps: expected at least 1, or -1, found 0'),
    (dict(td_steps=10**6), r'td_steps must be an int in \[-1, 10000\], found int 1000000'),
    (dict(recurrent_gradient_scaling_factor=2.0), 'recurrent_gradient_scaling_factor'),
    (dict(reanalyze_ratio=1.5, reanalyze_algorithm_ctor=search_ctor()), r'reanalyze_ratio must be a .* \[0, 1\]'),
    (dict(reanalyze_ratio=0.5), 'reanalyze_ratio: expected 0 without reanalyze_algorithm_ctor'),
    (dict(reanalyze_batch_size=0), 'reanalyze_batch_size'), (dict(reanalyze_td_steps=0), 'reanalyze_td_steps'),
    (dict(priority_func="lambda x: __import__('os')"), r'MuZero.learner.priority_func: .*__import__')])
def test_arguments_out_of_range_are_rejected(args, message):
    with pytest.raises(ValueError, match=message):
        muzero(**args)


def transformer_of(*ctors):
    return lambda env: create_data_transformer(list(ctors), env.observation_spec())


def test_a_reward_transformer_of_the_run_is_rejected():
    with pytest.raises(ConfError, match='RewardScaling.*\n.*reward_transformer'):
        muzero(agent_args=dict(data_transformer=transformer_of(partial(RewardScaling, scale=0.1))))
    agent, _ = muzero(muzero_args=dict(reward_transformer=RewardScaling(scale=0.1)))
    agent.train_iter()
    batch, info = processed(agent)
    stored = agent.replay_buffer.get_field('time_step.reward', info.env_ids, info.positions)
    torch.testing.assert_close(batch.rollout_info.rl.target.reward[:, 0, 0], stored * 0.1)


def test_a_second_data_transformer_next_to_that_of_the_run_is_rejected(monkeypatch):
    monkeypatch.setattr(context, 'get_raw_observation_spec', lambda: TensorSpec((1, )))
    with pytest.raises(ConfError, match='data_transformer_ctor has no effect under MuzeroAlgorithm'):
        muzero(data_transformer_ctor=UntransformedTimeStep)


def test_an_encoder_before_it_is_rejected_if_it_must_see_observations():
    encoder = partial(EncodingAlgorithm, encoder_cls=partial(EncodingNetwork, fc_layer_params=(5, )))
    muzero(agent_args=dict(representation_learner_cls=encoder))
    identity = transformer_of()
    with pytest.raises(ConfError, match='needs stored observations'):
        muzero(agent_args=dict(representation_learner_cls=encoder, data_transformer=identity), reanalyze_ratio=1.0,
               reanalyze_algorithm_ctor=search_ctor())


# Under another policy --------------------------------------------------------------------------------------------


def with_ppo(options=MuzeroRepresentationTrainingOptions(mini_batch_size=16, initial_collect_steps=0,
                                                         num_updates_per_train_iter=2, replay_buffer_length=50),
             algorithm='ppo', environment='discrete', data_transformer=None, optimizer=True, **args):
    args = dict(reanalyze_algorithm_ctor=search_ctor(), reanalyze_ratio=1.0) | args
    impl = learner_ctor(environment, optimizer=Adam(lr=1e-2) if optimizer else None, **args)
    learner = partial(MuzeroRepresentationLearner, impl_cls=partial(impl, discount=0.9), training_options=options)
    return make_agent(algorithm, environment, representation_learner_cls=learner, mini_batch_length=None if
                      algorithm == 'impala' else 1, data_transformer=data_transformer)


@pytest.mark.parametrize('algorithm', ['ppo', 'actor-critic'])
@pytest.mark.parametrize('environment', ['discrete', 'continuous'])
def test_the_representation_learner_trains_under_any_policy(algorithm, environment):
    agent, env = with_ppo(algorithm=algorithm, environment=environment)
    impl = agent._representation_learner._impl
    for i in range(3):
        before = [p.clone() for p in impl.model.parameters()]
        agent.train_iter()
        buffer = impl.replay_buffer
        assert buffer.current_pos.tolist() == [6 * (i + 1)] * env.batch_size
        assert any(not torch.equal(a, b) for a, b in zip(before, impl.model.parameters()))
    experience, _ = buffer.gather_all()
    step_type = experience.step_type
    after_last = step_type[:, 1:][step_type[:, :-1] == 2]
    assert len(after_last) and (after_last == 0).all(), 'no step is stored twice, and none is left out'


def test_the_loss_of_the_policy_does_not_reach_the_representation():
    agent, _ = with_ppo(options=None)
    before = [p.clone() for p in agent._representation_learner.model.parameters()]
    for _ in range(2):
        agent.train_iter()
    assert all(torch.equal(a, b) for a, b in zip(before, agent._representation_learner.model.parameters()))
    assert agent._representation_learner._impl.replay_buffer is None


def test_it_trains_every_so_many_iterations():
    options = MuzeroRepresentationTrainingOptions(interval=2, mini_batch_size=8, initial_collect_steps=0)
    agent, _ = with_ppo(options)
    parameters = list(agent._representation_learner.model.parameters())
    changes = []
    for _ in range(4):
        before = [p.clone() for p in parameters]
        agent.train_iter()
        changes.append(any(not torch.equal(a, b) for a, b in zip(before, parameters)))
    assert changes == [False, True, False, True]


def test_observations_are_stored_untransformed(monkeypatch):
    scaling = partial(RewardScaling, scale=0.5)
    with pytest.raises(ConfError, match='UntransformedTimeStep'):
        with_ppo(data_transformer=transformer_of(scaling))
    with pytest.raises(ConfError, match='RewardScaling'):
        with_ppo(data_transformer=transformer_of(UntransformedTimeStep, scaling))
    monkeypatch.setattr(context, 'get_raw_observation_spec', lambda: TensorSpec((1, )))
    agent, _ = with_ppo(data_transformer=transformer_of(UntransformedTimeStep, scaling),
                        data_transformer_ctor=UntransformedTimeStep)
    agent.train_iter()
    rewards = agent._representation_learner._impl.replay_buffer.gather_all()[0].time_step.reward
    assert set(rewards.flatten().tolist()) <= {0.0, 1.0} and 1.0 in rewards


def test_a_run_that_collects_nothing_is_rejected():
    agent, _ = with_ppo()
    config = TrainerConfig(root_dir='', unroll_length=0, offline_buffer_dir='data',
                           whole_replay_buffer_training=False, mini_batch_length=2)
    with pytest.raises(ConfError, match='unroll_length = 0, but .* learns only from collected experience'):
        agent._representation_learner.check_config(config)


def test_it_needs_an_optimizer_and_something_that_searches():
    with pytest.raises(ValueError, match='no optimizer owns'):
        with_ppo(optimizer=False)
    with pytest.raises(ConfError, match='no search runs when a step is stored'):
        with_ppo(reanalyze_ratio=0.0, reanalyze_algorithm_ctor=None)
    agent, _ = with_ppo(reanalyze_ratio=0.0, reanalyze_algorithm_ctor=None, train_policy=False, td_steps=-1,
                        model_args=dict(train_policy=False))
    agent.train_iter()


# Resuming --------------------------------------------------------------------------------------------------------


def make_muzero():
    return muzero(reanalyze_algorithm_ctor=search_ctor(), reanalyze_ratio=0.5, config_args={'priority_replay': True})


@pytest.mark.parametrize('make', [make_muzero, with_ppo], ids=['muzero', 'under ppo'])
def test_resuming_is_exact(make):
    agent, env = make()
    for _ in range(3):
        agent.train_iter()
    saved = copy.deepcopy((agent.state_dict(), agent.learner.state_dict(), env.get_state(), torch.get_rng_state()))
    for _ in range(2):
        agent.train_iter()
    other, other_env = make()
    state, learner, env_state, rng = saved
    other_env.set_state(env_state)
    other.load_state_dict(state)
    other.learner.load_state_dict(learner)
    torch.set_rng_state(rng)
    for _ in range(2):
        other.train_iter()
    expected, found = agent.state_dict(), other.state_dict()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, found[key]), key


def test_reward_weights_reach_the_learner_of_the_representation():
    spec = TensorSpec((2, ))
    config = TrainerConfig(root_dir='')
    learner = MuzeroRepresentationLearner(
        TensorSpec((3, )), BoundedTensorSpec((), torch.int64, 0, 1), config, reward_spec=spec,
        impl_cls=lambda **arguments: OffPolicyAlgorithm(
            arguments['observation_spec'], arguments['action_spec'], train_state_spec=(), reward_spec=spec))
    learner.set_reward_weights(torch.tensor([1.0, 3.0]))
    assert learner.reward_weights.tolist() == learner._impl.reward_weights.tolist() == [1.0, 3.0]
