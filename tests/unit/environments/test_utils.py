"""``create_environment`` and its arguments."""
from functools import partial

import gin
import gymnasium
import numpy as np
import pytest
import torch
from helpers.gym_environments import ChainEnv, CountEnv, RaisingEnv

from alfx import gin_utils
from alfx.environments import rendering, suite_goals, suite_gym, suite_unittest
from alfx.environments.alf_gym_wrapper import AlfGymWrapper
from alfx.environments.alf_wrappers import (ActionObservationWrapper, BatchEnvironmentWrapper, CheckedEnvironment,
                                            MultitaskWrapper)
from alfx.environments.environment_errors import EnvironmentLoadError, EnvironmentStepError
from alfx.environments.process_vector_env import ProcessVectorEnv
from alfx.environments.utils import create_environment, load_with_random_max_episode_steps
from alfx.environments.vector_env import SerialVectorEnv


def sequence(env, steps=6):
    """Return the observations under action 0."""
    env = CheckedEnvironment(env)
    observations = [env.reset().observation]
    for _ in range(steps):
        observations.append(env.step(torch.zeros(env.batch_size, dtype=torch.int64)).observation)
    return torch.stack(observations)


def load_count(name, env_id=None):
    return CountEnv(int(name) + (env_id or 0))


def load_batch(name, batch_size):
    return suite_unittest.ValueUnittestEnv(batch_size, int(name))


