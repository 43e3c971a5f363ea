"""Python confs of the Agent Learning Framework and the gin files that they become."""
import subprocess
import sys

import pytest
from helpers.flag_values import flag_values

from alfx import gin_utils
from alfx.bin import convert as convert_program
from alfx.config import TrainerConfig
from alfx.gin_utils import ConfError, python_to_gin
from alfx.trainers.policy_trainer import RLTrainer

# Each construct: the Python conf, and the same conf as a person would write it in gin.
SAME = {
    'literals': ('''
import alf
alf.config('TrainerConfig', num_iterations=3, evaluate=False, mini_batch_size=None, ml_type='rl', unroll_length=8)
alf.config('suite_gym.load', gym_env_wrappers=[])
alf.config('create_environment', env_name="it's")
alf.config('RewardClipping', minmax=(-1, 2.5))
alf.config('EncodingNetwork', input_preprocessors={'a': None, 'b': [None]})
alf.config('PPOLoss', value_clipping=float('inf'))
''', '''
TrainerConfig.num_iterations = 3
TrainerConfig.evaluate = False
TrainerConfig.mini_batch_size = None
TrainerConfig.ml_type = 'rl'
TrainerConfig.unroll_length = 8
suite_gym.load.gym_env_wrappers = []
create_environment.env_name = "it's"
RewardClipping.minmax = (-1, 2.5)
EncodingNetwork.input_preprocessors = {'a': None, 'b': [None]}
PPOLoss.value_clipping = %alfx.infinity
'''),
    'classes_and_functions': ('''
import alf
import alf.algorithms.agent
from alf.algorithms.sac_algorithm import SacAlgorithm as Sac
from alf.environments import suite_gym
from alf.utils.losses import element_wise_huber_loss
alf.config('TrainerConfig', algorithm_ctor=alf.algorithms.agent.Agent)
alf.config('Agent', rl_algorithm_cls=Sac)
alf.config('create_environment', env_load_fn=suite_gym.load)
alf.config('OneStepTDLoss', td_error_loss_fn=element_wise_huber_loss)
''', '''
TrainerConfig.algorithm_ctor = @Agent
Agent.rl_algorithm_cls = @SacAlgorithm
create_environment.env_load_fn = @suite_gym.load
OneStepTDLoss.td_error_loss_fn = @element_wise_huber_loss
'''),
    'nested_partials': ('''
from functools import partial
import alf
from alf.networks import ActorDistributionNetwork, NormalProjectionNetwork
actor = partial(
    ActorDistributionNetwork,
    fc_layer_params=(16, 16),
    continuous_projection_net_ctor=partial(
        NormalProjectionNetwork, state_dependent_std=True,
        std_transform=partial(alf.math.clipped_exp, clip_value_min=-10, clip_value_max=2)))
alf.config('SacAlgorithm', actor_network_cls=actor)
''', '''
SacAlgorithm.actor_network_cls = @actor/ActorDistributionNetwork
actor/ActorDistributionNetwork.fc_layer_params = (16, 16)
actor/ActorDistributionNetwork.continuous_projection_net_ctor = @continuous_projection_net/NormalProjectionNetwork
continuous_projection_net/NormalProjectionNetwork.state_dependent_std = True
continuous_projection_net/NormalProjectionNetwork.std_transform = @std_transform/clipped_exp
std_transform/clipped_exp.clip_value_min = -10
std_transform/clipped_exp.clip_value_max = 2
'''),
    'partial_without_arguments': ('''
import functools, alf
alf.config('TrainerConfig', algorithm_ctor=functools.partial(alf.algorithms.agent.Agent))
''', 'TrainerConfig.algorithm_ctor = @Agent'),
    'instances': ('''
import alf
alf.config('Agent', optimizer=alf.optimizers.Adam(lr=1e-3, betas=(0.9, 0.99)))
alf.config('SacAlgorithm', actor_optimizer=alf.optimizers.AdamTF(), critic_optimizer=alf.optimizers.AdamTF(lr=2e-3))
''', '''
Agent.optimizer = @optimizer/Adam()
optimizer/Adam.lr = 0.001
optimizer/Adam.betas = (0.9, 0.99)
SacAlgorithm.actor_optimizer = @AdamTF()
SacAlgorithm.critic_optimizer = @critic_optimizer/AdamTF()
critic_optimizer/AdamTF.lr = 0.002
'''),
    'instances_inside_containers': ('''
import alf
alf.config('EncodingNetwork', input_preprocessors={
    'image': alf.nn.Identity() if False else alf.layers.Cast(), 'goal': [alf.layers.OneHot(num_classes=4), None]},
    preprocessing_combiner=alf.nest.utils.NestConcat())
alf.config('TrainerConfig', data_transformer_ctor=[alf.algorithms.data_transformer.RewardScaling])
''', '''
EncodingNetwork.input_preprocessors = {'image': @Cast(), 'goal': [@input_preprocessors/OneHot(), None]}
input_preprocessors/OneHot.num_classes = 4
EncodingNetwork.preprocessing_combiner = @NestConcat()
TrainerConfig.data_transformer_ctor = [@RewardScaling]
'''),
    'arguments_without_names': ('''
from functools import partial
import alf
from alf.algorithms.data_transformer import FrameStacker, RewardScaling
alf.config('TrainerConfig', data_transformer_ctor=partial(RewardScaling, 0.1))
alf.config('EncodingNetwork', input_preprocessors=alf.layers.OneHot(4))
''', '''
TrainerConfig.data_transformer_ctor = @data_transformer/RewardScaling
data_transformer/RewardScaling.scale = 0.1
EncodingNetwork.input_preprocessors = @input_preprocessors/OneHot()
input_preprocessors/OneHot.num_classes = 4
'''),
    'one_partial_in_two_places': ('''
from functools import partial
import alf
critic = partial(alf.networks.CriticNetwork, joint_fc_layer_params=(8,))
alf.config('SacAlgorithm', critic_network_cls=critic)
alf.config('DdpgAlgorithm', critic_network_ctor=critic)
''', '''
SacAlgorithm.critic_network_cls = @critic/CriticNetwork
DdpgAlgorithm.critic_network_ctor = @critic/CriticNetwork
critic/CriticNetwork.joint_fc_layer_params = (8,)
'''),
    'two_partials_of_one_name': ('''
from functools import partial
import alf
make = lambda size: partial(alf.networks.EncodingNetwork, fc_layer_params=(size,))
alf.config('ActorNetworkBase', encoding_network_ctor=make(4))
alf.config('ValueNetworkBase', encoding_network_ctor=make(8))
''', '''
ActorNetworkBase.encoding_network_ctor = @encoding_network/EncodingNetwork
encoding_network/EncodingNetwork.fc_layer_params = (4,)
ValueNetworkBase.encoding_network_ctor = @encoding_network_2/EncodingNetwork
encoding_network_2/EncodingNetwork.fc_layer_params = (8,)
'''),
    'define_config': ('''
import alf
hidden = alf.define_config('hidden', (32, 32))
lr = alf.define_config('lr', 1e-3)
rate = alf.define_config('opt', alf.optimizers.Adam(lr=lr))
alf.config('EncodingNetwork', fc_layer_params=hidden)
alf.config('QNetwork', fc_layer_params=hidden, conv_layer_params=((hidden[0], 3, 1),))
alf.config('Agent', optimizer=rate)
''', '''
hidden = (32, 32)
lr = 0.001
opt = @rate/Adam()
rate/Adam.lr = %lr
EncodingNetwork.fc_layer_params = %hidden
QNetwork.fc_layer_params = %hidden
QNetwork.conv_layer_params = ((32, 3, 1),)
Agent.optimizer = %opt
'''),
    'get_config_value': ('''
import alf
alf.define_config('batch', 64)
alf.config('create_environment', num_parallel_environments=6)
envs = alf.get_config_value('create_environment.num_parallel_environments')
default = alf.get_config_value('TrainerConfig.num_updates_per_train_iter')
alf.config('TrainerConfig', mini_batch_size=alf.get_config_value('batch') * envs,
           num_updates_per_train_iter=default + 1)
''', '''
create_environment.num_parallel_environments = 6
TrainerConfig.mini_batch_size = 384
TrainerConfig.num_updates_per_train_iter = 5
'''),
    'dict_of_bindings': ('''
import alf
alf.config({'TrainerConfig.unroll_length': 5, 'alf.environments.suite_gym.load.max_episode_steps': 100})
''', '''
TrainerConfig.unroll_length = 5
suite_gym.load.max_episode_steps = 100
'''),
    'loops_conditions_and_functions': ('''
import math
import alf

def size(depth, scale=2):
    return tuple(scale * int(math.sqrt(16)) for _ in range(depth))

same = alf.networks.ValueNetwork == alf.networks.value_networks.ValueNetwork
if same:
    alf.config('ValueNetwork', fc_layer_params=size(2))
for name in ['fc_layer_params', 'conv_layer_params']:
    alf.config('QNetwork', **{name: None})
''', '''
ValueNetwork.fc_layer_params = (8, 8)
QNetwork.fc_layer_params = None
QNetwork.conv_layer_params = None
'''),
    'later_bindings_override': ('''
import alf
alf.config('TrainerConfig', unroll_length=5, num_iterations=7, mutable=False)
alf.config('SacAlgorithm', target_update_tau=0.1)
alf.config('alf.algorithms.sac_algorithm.SacAlgorithm', target_update_tau=0.2)
alf.config('TrainerConfig', unroll_length=6)
''', '''
TrainerConfig.unroll_length = 5
TrainerConfig.num_iterations = 7
SacAlgorithm.target_update_tau = 0.2
'''),
    'pre_config': ('''
import alf
alf.pre_config({'TrainerConfig.unroll_length': 2, 'hidden': (4,)})
alf.config('TrainerConfig', unroll_length=5)
alf.config('ValueNetwork', fc_layer_params=alf.define_config('hidden', (8,)))
''', '''
hidden = (4,)
TrainerConfig.unroll_length = 2
ValueNetwork.fc_layer_params = %hidden
'''),
    'specs': ('''
import alf
from alf.utils import common
from functools import partial
image = alf.get_raw_observation_spec('image')
encoder = partial(alf.networks.EncodingNetwork, input_tensor_spec=alf.get_observation_spec())
alf.config('EncodingAlgorithm', encoder_cls=encoder)
alf.config('DecodingAlgorithm', decoder=alf.networks.ActorNetwork(image, action_spec=common.get_action_spec()))
''', '''
EncodingAlgorithm.encoder_cls = @encoder/EncodingNetwork
encoder/EncodingNetwork.input_tensor_spec = @get_observation_spec()
DecodingAlgorithm.decoder = @decoder/ActorNetwork()
decoder/ActorNetwork.input_tensor_spec = @image/get_raw_observation_spec()
image/get_raw_observation_spec.field = 'image'
decoder/ActorNetwork.action_spec = @get_action_spec()
'''),
    'functions_and_dtypes_of_torch': ('''
import numpy as np
import torch
import torch.nn as nn
import alf
from functools import partial
alf.config('EncodingNetwork', activation=torch.relu_, last_activation=nn.functional.softplus,
           kernel_initializer=partial(torch.nn.init.normal_, std=0.1))
alf.config('BoundedTensorSpec', dtype=torch.int64, shape=torch.Size([2]), minimum=np.float32(0.5), maximum=np.int64(3))
alf.config('FC', bn_ctor=torch.nn.BatchNorm1d)
''', '''
EncodingNetwork.activation = @torch.relu_
EncodingNetwork.last_activation = @torch.nn.functional.softplus
EncodingNetwork.kernel_initializer = @kernel_initializer/torch.nn.init.normal_
kernel_initializer/torch.nn.init.normal_.std = 0.1
BoundedTensorSpec.dtype = 'int64'
BoundedTensorSpec.shape = (2,)
BoundedTensorSpec.minimum = 0.5
BoundedTensorSpec.maximum = 3
FC.bn_ctor = @torch.nn.BatchNorm1d
'''),
    'other_names_of_modules': ('''
import alf
import alf.nn as nn
from alf.math import clipped_exp
from alf.nn import ValueNetwork
from alf.config_util import config
config('ActorCriticAlgorithm', value_network_ctor=ValueNetwork, actor_network_ctor=nn.ActorDistributionNetwork)
config('NormalProjectionNetwork', std_transform=clipped_exp)
''', '''
ActorCriticAlgorithm.value_network_ctor = @ValueNetwork
ActorCriticAlgorithm.actor_network_ctor = @ActorDistributionNetwork
NormalProjectionNetwork.std_transform = @clipped_exp
'''),
    'import_of_everything': ('''
from functools import partial
import alf
from alf.nn import *
from alf.utils.losses import *
from alf.algorithms.data_transformer import *
alf.config('TrainerConfig', data_transformer_ctor=partial(RewardScaling, scale=0.5))
alf.config('OneStepTDLoss', td_error_loss_fn=element_wise_huber_loss)
alf.config('ActorCriticAlgorithm', value_network_ctor=ValueNetwork)
''', '''
TrainerConfig.data_transformer_ctor = @data_transformer/RewardScaling
data_transformer/RewardScaling.scale = 0.5
OneStepTDLoss.td_error_loss_fn = @element_wise_huber_loss
ActorCriticAlgorithm.value_network_ctor = @ValueNetwork
'''),
    'tensor_specs': ('''
import alf, torch
latent = alf.TensorSpec((32,))
alf.config('EncodingNetwork', output_tensor_spec=latent)
alf.config('VariationalAutoEncoder', input_tensor_spec=alf.tensor_specs.BoundedTensorSpec((3,), torch.uint8, 0, 255))
''', '''
EncodingNetwork.output_tensor_spec = @latent/TensorSpec()
latent/TensorSpec.shape = (32,)
VariationalAutoEncoder.input_tensor_spec = @input_tensor_spec/BoundedTensorSpec()
input_tensor_spec/BoundedTensorSpec.shape = (3,)
input_tensor_spec/BoundedTensorSpec.dtype = 'uint8'
input_tensor_spec/BoundedTensorSpec.minimum = 0
input_tensor_spec/BoundedTensorSpec.maximum = 255
'''),
    'schedules': ('''
import alf
from alf.utils.schedulers import LinearScheduler
alf.config('Agent', optimizer=alf.optimizers.Adam(
    lr=LinearScheduler(progress_type='percent', schedule=[(0.0, 1e-3), (1.0, 0.0)])))
''', '''
Agent.optimizer = @optimizer/Adam()
optimizer/Adam.lr = @lr/LinearScheduler()
lr/LinearScheduler.progress_type = 'percent'
lr/LinearScheduler.schedule = [(0.0, 0.001), (1.0, 0.0)]
'''),
}

