"""Confs of published algorithms build algorithms with the settings of the papers."""
import math
from typing import NamedTuple

import pytest

from alfx import context, gin_utils, nest
from alfx.algorithms.rnd_algorithm import RNDAlgorithm
from alfx.environments.alf_wrappers import AtariTerminalOnLifeLossWrapper
from alfx.environments.utils import create_environment
from alfx.environments.wrapper_base import AlfEnvironmentBaseWrapper
from alfx.layers import FC, Conv2D, ParallelFC
from alfx.runs import building, playing


class Settings(NamedTuple):
    """Settings of a soft actor-critic: initial alpha, target entropy per action dimension, discount, step size of the
    targets (0: none), updates per step, updates per update of the policy, batch size, random steps at first, and the
    learning rate at 0, 100,000 and 1,000,000 environment steps, and the weight decay of the networks."""
    alpha: float
    entropy: float
    gamma: float
    tau: float
    updates: int
    policy_period: int
    batch_size: int
    random_steps: int
    rates: tuple[float, float, float]
    weight_decay: float = 0.0


PAPERS = {
    'bro': Settings(1.0, -0.5, 0.99, 0.005, 10, 1, 128, 2500, (3e-4, 3e-4, 3e-4), 1e-4),
    'crossq': Settings(1.0, -1.0, 0.99, 0.0, 1, 3, 256, 5000, (1e-3, 1e-3, 1e-3)),
    'droq': Settings(1.0, -1.0, 0.99, 0.005, 20, 20, 256, 5000, (3e-4, 3e-4, 3e-4)),
    'flash_sac': Settings(0.01, -0.478, 0.99, 0.01, 1, 2, 512, 10000, (3e-4, 2.96e-4, 1.5e-4)),
    'simba': Settings(0.01, -0.5, 0.995, 0.005, 2, 1, 256, 5000, (1e-4, 1e-4, 1e-4), 0.01),
    'simba_v2': Settings(0.01, -0.5, 0.995, 0.005, 2, 1, 256, 5000, (1e-4, 0.95e-4, 5e-5)),
    'xqc': Settings(0.01, -0.5, 0.995, 0.005, 2, 3, 256, 5000, (3e-4, 2.73e-4, 3e-5)),
}


PENDULUM = ("create_environment.env_name = 'Pendulum-v1'", 'create_environment.nonparallel = True',
            'TrainerConfig.num_env_steps = 1000000')


@pytest.fixture
def built(tmp_path):
    """Return a function that creates config, environment and algorithm of a conf."""
    opened = []

    def build(conf, bindings=('create_environment.nonparallel = True', )):
        gin_utils.load(conf, [*bindings], allow_unused=True)
        config = playing.run_config(str(tmp_path / 'run'), 1)
        opened.append(building.create_eval_environment(config, 1))
        return config, opened[-1], building.create_algorithm(config, opened[-1], trains=True)

    yield build
    for env in opened:
        env.close()
    gin_utils.clear()


@pytest.mark.parametrize('conf', PAPERS)
def test_a_conf_has_the_settings_of_the_paper(conf, built, monkeypatch):
    expected = PAPERS[conf]
    config, env, agent = built(conf, PENDULUM)
    sac = agent.policy
    assert sac._log_alpha.exp().item() == pytest.approx(expected.alpha, rel=0.01)
    assert sac._target_entropy.item() == pytest.approx(expected.entropy, rel=0.01)
    assert sac._critic_loss.gamma == pytest.approx(expected.gamma)
    assert (sac._update_target._tau if sac._update_target else 0.0) == expected.tau
    assert sac._policy_update_period == expected.policy_period
    assert (config.num_updates_per_train_iter, config.unroll_length) == (expected.updates, 1)
    assert (config.mini_batch_size, config.initial_collect_steps) == (expected.batch_size, expected.random_steps)
    step = nest.map_structure(lambda x: x.expand(2000, *x.shape[1:]), env.reset())
    action = sac.rollout_step(step, sac.get_initial_rollout_state(2000)).output
    assert action.std().item() == pytest.approx(3**-0.5, rel=0.05)  # uniform in [-1, 1]
    decays = {id(p): group['weight_decay'] for optimizer in agent.optimizers() for group in optimizer.param_groups
              for p in group['params']}
    assert decays.pop(id(sac._log_alpha)) == 0.0 and set(decays.values()) == {expected.weight_decay}
    schedule = agent.optimizers()[0]._schedule
    for steps, rate in zip((0, 100_000, 1_000_000), expected.rates):
        monkeypatch.setattr(context, 'get_progress', lambda kind, steps=steps: steps)
        assert (agent.optimizers()[0].param_groups[0]['lr'] if schedule is None else schedule()
                ) == pytest.approx(rate, rel=0.02)  # points approximate a cosine