class TestCreateEnvironment:

    def test_in_process_and_worker_environments_give_the_same_sequence(self):
        sequences = []
        for arguments in ({'nonparallel': True}, {}, {'batch_size_per_env': 2, 'start_serially': False}):
            with create_environment('CartPole-v1', num_parallel_environments=3, seed=5, **arguments) as env:
                assert env.batch_size == 3
                assert isinstance(env.gym, SerialVectorEnv if 'nonparallel' in arguments else ProcessVectorEnv)
                if arguments:
                    assert isinstance(env.gym, SerialVectorEnv) or len(env.gym.worker_pids) == (2 if len(arguments) > 1
                                                                                              else 3)
                sequences.append(sequence(env))
        torch.testing.assert_close(sequences[0], sequences[1], rtol=0, atol=0)
        torch.testing.assert_close(sequences[0], sequences[2], rtol=0, atol=0)

    def test_environments_and_evaluation_have_their_own_random_streams(self):
        make = partial(create_environment, 'CartPole-v1', num_parallel_environments=2, nonparallel=True, seed=5)
        training, repeated, evaluation = sequence(make()), sequence(make()), sequence(make(for_evaluation=True))
        torch.testing.assert_close(training, repeated)
        assert not torch.equal(training[0], evaluation[0]) and not torch.equal(training[0, 0], training[0, 1])
        unseeded = create_environment('CartPole-v1', num_parallel_environments=2, nonparallel=True)
        assert not torch.equal(sequence(unseeded), sequence(unseeded))

    def test_evaluation_may_use_another_loader(self):
        env = create_environment('3', env_load_fn=load_count, eval_env_load_fn=load_batch, for_evaluation=True,
                                 num_parallel_environments=2, nonparallel=True)
        assert isinstance(env, suite_unittest.ValueUnittestEnv)

    @pytest.mark.parametrize('nonparallel', [True, False])
    def test_a_constructor_of_one_gymnasium_environment_is_called_for_each(self, nonparallel):
        with create_environment('2', env_load_fn=load_count, num_parallel_environments=2, seed=0,
                                nonparallel=nonparallel) as env:
            steps = [env.reset()] + [env.step(torch.zeros(2, dtype=torch.int64)) for _ in range(4)]
        assert [step.is_last().tolist() for step in steps].index([True, False]) == 3
        assert steps[4].is_last().tolist() == [False, True]

    def test_a_function_that_creates_a_batched_environment_is_called_once(self, caplog):
        env = create_environment('3', env_load_fn=load_batch, num_parallel_environments=5)
        assert env.batch_size == 5
        with pytest.raises(EnvironmentLoadError, match='expected an AlfEnvironment of batch size 3'):
            create_environment('3', env_load_fn=lambda name, batch_size: load_batch(name, 1),
                               num_parallel_environments=3)

    def test_a_function_that_creates_an_alf_environment_needs_one_process(self):
        def load(name):
            return AlfGymWrapper(ChainEnv(3))

        env = create_environment('x', env_load_fn=load, num_parallel_environments=2, nonparallel=True)
        assert isinstance(env, BatchEnvironmentWrapper) and env.batch_size == 2
        with pytest.raises(EnvironmentLoadError, match='needs an argument batch_size, or nonparallel=True'):
            create_environment('x', env_load_fn=load, num_parallel_environments=2)
        with pytest.raises(EnvironmentLoadError, match='found a int'):
            create_environment('x', env_load_fn=lambda name: 3, num_parallel_environments=2, nonparallel=True)

    @pytest.mark.parametrize('nonparallel', [True, pytest.param(False, marks=pytest.mark.processes)])
    def test_images_of_an_environment_of_a_function_are_transposed(self, nonparallel):
        class Images(gymnasium.Env):
            observation_space = gymnasium.spaces.Box(0, 255, (5, 6, 3), np.uint8)
            action_space = gymnasium.spaces.Discrete(2)

            def reset(self, seed=None, options=None):
                return np.full((5, 6, 3), [1, 2, 3], np.uint8), {}

        with create_environment('x', env_load_fn=lambda name: Images(), num_parallel_environments=2,
                                nonparallel=nonparallel) as env:
            assert env.reset().observation[:, :, 0, 0].tolist() == [[1, 2, 3]] * 2
        gin.bind_parameter('wrap_env.image_channel_first', False)
        with create_environment('x', env_load_fn=lambda name: Images(), num_parallel_environments=2,
                                nonparallel=nonparallel) as env:
            assert env.observation_spec().shape == (5, 6, 3)

    @pytest.mark.parametrize('by_name', [True, False])
    def test_functions_with_any_arguments_are_given_the_render_mode(self, by_name):
        def load(*_, **arguments):
            return gymnasium.make('CartPole-v1', **arguments)

        arguments = dict(env_name=load) if by_name else dict(env_name='x', env_load_fn=load)
        with rendering.wanted(True), create_environment(num_parallel_environments=1, nonparallel=True,
                                                        **arguments) as env:
            env.reset()
            assert env.render().shape == (400, 600, 3)

    @pytest.mark.parametrize('make', [
        lambda: ChainEnv(3), lambda render_mode=None: ChainEnv(3), lambda *, render_mode=None: ChainEnv(3),
        lambda length=3, env_id=0: ChainEnv(length), lambda **_: ChainEnv(3), lambda name='4': ChainEnv(int(name) - 1),
        lambda game='4': ChainEnv(int(game) - 1), lambda env_name=None: ChainEnv(int(env_name) - 1),
        lambda x, length=3: ChainEnv(int(x) - 1)])
    def test_the_name_is_given_to_functions_that_take_one(self, make):
        with create_environment('4', env_load_fn=make, num_parallel_environments=1, nonparallel=True) as env:
            assert env.observation_spec() == AlfGymWrapper(ChainEnv(3)).observation_spec()

    def test_a_batch_of_environments_of_several_tasks(self):
        load = partial(MultitaskWrapper.load, suite_gym.load)
        env = create_environment(['CartPole-v1', 'CartPole-v0'], env_load_fn=load, num_parallel_environments=3,
                                 nonparallel=True, seed=0)
        assert env.reset().env_info['task_id'].tolist() == [0, 1, 0] and env.num_tasks == 2

    def test_wrappers_of_the_batch(self):
        env = create_environment(num_parallel_environments=2, nonparallel=True,
                                 batched_wrappers=[ActionObservationWrapper])
        assert set(env.observation_spec()) == {'observation', 'prev_action'}

    def test_a_class_needs_a_function_that_loads_classes(self):
        with pytest.raises(EnvironmentLoadError, match='suite_goals.load expects a name, found.*@suite_gym.load'):
            create_environment(CountEnv, env_load_fn=suite_goals.load, nonparallel=True)

    def test_an_existing_environment_stays_in_this_process(self):
        env = gymnasium.make('CartPole-v1')
        with pytest.raises(EnvironmentLoadError, match='cannot be stepped in another process; pass a list'):
            suite_gym.wrap_env(env, vector_env=partial(ProcessVectorEnv, max_restarts=1))
        assert suite_gym.wrap_env(env).reset().is_first()

    def test_another_constructor_of_the_parallel_environment(self):
        env = create_environment(num_parallel_environments=2, parallel_environment_ctor=SerialVectorEnv)
        assert isinstance(env.gym, SerialVectorEnv)

    def test_restarts(self):
        make = partial(create_environment, 'x', env_load_fn=lambda name: RaisingEnv('step'), nonparallel=True,
                       num_parallel_environments=1, seed=0)
        assert sequence(make(max_restarts=5)).shape == (7, 1, 4)
        with pytest.raises(EnvironmentStepError, match='boom in step'):
            sequence(make())

    @pytest.mark.parametrize('arguments, message', [
        ({'num_spare_envs': 1}, 'num_spare_envs=1 is not supported.*max_restarts'),
        ({'flatten': False}, 'flatten=False is not supported'),
        ({'num_parallel_environments': 0}, 'num_parallel_environments: expected at least 1'),
        ({'nonparallel': True, 'batch_size_per_env': 2}, 'batch_size_per_env=2: with nonparallel=True'),
        ({'env_name': 'CartPol-v1'}, "did you mean 'CartPole-v1'"),
    ])
    def test_unsupported_features_are_rejected_by_name(self, arguments, message):
        with pytest.raises(EnvironmentLoadError, match=message):
            create_environment(**arguments)

    def test_an_evaluation_in_this_process_ignores_the_batches_of_workers(self):
        env = create_environment('CartPole-v1', num_parallel_environments=1, for_evaluation=True, nonparallel=True,
                                 batch_size_per_env=4)
        assert env.batch_size == 1

    def test_different_time_limits_for_each_environment(self):
        env = load_with_random_max_episode_steps('MountainCar-v0', min_steps=5, max_steps=20, batch_size=8, seed=0)
        env.reset()
        ends = torch.stack([env.step(torch.zeros(8, dtype=torch.int64)).is_last() for _ in range(20)])
        lengths = ends.int().argmax(0) + 1
        assert ends.any(0).all() and lengths.min() >= 5 and len(set(lengths.tolist())) > 3

    def test_random_time_limits_are_determined_by_the_seed_of_the_run(self):
        def limits(seed):
            np.random.seed(seed)  # noqa: NPY002 - as the run does
            found = []
            load_with_random_max_episode_steps('', lambda _, max_episode_steps, **__: found.extend(max_episode_steps),
                                               batch_size=8)
            return found

        assert limits(1) == limits(1) != limits(2)

    def test_time_limits_out_of_order_are_rejected(self):
        with pytest.raises(EnvironmentLoadError, match='1 <= min_steps <= max_steps'):
            load_with_random_max_episode_steps('MountainCar-v0', min_steps=5, max_steps=4)