# Each construct that a gin file cannot express: the conf, with a comment on the line to report, and the message.
REPORTED = {
    'lambda': ('''
import alf
alf.config('EncodingNetwork',
           activation=lambda x: x)  # reported
''', 'a gin file cannot express a lambda\n  move it to a module next to the conf'),
    'lambda_in_a_partial': ('''
import alf, functools
double = lambda x: 2 * x  # reported
alf.config('SacAlgorithm', actor_network_cls=functools.partial(alf.networks.ActorNetwork, activation=double))
''', 'cannot express a lambda'),
    'function_of_the_conf': ('''
import alf
def double(x):  # reported
    return 2 * x
alf.config('EncodingNetwork', activation=double)
''', 'cannot express double, which the conf defines'),
    'class_of_the_conf': ('''
import alf
class Mine(alf.algorithms.sac_algorithm.SacAlgorithm):  # reported
    pass
alf.config('Agent', rl_algorithm_cls=Mine)
''', 'cannot express Mine, which the conf defines'),
    'partial_of_a_class_of_the_conf': ('''
import alf, functools
class Mine:  # reported
    pass
alf.config('Agent', rl_algorithm_cls=functools.partial(Mine, x=1))
''', 'cannot express Mine, which the conf defines'),
    'loop_over_specs': ('''
import alf
specs = alf.get_observation_spec()
preprocessors = {name: alf.layers.Cast() for name in specs}  # reported
alf.config('EncodingNetwork', input_preprocessors=preprocessors)
''', 'the conf computes with the result of get_observation_spec()\n  it exists only once a run has started'),
    'number_of_a_spec': ('''
import alf
n = alf.get_action_spec().shape[0]  # reported
alf.config('QNetwork', fc_layer_params=(n, 2 * n))
''', 'the conf computes with the result of get_action_spec()'),
    'type_of_a_spec': ('''
import alf
if isinstance(alf.get_observation_spec(), dict):  # reported
    alf.config('TrainerConfig', unroll_length=3)
''', 'the conf computes with the result of get_observation_spec()'),
    'text_of_a_spec': ('''
import alf
alf.config('Agent', name=f'agent for {alf.get_observation_spec()}')  # reported
''', 'the conf computes with the result of get_observation_spec()'),
    'product_of_a_shape': ('''
import alf
import numpy as np
alf.config('QNetwork', fc_layer_params=(int(np.prod(alf.get_observation_spec().shape)),))  # reported
''', 'the conf computes with the result of get_observation_spec()'),
    'condition_on_a_spec': ('''
import alf
if alf.get_action_spec().is_discrete:  # reported
    alf.config('TrainerConfig', unroll_length=3)
''', 'the conf computes with the result of get_action_spec()'),
    'function_applied_to_specs': ('''
import alf
preprocessors = alf.nest.map_structure(lambda s: alf.layers.Cast(), alf.get_observation_spec())  # reported
alf.config('EncodingNetwork', input_preprocessors=preprocessors)
''', 'map_structure() is called with objects that only a run creates'),
    'absent_name': ('''
import alf
from alf.networks import TransformerNetwork
alf.config('MerlinAlgorithm', encoder_cls=TransformerNetwork)  # reported
''', "alfx has no 'networks.TransformerNetwork'\n  attention is not available"),
    'absent_configurable': ('''
import alf
alf.config('SacAlgoritm', target_update_tau=0.1)  # reported
''', "did you mean 'SacAlgorithm'?"),
    'absent_parameter': ('''
import alf
alf.config('SacAlgorithm', target_update_tua=0.1)  # reported
''', "did you mean 'target_update_tau'?"),
    'absent_parameter_of_a_partial': ('''
import alf, functools
critic = functools.partial(alf.networks.CriticNetwork, layers=(3,))
alf.config('SacAlgorithm', critic_network_cls=critic)  # reported
''', "CriticNetwork has no parameter 'layers'"),
    'wrong_type': ('''
import alf
alf.config('TrainerConfig', num_iterations='many')  # reported
''', 'TrainerConfig.num_iterations expects int'),
    'absent_conf': ('''
import alf
alf.import_config('base_conf.py')  # reported
''', "cannot import the conf 'base_conf.py': not found next to the conf"),
    'arguments_without_names': ('''
import alf
cast = alf.layers.Cast(1, 2)  # reported
alf.config('EncodingNetwork', input_preprocessors=cast)
''', 'a gin file binds named parameters, and Cast has unnamed ones'),
    'arguments_without_names_before_others': ('''
import alf, functools
from alf.algorithms.containers import SequentialAlg
alf.config('TrainerConfig', algorithm_ctor=functools.partial(SequentialAlg, ('a', 'b'), True))  # reported
''', 'a gin file binds named parameters, and SequentialAlg has unnamed ones'),
    'class_that_is_not_configurable': ('''
import alf
alf.config('EncodingNetwork', input_preprocessors=alf.nn.Sequential)  # reported
''', 'cannot express Sequential, which is not configurable'),
    'object_of_another_package': ('''
import alf, torch
alf.config('EncodingNetwork', input_preprocessors=torch.nn.ReLU())  # reported
''', 'cannot express the value ReLU()'),
    'not a number': ('''
import alf
alf.config('RewardClipping', minmax=(0, float('nan')))  # reported
''', 'cannot express the value nan'),
    'exception': ('''
import alf
size = {}['a']  # reported
alf.config('TrainerConfig', unroll_length=size)
''', "KeyError: 'a'"),
    'absent_package': ('import no_such_package  # reported', "No module named 'no_such_package'"),
    'module_that_imports_alf': ('import own_unported  # reported', 'replace alf by alfx in it'),
    'call_without_result': ('''
import alf
alf.nest.assert_same_structure((1,), (2,))  # reported
''', 'a gin file cannot call assert_same_structure()'),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'path', list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith('own_'):
            del sys.modules[name]
    gin_utils.clear()


def convert(folder, text, *params):
    (folder / 'x_conf.py').write_text(text)
    return python_to_gin.convert('x_conf.py', params)


def effective(text):
    """Return the bindings of a gin text, as gin prints them."""
    with open('loaded.gin', 'w') as file:
        file.write(text)
    gin_utils.load('loaded.gin')
    return gin_utils.config_str()


@pytest.mark.parametrize('python, gin', SAME.values(), ids=SAME)
def test_a_construct_becomes_the_gin_a_person_writes(python, gin, folder):
    found = convert(folder, python)
    assert found.problems == []
    assert effective(found.text) == effective(gin)


@pytest.mark.parametrize('python, message', REPORTED.values(), ids=REPORTED)
def test_code_that_gin_cannot_express_is_reported_with_its_line(python, message, folder):
    (folder / 'own_unported.py').write_text('import alf\n')
    found = convert(folder, python)
    (problem,) = [str(problem) for problem in found.problems]
    line = 1 + [line.endswith('# reported') for line in python.splitlines()].index(True)
    assert problem.startswith(f'x_conf.py:{line}: ') and message in problem
    with pytest.raises(ConfError):  # so that an incomplete conf is not trained
        effective(found.text)


def test_the_rest_of_an_incomplete_conf_is_converted(folder):
    found = convert(folder, '''
import alf
spec = alf.get_observation_spec()
alf.config('EncodingNetwork', fc_layer_params=(4,), input_preprocessors={k: None for k in spec}, activation=lambda x: x)
alf.config('TrainerConfig', unroll_length=3)
''')
    assert [problem.location for problem in found.problems] == ['x_conf.py:4'] * 2
    for line in ('EncodingNetwork.fc_layer_params = (4,)', 'EncodingNetwork.input_preprocessors = %gin.REQUIRED',
                 'TrainerConfig.unroll_length = 3'):
        assert f'\n{line}\n' in found.text
    with pytest.raises(ConfError, match='EncodingNetwork.activation is required and has no value'):
        effective(found.text)


def test_an_unused_absent_name_is_no_problem(folder):
    found = convert(folder, 'import alf.environments.suite_carla\nfrom alf.networks import TransformerNetwork\n')
    assert found.problems == []


def test_imported_confs_are_part_of_the_gin_file(folder):
    (folder / 'base_conf.py').write_text('import alf\nsize = (8,)\nalf.config("ValueNetwork", fc_layer_params=size)\n')
    (folder / 'middle_conf.py').write_text('import alf\nbase = alf.import_config("base_conf.py")\n'
                                           'alf.config("QNetwork", fc_layer_params=base.size)\n')
    found = convert(folder, '''
import alf
import middle_conf
from base_conf import size
from alf.examples import base_conf
alf.config('ValueNetwork', fc_layer_params=size + base_conf.size)
''')
    assert found.problems == []
    assert effective(found.text) == effective('QNetwork.fc_layer_params = (8,)\nValueNetwork.fc_layer_params = (8, 8)')


def test_confs_of_the_examples_package_are_executed_once(folder):
    (folder / 'base_conf.py').write_text('import alf\nsize = 4\nalf.config("FrameStacker", stack_size=size)\n')
    (folder / 'other_conf.py').write_text('from alf.examples import base_conf\n')
    (folder / 'tasks').mkdir()
    (folder / 'tasks' / 'walk_conf.py').write_text('import alf\nalf.config("TrainerConfig", unroll_length=3)\n')
    (folder / 'own_rewards.py').write_text('def reward_of_walk(observation, action):\n    return action\n')
    found = convert(folder, '''
import alf
import alf.examples.base_conf
alf.config('FrameStacker', stack_size=2)
from alf.examples import other_conf
from alf.examples.base_conf import size
from alf.examples.tasks import walk_conf
from alf.examples.own_rewards import reward_of_walk
alf.config('FixedRewardFunction', reward_func=reward_of_walk)
alf.config('TrainerConfig', mini_batch_size=size)
''')
    assert found.problems == []
    assert effective(found.text) == effective('''
import own_rewards
FrameStacker.stack_size = 2
FixedRewardFunction.reward_func = @own_rewards.reward_of_walk
TrainerConfig.unroll_length = 3
TrainerConfig.mini_batch_size = 4
''')


def test_a_conf_that_two_confs_import_is_executed_once(folder):
    (folder / 'base_conf.py').write_text('import alf\nalf.config("FrameStacker", stack_size=4)\n')
    (folder / 'task_conf.py').write_text('import alf\nalf.import_config("base_conf.py")\n'
                                         'alf.config("FrameStacker", stack_size=2)\n')
    (folder / 'other_conf.py').write_text('import alf\nalf.import_config("base_conf.py")\n')
    found = convert(folder, 'import alf\nalf.import_config("task_conf.py")\nalf.import_config("other_conf.py")\n')
    assert found.problems == [] and effective(found.text) == effective('FrameStacker.stack_size = 2')


def test_the_end_of_a_block_with_an_error_is_reported(folder):
    found = convert(folder, '''
import alf
for lr in (0.5, 0.6):
    alf.config('Adam', lr=lr)
    alf.config('AdamW', lr=undefined)
    alf.config('TrainerConfig', random_seed=3)
def rest():
    alf.config('AdamW', lr=undefined)
    alf.config('TrainerConfig', unroll_length=4)
rest()
''')
    assert [problem.location for problem in found.problems] == [f'x_conf.py:{line}' for line in (3, 5, 8, 10)]
    for problem in (found.problems[0], found.problems[3]):
        assert 'the statements after the error' in problem.message and 'by hand' in problem.hint


def test_all_names_of_an_own_module_can_be_imported(folder):
    (folder / 'own_sizes.py').write_text('SIZE = 3\n_hidden = 4\n')
    found = convert(folder, 'import alf\nfrom own_sizes import *\nalf.config("FrameStacker", stack_size=SIZE)\n')
    assert found.problems == []
    assert effective(found.text) == effective('import own_sizes\nFrameStacker.stack_size = 3')


def test_members_of_enumerations_and_numpy_booleans_are_plain_values(folder):
    found = convert(folder, '''
import enum, alf, numpy as np
class Task(str, enum.Enum):
    A = 'CartPole-v1'
weights = alf.define_config('weights', np.zeros((2, 2)))
alf.config('create_environment', env_name=Task.A)
alf.config('suite_gym.load', env_args={'flag': np.bool_(True)})
''')
    assert found.problems == []
    assert effective(found.text) == effective(
        "create_environment.env_name = 'CartPole-v1'\nsuite_gym.load.env_args = {'flag': True}")


@pytest.mark.parametrize('line', ['import alf.examples.nowhere_conf', 'from alf.examples.nowhere import reward',
                                  'from alf.examples import nowhere_conf'])
def test_a_missing_module_of_the_examples_package_is_reported(line, folder):
    (problem,) = convert(folder, f'import alf\n{line}').problems
    assert str(problem).startswith("x_conf.py:2: cannot import the conf 'nowhere") and 'copy it next to' in problem.hint


def test_a_conf_that_imports_itself_is_reported(folder):
    (folder / 'y_conf.py').write_text('import alf\nalf.import_config("x_conf.py")')
    found = convert(folder, 'import alf\nalf.import_config("y_conf.py")')
    assert str(found.problems[0]).startswith("y_conf.py:2: cannot import the conf 'x_conf.py': it imports itself")


def test_modules_of_the_user_are_imported_by_the_gin_file(folder):
    (folder / 'own_parts.py').write_text('''
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.gin_utils import configurable

@configurable
class OwnSac(SacAlgorithm):
    def __init__(self, observation_spec, action_spec, extra=1, **kwargs):
        super().__init__(observation_spec, action_spec, **kwargs)

class Preprocessor:
    def __init__(self, size=1):
        self.size = size

def double(x):
    return 2 * x

def sizes(n):
    return (n,)
''')
    found = convert(folder, '''
from functools import partial
import alf
import own_parts
from own_parts import OwnSac, Preprocessor, double
alf.config('Agent', rl_algorithm_cls=partial(OwnSac, extra=2))
alf.config('EncodingNetwork', activation=double, input_preprocessors=Preprocessor(size=3),
           fc_layer_params=own_parts.sizes(3))
''')
    assert found.problems == []
    assert effective(found.text) == effective('''
import own_parts
Agent.rl_algorithm_cls = @rl_algorithm/own_parts.OwnSac
rl_algorithm/own_parts.OwnSac.extra = 2
EncodingNetwork.activation = @own_parts.double
EncodingNetwork.input_preprocessors = @input_preprocessors/own_parts.Preprocessor()
input_preprocessors/own_parts.Preprocessor.size = 3
EncodingNetwork.fc_layer_params = (3,)
''')


def test_functions_registered_with_plain_gin_are_named(folder):
    (folder / 'own_reward.py').write_text('''
import gin

@gin.configurable
def own_reward_of_gin(obs, action):
    return -obs
''')
    found = convert(folder, '''
import alf
from alf.algorithms.reward_learning_algorithm import FixedRewardFunction
from alf.examples.own_reward import own_reward_of_gin
alf.config('MbrlAlgorithm', reward_module=FixedRewardFunction(own_reward_of_gin))
''')
    assert found.problems == []
    assert 'FixedRewardFunction.reward_func = @own_reward.own_reward_of_gin\n' in found.text
    assert 'own_reward_of_gin' in effective(found.text)


def test_an_unknown_class_is_reported_once_for_a_call(folder):
    problems = [str(problem) for problem in convert(folder, '''
import alf
alf.config('DSacAlgorithm', target_update_tau=0.01, target_update_period=2)
''').problems]
    assert problems == ["x_conf.py:3: there is no configurable 'DSacAlgorithm'\n  did you mean 'SacAlgorithm'?"]


def test_a_renamed_class_is_suggested_where_it_is_used(folder):
    (problem,) = convert(folder, '''
import alf
from alf.algorithms.mpo_algorithm import MPOAlgorithm
alf.config('TrainerConfig', algorithm_ctor=MPOAlgorithm)
''').problems
    assert problem.hint == "did you mean 'MpoAlgorithm'?"


def test_modules_of_alf_that_have_moved_are_found_without_a_warning(folder, recwarn):
    found = convert(folder, '''
import alf
from alf.utils import datagen
alf.config('HyperNetwork', data_creator=datagen.load_test)
''')
    assert found.problems == [] and not [w for w in recwarn if 'datagen' in str(w.message)]


@pytest.mark.parametrize('prefix', ['', '_CONFIG._USER.'])
def test_names_of_the_conf_can_be_set_as_in_alf(prefix, folder):
    found = convert(folder, '''
import alf
alf.define_config('steps', 8)
alf.config('TrainerConfig', unroll_length=2 * alf.get_config_value('_CONFIG._USER.steps'))
''', f'{prefix}steps=3')
    assert found.problems == [] and 'TrainerConfig.unroll_length = 6\n' in found.text


def test_parameters_of_the_command_precede_the_conf(folder):
    text = ('import alf\nn = alf.define_config("n", 4)\nflag = alf.define_config("flag", True)\n'
            'alf.config("TrainerConfig", unroll_length=3, mini_batch_size=2 * n if flag else 1)')
    assert 'mini_batch_size = 8\n' in convert(folder, text).text
    found = convert(folder, text, 'n=16', 'TrainerConfig.unroll_length=9')
    assert 'unroll_length = 9\n' in found.text and 'mini_batch_size = 32\n' in found.text and found.notes == []
    assert 'mini_batch_size = 1\n' in convert(folder, text, 'flag=False').text
    with pytest.raises(ConfError, match="defines no value 'flog'\n  did you mean 'flag'"):
        convert(folder, text, 'flog=1')
    with pytest.raises(ConfError, match='neither scopes nor imports'):
        convert(folder, text, 'a/TrainerConfig.unroll_length=9')


def test_values_that_the_code_computes_with_are_marked(folder):
    found = convert(folder, """
import alf
left, right, passed, sizes = (alf.define_config(n, v) for n, v in dict(left=4, right=2, passed=5, sizes=(3,)).items())
alf.config('TrainerConfig', unroll_length=left, mini_batch_size=left * right, mini_batch_length=passed,
           num_iterations=right)
alf.config('ValueNetwork', fc_layer_params=sizes)
alf.config('QNetwork', fc_layer_params=[2 * size for size in sizes])
""")
    comment = "\n#   also used by the Python code: to change it, convert again with --conf_param '{}=...'\n"
    assert [name for name in ('left', 'right', 'passed', 'sizes') if comment.format(name) in found.text] == [
        'left', 'right', 'sizes']


def test_comments_and_docstring_of_the_header_are_preserved(folder):
    found = convert(folder, '#!/usr/bin/python\n# Soft actor-critic\n#   task  Pendulum\n\n"""More.\n\nAnd more."""\n'
                            'import alf  # not this\n# nor this\nalf.config("TrainerConfig", unroll_length=1)')
    assert found.text == ('# Soft actor-critic\n#   task  Pendulum\n# More.\n#\n# And more.\n'
                          '# Converted from x_conf.py by alfx convert\n\nTrainerConfig.unroll_length = 1\n')


def test_an_instance_shared_by_several_places_is_noted(folder):
    found = convert(folder, 'import alf\nhot = alf.layers.OneHot(4)\nalf.config("QNetwork", input_preprocessors=hot)\n'
                            'alf.config("ValueNetwork", input_preprocessors=hot)')
    assert found.notes == ['x_conf.py:4: the conf uses one OneHot in several places; the gin file makes one for each']
    assert found.problems == []


def test_output_of_the_conf_does_not_mix_with_the_gin_file(folder, capsys):
    convert(folder, 'print("hello")')
    assert capsys.readouterr() == ('', 'hello\n')


def test_files_that_are_no_python_confs_are_rejected(folder):
    (folder / 'x.gin').write_text('')
    (folder / 'broken_conf.py').write_text('import alf\nalf.config(\n')
    for name, message in (('none_conf.py', 'there is no file'), ('x.gin', 'is a gin file already'),
                          ('broken_conf.py', 'broken_conf.py:2: not a Python file')):
        with pytest.raises(ConfError, match=message):
            python_to_gin.convert(name)


@pytest.mark.parametrize('conf', ['x_conf.py', 'including.gin'])
def test_loading_a_python_conf_names_the_command(conf, folder):
    (folder / 'x_conf.py').write_text('import alf\n')
    (folder / 'including.gin').write_text("include 'x_conf.py'\n")
    with pytest.raises(ConfError, match='is a Python conf, not a gin file\n  convert it: alfx convert x_conf.py > x'):
        gin_utils.load(conf)


TRAINED = {
    'actor_critic': ('''
import functools
import alf
from alf.algorithms.actor_critic_algorithm import ActorCriticAlgorithm
from alf.algorithms.agent import Agent
from alf.networks import ActorDistributionNetwork, ValueNetwork

alf.config('create_environment', env_name='CartPole-v1', num_parallel_environments=2)
hidden = alf.define_config('hidden', (8, 8))
actor = functools.partial(ActorDistributionNetwork, fc_layer_params=hidden)
value = functools.partial(ValueNetwork, fc_layer_params=hidden)
alf.config('ActorCriticAlgorithm', actor_network_ctor=actor, value_network_ctor=value)
optimizer = alf.define_config('optimizer', alf.optimizers.Adam(lr=2e-3))
alf.config('Agent', rl_algorithm_cls=ActorCriticAlgorithm, optimizer=optimizer)
alf.config('TrainerConfig', algorithm_ctor=Agent, unroll_length=4)
''', '''
hidden = (8, 8)
optimizer = @optimizer/Adam()
create_environment.env_name = 'CartPole-v1'
create_environment.num_parallel_environments = 2
ActorCriticAlgorithm.actor_network_ctor = @actor/ActorDistributionNetwork
actor/ActorDistributionNetwork.fc_layer_params = %hidden
ActorCriticAlgorithm.value_network_ctor = @value/ValueNetwork
value/ValueNetwork.fc_layer_params = %hidden
Agent.rl_algorithm_cls = @ActorCriticAlgorithm
Agent.optimizer = %optimizer
optimizer/Adam.lr = 0.002
TrainerConfig.algorithm_ctor = @Agent
TrainerConfig.unroll_length = 4
'''),
    'soft_actor_critic': ('''
from functools import partial
import alf, torch
from alf.algorithms.data_transformer import RewardScaling
from alf.networks import ActorDistributionNetwork, CriticNetwork, NormalProjectionNetwork

alf.config('create_environment', env_name='Pendulum-v1', num_parallel_environments=1)
actor = partial(ActorDistributionNetwork, fc_layer_params=(8,), activation=torch.tanh,
                continuous_projection_net_ctor=partial(NormalProjectionNetwork, state_dependent_std=True,
                                                       std_transform=partial(alf.math.clipped_exp, clip_value_max=2)))
alf.config('SacAlgorithm', actor_network_cls=actor,
           critic_network_cls=partial(CriticNetwork, joint_fc_layer_params=(8,)),
           actor_optimizer=alf.optimizers.AdamTF(lr=5e-4), critic_optimizer=alf.optimizers.AdamTF(lr=1e-3),
           alpha_optimizer=alf.optimizers.AdamTF(lr=5e-4))
alf.config('OneStepTDLoss', gamma=0.98)
alf.config('TrainerConfig', algorithm_ctor=partial(alf.algorithms.agent.Agent,
                                                   rl_algorithm_cls=alf.algorithms.sac_algorithm.SacAlgorithm),
           data_transformer_ctor=[partial(RewardScaling, scale=0.1)], unroll_length=4, mini_batch_length=2,
           mini_batch_size=4, initial_collect_steps=4, whole_replay_buffer_training=False, clear_replay_buffer=False)
''', '''
create_environment.env_name = 'Pendulum-v1'
create_environment.num_parallel_environments = 1
SacAlgorithm.actor_network_cls = @actor/ActorDistributionNetwork
actor/ActorDistributionNetwork.fc_layer_params = (8,)
actor/ActorDistributionNetwork.activation = @torch.tanh
actor/ActorDistributionNetwork.continuous_projection_net_ctor = @continuous_projection_net/NormalProjectionNetwork
continuous_projection_net/NormalProjectionNetwork.state_dependent_std = True
continuous_projection_net/NormalProjectionNetwork.std_transform = @std_transform/clipped_exp
std_transform/clipped_exp.clip_value_max = 2
SacAlgorithm.critic_network_cls = @critic_network/CriticNetwork
critic_network/CriticNetwork.joint_fc_layer_params = (8,)
SacAlgorithm.actor_optimizer = @actor_optimizer/AdamTF()
actor_optimizer/AdamTF.lr = 5e-4
SacAlgorithm.critic_optimizer = @critic_optimizer/AdamTF()
critic_optimizer/AdamTF.lr = 1e-3
SacAlgorithm.alpha_optimizer = @alpha_optimizer/AdamTF()
alpha_optimizer/AdamTF.lr = 5e-4
OneStepTDLoss.gamma = 0.98
TrainerConfig.algorithm_ctor = @algorithm/Agent
algorithm/Agent.rl_algorithm_cls = @SacAlgorithm
TrainerConfig.data_transformer_ctor = [@data_transformer/RewardScaling]
data_transformer/RewardScaling.scale = 0.1
TrainerConfig.unroll_length = 4
TrainerConfig.mini_batch_length = 2
TrainerConfig.mini_batch_size = 4
TrainerConfig.initial_collect_steps = 4
TrainerConfig.whole_replay_buffer_training = False
TrainerConfig.clear_replay_buffer = False
'''),
}


@pytest.mark.parametrize('python, gin', TRAINED.values(), ids=TRAINED)
def test_a_converted_conf_trains_with_the_same_operative_conf(python, gin, folder):
    found, operative = convert(folder, python), []
    assert found.problems == []
    for i, text in enumerate((found.text, gin)):
        (folder / 'trained.gin').write_text(text)
        gin_utils.load('trained.gin', ['TrainerConfig.num_iterations = 3', 'TrainerConfig.num_checkpoints = 1',
                                       'create_environment.nonparallel = True', 'TrainerConfig.random_seed = 1'])
        RLTrainer(TrainerConfig(root_dir=f'run{i}')).train()
        assert gin_utils.mistakes_of_unused(gin_utils.unused_bindings()) == []
        operative.append(gin_utils.operative_config_str())
    assert operative[0].replace('run0', '') == operative[1].replace('run1', '')


@pytest.mark.processes
def test_the_command_writes_a_gin_file_and_lists_problems(folder):
    (folder / 'x_conf.py').write_text('import alf\n'
                                        'alf.config("TrainerConfig", unroll_length=1, algorithm_ctor=lambda: 0)\n')
    done = subprocess.run([sys.executable, '-m', 'alfx', 'convert', 'x_conf.py'], capture_output=True, text=True)
    assert done.returncode == 1 and 'TrainerConfig.unroll_length = 1\n' in done.stdout
    assert done.stderr.startswith('# executing the Python code of x_conf.py\n')
    assert 'x_conf.py:2: a gin file cannot express a lambda\n  move it to a module next to the conf' in done.stderr


def test_the_command_rejects_settings_of_other_libraries():
    with flag_values(convert_program.PARSER, conf='sac.yml'), pytest.raises(ConfError, match='from_other_libraries'):
        convert_program.main()
