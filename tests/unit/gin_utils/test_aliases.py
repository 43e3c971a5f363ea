"""Hints for names that other libraries use."""
import re

import pytest

from alfx import gin_utils
from alfx.gin_utils import ConfError, static_check
from alfx.gin_utils.aliases import ELSEWHERE, INSTEAD

OWNERS = {'*.torch_env_wrappers': 'suite_gym.load', '*.wrap_with_process': 'suite_gym.load',
          '*.actor_network': 'ActorCriticAlgorithm', '*.value_network': 'ActorCriticAlgorithm',
          '*.q_network': 'SacAlgorithm', '*.critic_network': 'SacAlgorithm', '*.gamma': 'SacAlgorithm',
          '*.use_parallel_network': 'SacAlgorithm'}


@pytest.fixture
def message_of(tmp_path):
    def message(*lines):
        path = tmp_path / 'c.gin'
        path.write_text('\n'.join(lines))
        with pytest.raises(ConfError) as caught:
            gin_utils.load(str(path))
        return str(caught.value)

    yield message
    gin_utils.clear()


@pytest.mark.parametrize('name', INSTEAD)
def test_an_unknown_name_raises_with_a_suggestion(name, message_of):
    owner, _, parameter = name.rpartition('.')
    if owner:
        line = f'{OWNERS.get(name, "Agent" if owner == "*" else owner)}.{parameter} = 1'
    else:
        line = f'Agent.name = @{name + ".load" if name.startswith("suite_") else name}'
    assert message_of(line).endswith(f'\n  {INSTEAD[name]}')


@pytest.mark.parametrize('text', sorted(set(INSTEAD.values())))
def test_suggestions_exist(text):
    gin_utils.import_configurables()
    for name in re.findall(r'@((?:suite_\w+\.)?\w+)', text):
        static_check.resolve(name)
    for owner, parameter in re.findall(r'(?<![@\w.])((?:[A-Z]\w+|create_environment|calc_\w+))\.(\w+)', text):
        parameters, _ = static_check.parameters_of(static_check.resolve(owner))
        assert parameter in parameters, f'{owner}.{parameter}'


def test_an_unknown_task_module_raises_with_the_way_to_load_tasks(message_of):
    assert 'by the id that they register' in message_of('import alf.environments.suite_mario')
    assert '@suite_minigrid.load' in message_of('import alfx.environments.suite_babyai')


@pytest.mark.parametrize('line, hint', [
    ('import alf', r'of_alf_0.py:2: this package is called alfx: import alfx instead of alf'),
    ('from alf.networks import EncodingNetwork', r'of_alf_1.py:2: this package is called alfx'),
    ('from alfx.networks import RealNVPNetwork', '  write @ActorDistributionNetwork and'),
    ('from alfx.networks import NoSuchNetwork', 'your own modules are searched for')])
def test_user_modules_get_an_import_suggestion(line, hint, message_of, tmp_path, request):
    module = f'of_alf_{request.node.callspec.indices["line"]}'
    (tmp_path / f'{module}.py').write_text(f'import math\n{line}\n')
    assert hint in message_of(f'import {module}')


def test_every_line_of_a_conf_gets_a_suggestion(message_of):
    message = message_of("import alf", "Agent.observation_transformer = @image_scale_transformer",
                         'TransformerNetwork.core_size = 2', 'PPOLoss.gama = 0.9')
    assert [line.split(':')[-2].strip() for line in re.findall(r'\S*c\.gin:\d: ', message)] == ['1', '2', '2', '3', '4']
    assert message.count('ImageScaleTransformer') >= 2 and 'attention is not available' in message
    assert "did you mean 'gamma'?" in message


@pytest.mark.parametrize('target', sorted(set(ELSEWHERE.values())))
def test_parameters_named_for_users_of_other_libraries_exist(target):
    selector, _, name = target.rpartition('.')
    assert name in static_check.parameters_of(static_check.resolve(selector))[0]
    assert target not in ELSEWHERE


@pytest.mark.parametrize('binding, hint', [
    ('Adam.learning_rate = 1e-3', "did you mean 'lr'?"),
    ('PPOLoss.clip_range = 0.2', "did you mean 'importance_ratio_clipping'?"),
    ('PPOLoss.ent_coef = 0.01', "did you mean 'entropy_regularization'?"),
    ('PPOAlgorithm.gae_lambda = 0.9', 'alfx calls it PPOLoss.td_lambda'),
    ('TrainerConfig.total_timesteps = 1000', "did you mean 'num_env_steps'?"),
    ('TrainerConfig.n_steps = 64', "did you mean 'unroll_length'?"),
    ('TrainerConfig.learning_rate = 64', 'alfx calls it Adam.lr'),
    ('create_environment.n_envs = 4', "did you mean 'num_parallel_environments'?"),
    ('create_environment.env_kwargs = {}', 'alfx calls it suite_gym.load.env_args'),
    ('PPOAlgorithm.norm_reward = True', 'write @DiscountedReturnScaling in'),
    ('create_environment.num_cpus = 4', "did you mean 'num_parallel_environments'?"),
    ('TrainerConfig.num_gpus = 1', 'choose the device on the command line'),
    ('Agent.gamma = 0.9', 'write OneStepTDLoss.gamma'),
    ('Adam.epss = 1', "did you mean 'eps'?"),
    ('create_environment.max_steps = 5', 'alfx calls it suite_gym.load.max_episode_steps'),
    ('suite_gym.load.max_steps = 5', "did you mean 'max_episode_steps'?"),
    ('TrainerConfig.max_steps = 5', "did you mean 'num_env_steps'?"),
    ("suite_gym.load.env_name = 'x'", 'alfx calls it create_environment.env_name'),
    ('create_environment.env_args = {}', 'alfx calls it suite_gym.load.env_args'),
    ('create_environment.wrappers = ()', 'alfx calls it suite_gym.load.gym_env_wrappers'),
    ('create_environment.env_num = 2', "did you mean 'num_parallel_environments'?"),
    ('TrainerConfig.n_step = 2', "did you mean 'unroll_length'?"),
    ("TrainerConfig.logdir = 'x'", "did you mean 'root_dir'?"),
    ('DqnAlgorithm.epsilon = 0.1', "did you mean 'rollout_epsilon_greedy'?"),
    ('SacAlgorithm.n_critics = 2', "did you mean 'num_critic_replicas'?"),
    ('Td3Algorithm.policy_noise = 0.1', "did you mean 'target_noise'?"),
    ('Td3Algorithm.act_noise = 0.1', "did you mean 'exploration_noise'?"),
    ('Td3Algorithm.policy_delay = 2', "did you mean 'policy_update_period'?"),
    ('DqnAlgorithm.n_steps = 3', 'mini_batch_length = n + 1'),
    ('EncodingNetwork.hidden_dim = 2', "did you mean 'fc_layer_params'?"),
])
def test_parameters_of_other_libraries_get_a_hint(message_of, binding, hint):
    assert hint in message_of(binding)