class TestConfFiles:

    def test_a_conf_file_names_everything(self):
        gin.parse_config('''
            create_environment.env_name = 'Pendulum-v1'
            create_environment.num_parallel_environments = 2
            create_environment.nonparallel = True
            create_environment.env_load_fn = @suite_gym.load
            suite_gym.load.max_episode_steps = 3
            suite_gym.load.gym_env_wrappers = (@gym_wrappers.FrameStack, )
            FrameStack.stack_size = 2
            suite_gym.load.alf_env_wrappers = (@TimeLimit, )
            TimeLimit.duration = 2
            wrap_env.normalize_action = False
            ''')
        env = create_environment()
        assert env.observation_spec().shape == (6, ) and float(env.action_spec().maximum) == 2
        env.reset()
        assert not env.step(torch.zeros(2, 1)).is_last().any()
        assert env.step(torch.zeros(2, 1)).is_last().all()

    def test_bindings_and_seeds_hold_in_processes_that_inherit_nothing(self):
        gin.parse_config('''
            suite_gym.load.gym_env_wrappers = (@gym_wrappers.FrameStack, )
            FrameStack.stack_size = 2
            ''')
        sequences = []
        for arguments in ({'nonparallel': True}, {'context': 'spawn', 'batch_size_per_env': 2}):
            with create_environment('CartPole-v1', num_parallel_environments=2, seed=1, **arguments) as env:
                assert env.observation_spec().shape == (8, )
                sequences.append(sequence(env))
        torch.testing.assert_close(*sequences, rtol=0, atol=0)

    def test_every_public_constructor_is_known_to_conf_files(self):
        gin_utils.import_configurables()
        for name in ('alf_wrappers.CurriculumWrapper', 'alf_wrappers.CheckedEnvironment',
                     'gym_wrappers.NormalizedAction', 'gym_wrappers.DMAtariPreprocessing', 'suite_atari.load',
                     'suite_minigrid.load',
                     'load_with_random_max_episode_steps', 'ParallelAlfEnvironment', 'ProcessVectorEnv'):
            assert gin.config._REGISTRY.get_match(name) is not None, name
