"""Games that ale-py steps together, through the adapter: the same frames as in suite_atari."""
import pytest
import torch

from alfx.environments import suite_ale_vector, suite_atari, suite_gym
from alfx.environments.alf_wrappers import AtariTerminalOnLifeLossWrapper, TimeLimit
from alfx.environments.environment_errors import EnvironmentLoadError, UnsupportedOperationError
from alfx.gin_utils import ConfError

pytest.importorskip('ale_py.vector_env')
pytest.importorskip('cv2')

WITHOUT_CHANCE = {'noop_max': 0, 'sticky_action_probability': 0.0}


def both(game, **arguments):
    return suite_ale_vector.load(game, **arguments), suite_atari.load(game, **arguments)


@pytest.mark.parametrize('game', ['Pong', 'ALE/Breakout-v5'])
def test_without_randomness_images_and_rewards_match_suite_atari(game):
    pooled, single = both(game, **WITHOUT_CHANCE)
    assert pooled.observation_spec() == single.observation_spec() and pooled.action_spec() == single.action_spec()
    pooled.reset()
    single.reset()
    generator, seen, rewards, lasts = torch.Generator().manual_seed(1), 0, 0, 0
    for _ in range(200):
        action = torch.randint(int(pooled.action_spec().maximum) + 1, (1, ), generator=generator)
        actual, expected = pooled.step(action), single.step(action)
        for name in ('step_type', 'reward', 'discount', 'prev_action'):
            assert torch.equal(getattr(actual, name), getattr(expected, name)), name
        assert torch.equal(actual.env_info['lives'], expected.env_info['lives'])
        seen = 0 if actual.is_first() else seen + 1
        if seen >= 3 and actual.is_mid():  # by then all images are from this episode
            assert torch.equal(actual.observation, expected.observation)
        rewards += float(actual.reward.abs())
        lasts += int(actual.is_last())
    assert rewards >= 1 and (lasts >= 1 or game == 'Pong')


@pytest.mark.parametrize('name, arguments, expected', [
    ('PongNoFrameskip-v4', {}, 0.0), ('Breakout-v4', {}, 0.0), ('PongNoFrameskip-v0', {}, 0.25), ('Pong', {}, 0.25),
    ('PongNoFrameskip-v4', {'sticky_action_probability': 0.5}, 0.5), ('Pong', {'sticky_action_probability': 0.0}, 0.0)])
def test_actions_stick_as_the_id_is_registered_which_is_logged(monkeypatch, caplog, name, arguments, expected):
    probabilities = []
    suite_gym.log_sticky_actions.cache_clear()
    caplog.set_level('INFO')
    original = suite_ale_vector._vector_env_class()

    def vector_env(*args, **kwargs):
        probabilities.append(kwargs['repeat_action_probability'])
        return original(*args, **kwargs)

    monkeypatch.setattr(suite_ale_vector, '_vector_env_class', lambda: vector_env)
    suite_ale_vector.load(name, **arguments)
    assert probabilities == [expected]
    assert any('no sticky actions' in line if not expected else f'{expected:g}' in line for line in caplog.messages)


@pytest.mark.parametrize('mode', ['NextStep', 'SameStep'])
def test_the_sequence_is_the_same_for_all_autoreset_modes(mode):
    from ale_py.vector_env import AtariVectorEnv
    env = suite_gym.wrap_env(AtariVectorEnv('breakout', 2, autoreset_mode=mode, img_height=20, img_width=20,
                                            stack_num=1, noop_max=0), env_info_keys=('lives', ))
    env.seed(0)
    steps = [env.reset()] + [env.step(torch.ones(2, dtype=torch.int64)) for _ in range(300)]
    lasts = [t for t, step in enumerate(steps) if step.is_last().all()]
    assert len(lasts) == 2 and lasts[1] - lasts[0] == lasts[0] + 1
    for t in lasts:
        assert (steps[t].discount == 0).all()
        assert mode == 'SameStep' or (steps[t].env_info['lives'] == 0).all()  # ale-py gives those of the next episode
        assert steps[t + 1].is_first().all() and (steps[t + 1].env_info['lives'] == 5).all()
        assert torch.equal(steps[t + 1].observation, steps[0].observation)


def test_the_limit_of_frames_truncates():
    env = suite_ale_vector.load('Pong', batch_size=2, screen_size=20, noop_max=0,
                                env_args={'max_num_frames_per_episode': 40})
    steps = [env.reset()] + [env.step(torch.zeros(2, dtype=torch.int64)) for _ in range(12)]
    last = next(step for step in steps if step.is_last().all())
    assert torch.equal(last.discount, torch.ones(2))


