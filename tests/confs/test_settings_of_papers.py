"""Confs of published algorithms build algorithms with the settings of the papers."""
from typing import NamedTuple

import pytest

from alfx import context, gin_utils, nest
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


@pytest.fixture
def built(tmp_path):
    """Return config, environment and algorithm of a base conf for Pendulum."""
    opened = []

    def build(conf):
        gin_utils.load(conf, ["create_environment.env_name = 'Pendulum-v1'", 'create_environment.nonparallel = True',
                              'TrainerConfig.num_env_steps = 1000000'], allow_unused=True)
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
    config, env, agent = built(conf)
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