@pytest.mark.parametrize('conf, entropy', [('droq_hopper', -1.0), ('droq_half_cheetah', -3.0),
                                           ('redq_small_hopper', -1.0)])
def test_target_entropies_are_those_of_the_code_of_redq(conf, entropy, built):
    pytest.importorskip('mujoco')
    assert built(conf)[2].policy._target_entropy.item() == pytest.approx(entropy, rel=0.01)


def test_redq_trains_on_random_actions_and_targets_of_two_critics(built):
    pytest.importorskip('mujoco')
    config, env, agent = built('redq_small_hopper')
    sac = agent.policy
    assert (config.initial_collect_steps, config.num_updates_per_train_iter, config.unroll_length) == (5000, 5, 1)
    assert (sac._action_values._num_replicas, sac._num_bootstrap_critics, sac._reductions[0]) == (5, 2, 'mean')
    assert sac._policy_update_period == 5
    step = nest.map_structure(lambda x: x.expand(2000, *x.shape[1:]), env.reset())
    action = sac.rollout_step(step, sac.get_initial_rollout_state(2000)).output
    assert action.std().item() == pytest.approx(3**-0.5, rel=0.05)


def test_td7_has_the_settings_of_the_paper(built):
    config, _, agent = built('td7', PENDULUM)
    td7 = agent.policy
    assert (td7._policy_update_period, td7._critic_loss.gamma) == (2, 0.99)
    assert (config.initial_collect_steps, config.mini_batch_size, config.priority_replay_alpha) == (25000, 256, 0.4)
    for layer in (m for m in agent.modules() if isinstance(m, FC)):
        bound = layer.input_size**-0.5
        assert bound / 2 < layer.bias.abs().max() <= bound and bound / 2 < layer.weight.abs().max() <= bound


def test_bro_resets_its_networks_where_the_paper_does(built):
    config = built('bro', PENDULUM)[0]
    reset, = config.callbacks
    assert tuple(reset.at_env_steps) == (15_000, 50_000, 250_000, 500_000, 750_000)


@pytest.mark.parametrize('conf', ['dqn_minatar_asterix', 'rainbow_minatar_asterix',
                                  'munchausen_dqn_minatar_breakout'])
def test_networks_of_images_have_the_initial_weights_of_torch(conf, built):
    pytest.importorskip('minatar')
    layers = [m for m in built(conf)[2].modules() if isinstance(m, (FC, Conv2D))]
    assert len(layers) >= 3
    for layer in layers:
        bound = math.prod(layer.weight.shape[1:])**-0.5
        assert layer.weight.abs().max() <= bound, layer
        if layer.weight.numel() > 500:
            assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)


def test_dqn_on_minatar_is_the_plain_one_of_its_paper(built):
    pytest.importorskip('minatar')
    dqn = built('dqn_minatar_asterix')[2].policy
    assert dqn._target_net_target_action and not built('rainbow_minatar_asterix')[2].policy._target_net_target_action
    assert dqn._update_target._period == 250 and dqn._update_target._tau == 1.0


def test_targets_of_deep_q_learning_are_copied_every_100_updates(built):
    dqn = built('deep_q', ["create_environment.env_name = 'CartPole-v1'", 'TrainerConfig.num_env_steps = 1000',
                           'TrainerConfig.mini_batch_length = 2'])[2].policy
    assert dqn._update_target._period == 100


@pytest.mark.parametrize('conf', ['pqn_breakout', 'ppo_breakout'])
def test_breakout_presses_fire_after_a_lost_life(conf, built):
    pytest.importorskip('ale_py')
    for training in (True, False):
        gin_utils.load(conf, ['create_environment.num_parallel_environments = 1'])
        env = create_environment(for_evaluation=not training)
        layers = []
        while isinstance(env, AlfEnvironmentBaseWrapper):
            layers.append(env)
            env = env._env
        assert [layer._fire_action for layer in layers if isinstance(layer, AtariTerminalOnLifeLossWrapper)] == [1]
        env.close()


@pytest.mark.parametrize('conf', ['xqc', 'simba_v2', 'flash_sac'])
def test_weights_of_norm_1_are_those_of_the_agent_only(conf, tmp_path, built):
    (tmp_path / 'both.gin').write_text(f"include '{conf}.gin'\ninclude 'rnd.gin'\n"
                                       'Agent.intrinsic_reward_coef = 0.1\nBlockEncodingNetwork.hidden_size = 16\n')
    agent = built(str(tmp_path / 'both.gin'), PENDULUM)[2]
    rnd = next(module for module in agent.modules() if isinstance(module, RNDAlgorithm))
    of_policy, of_rnd = ([module.projects_parameters for module in part.modules()
                          if isinstance(module, (FC, ParallelFC))] for part in (agent.policy, rnd))
    assert len(of_policy) > 4 and all(of_policy) and of_rnd == [False] * 4