@pytest.mark.parametrize('load', [suite_ale_vector.load, suite_atari.load])
def test_max_episode_steps_counts_steps_and_not_frames(load):
    env = load('Pong', batch_size=2, max_episode_steps=5, screen_size=20)
    env.seed(0)
    steps = [env.reset()] + [env.step(torch.zeros(2, dtype=torch.int64)) for _ in range(12)]
    assert [int(step.step_type[0]) for step in steps] == [0, 1, 1, 1, 1, 2, 0, 1, 1, 1, 1, 2, 0]
    assert all(torch.equal(step.discount, torch.ones(2)) for step in steps)


def test_each_environment_of_suite_atari_may_have_its_own_limit():
    env = suite_atari.load('Pong', batch_size=2, max_episode_steps=[2, 3], screen_size=20)
    env.reset()
    kinds = [env.step(torch.zeros(2, dtype=torch.int64)).step_type.tolist() for _ in range(3)]
    assert kinds == [[1, 1], [2, 1], [0, 2]]
    with pytest.raises(EnvironmentLoadError, match='expected a number of at least 1, or a sequence of 2 such'):
        TimeLimit(env, [1, 2, 3])


def test_a_lost_life_can_be_a_termination_within_the_episode():
    env = suite_ale_vector.load('Breakout', batch_size=2, screen_size=20, noop_max=0,
                                alf_env_wrappers=[AtariTerminalOnLifeLossWrapper])
    env.seed(0)
    env.reset()
    lives = []
    for _ in range(200):
        time_step = env.step(torch.ones(2, dtype=torch.int64))
        if time_step.is_mid()[0] and time_step.discount[0] == 0:
            lives.append(int(time_step.env_info['lives'][0]))
    assert lives[:3] == [4, 3, 2]


def test_environments_have_their_own_streams_and_seeds_reproduce_them():
    seen = {}
    for count, threads in ((3, 1), (3, 2), (1, 1)):
        env = suite_ale_vector.load('Pong', batch_size=count, screen_size=20, num_threads=threads)
        env.seed(4)
        steps = [env.reset()] + [env.step(torch.full((count, ), 2)) for _ in range(40)]
        seen[count, threads] = torch.stack([step.observation for step in steps])
    assert torch.equal(seen[3, 1], seen[3, 2]) and torch.equal(seen[3, 1][:, :1], seen[1, 1])
    assert not torch.equal(seen[3, 1][:, 0], seen[3, 1][:, 1])


@pytest.mark.parametrize('arguments, message', [
    (dict(environment_name='Pongg'), "'ALE/Pongg-v5'; did you mean .*ALE/Pong-v5"),
    (dict(environment_name='CartPole-v1'), 'CartPole-v1 is not a game'),
    (dict(env_args={'episodic_life': True}), r'restart the whole game.*AtariTerminalOnLifeLossWrapper'),
    (dict(env_args={'life_loss_info': True}), 'AtariTerminalOnLifeLossWrapper'),
    (dict(env_args={'autoreset_mode': 'SameStep'}), 'the infos of the next episode'),
    (dict(env_args={'frameskip': 2}), 'set frame_skip'),
    (dict(env_args={'max_pool': False}), "no argument 'max_pool'; did you mean .*'maxpool'"),
    (dict(env_info_keys=('score', )), r"expected some of .*, found 'score'"),
])
def test_unsupported_options_are_rejected_by_name(arguments, message):
    with pytest.raises(EnvironmentLoadError, match=message):
        suite_ale_vector.load(**{'environment_name': 'Pong', **arguments})


OUT_OF_RANGE = {'max_episode_steps': 0, 'frame_skip': 0, 'noop_max': -4, 'screen_size': 0, 'stack_size': 0,
                'sticky_action_probability': 3.0, 'batch_size': 0}


@pytest.mark.parametrize('suite, argument, value', [
    (suite_ale_vector, 'num_threads', -1),
    *((suite, *item) for suite in (suite_ale_vector, suite_atari) for item in OUT_OF_RANGE.items())])
def test_numbers_out_of_range_are_rejected_by_name(suite, argument, value):
    with pytest.raises(ConfError, match=f'load.{argument} must be'):
        suite.load('Pong', **{argument: value})


def test_states_and_images_are_not_available():
    env = suite_ale_vector.load('Pong', screen_size=20)
    assert env.get_state() is None
    with pytest.raises(UnsupportedOperationError, match='AtariVectorEnv returns no images: set .*suite_atari'):
        env.render()
