"""A policy as a file that runs without alfx."""
import importlib.util
import json
import os

import pytest
import torch

from alfx import gin_utils
from alfx.gin_utils import ConfError
from alfx.runs import building
from alfx.runs import exporting
from alfx.runs import playing
from alfx.runs.policy import Policy

REMEMBERING = '''
include 'ppo_cart_pole_rnn.gin'
TrainerConfig.data_transformer_ctor = [@FrameStacker, @ObservationNormalizer]
FrameStacker.stack_size = 3
ActorDistributionRNNNetwork.fc_layer_params = (8, )
ActorDistributionRNNNetwork.lstm_hidden_size = (8, )
'''


def policy_of(conf, tmp_path, *params):
    """Return a policy with random parameters, and its environment."""
    gin_utils.load(conf, ['create_environment.nonparallel = True', *params], allow_unused=True)
    config = playing.run_config(str(tmp_path / 'run'), 1)
    env = building.create_eval_environment(config, 1)
    algorithm = building.create_algorithm(config, env, trains=False)
    building.set_epsilon_greedy(algorithm, 0.0)
    transformer = algorithm.data_transformer
    for name, buffer in transformer.named_buffers() if isinstance(transformer, torch.nn.Module) else ():
        if name.endswith(('mean', 'variance')):
            buffer.uniform_(0.1, 0.3)
    return Policy(env, algorithm), env


@pytest.fixture
def remembering(tmp_path):
    """A recurrent policy of stacked, normalized observations."""
    (tmp_path / 'remembering.gin').write_text(REMEMBERING)
    policy, env = policy_of(str(tmp_path / 'remembering.gin'), tmp_path)
    yield policy, env
    env.close()
    gin_utils.clear()


def test_a_recurrent_policy_of_normalized_frames_is_the_same_from_its_file(remembering, tmp_path):
    policy, env = remembering
    path = str(tmp_path / 'policy.pt2')
    difference = exporting.export_to(path, policy, env, 'a policy', {'conf': 'remembering'}, num_steps=300)
    assert 0 <= difference <= 1e-5
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith('policy')) == ['policy.pt2']

    files = {exporting.METADATA: ''}
    step = torch.export.load(path, extra_files=files).module()
    metadata = json.loads(files[exporting.METADATA])
    assert metadata['conf'] == 'remembering'
    assert [entry['shape'] for entry in metadata['observations']] == [[1, 2]]
    assert metadata['actions'] == [{'name': '', 'shape': [1], 'dtype': 'int64'}]
    # steps and frames of the stack; two tensors of the LSTM; the previous action
    assert sorted(entry['shape'] for entry in metadata['state']) == [[1], [1], [1, 4], [1, 8], [1, 8]]

    state = [torch.zeros(entry['shape'], dtype=getattr(torch, entry['dtype'])) for entry in metadata['state']]
    strange = [torch.full_like(x, 7) for x in state]
    arguments = torch.zeros(1), torch.tensor([[0.3, -0.2]])
    fresh = step(torch.tensor([True]), *arguments, *state)
    assert all(torch.equal(x, y) for x, y in zip(fresh, step(torch.tensor([True]), *arguments, *strange)))
    later = step(torch.tensor([False]), *arguments, *fresh[1:])
    assert not all(torch.equal(x, y) for x, y in zip(fresh[1:], later[1:]))


def test_a_file_that_computes_other_results_is_removed(remembering, tmp_path, monkeypatch):
    policy, env = remembering
    load = exporting.load

    def load_wrong(path):
        step = load(path)
        return lambda *arguments: [x + 2e-5 if x.is_floating_point() else x for x in step(*arguments)]

    monkeypatch.setattr(exporting, 'load', load_wrong)
    path = str(tmp_path / 'policy.pt2')
    with pytest.raises(exporting.ExportError, match=r'(?s)a policy is not exported: .*differ from the policy .*e-05'):
        exporting.export_to(path, policy, env, 'a policy', {}, num_steps=20)
    assert not [name for name in os.listdir(tmp_path) if name.startswith('policy')]


def test_actions_come_in_the_bounds_of_the_environment(tmp_path):
    policy, env = policy_of('sac_pendulum', tmp_path)
    program = exporting.export(policy, 'sac_pendulum')
    exporting.save(program, exporting.PolicyStep(policy).signature().to_json({}), str(tmp_path / 'policy.pt2'))
    step = exporting.load(str(tmp_path / 'policy.pt2'))
    assert exporting.greatest_differences(policy, [step], env, 100)[0] <= 1e-5
    observation = torch.tensor([[0.6, 0.8, 3.0]])
    action = step(torch.tensor([True]), torch.zeros(1), observation, torch.zeros(1, 1))[0]
    policy.reset()
    assert action[0].numpy() == pytest.approx(policy.predict(observation[0].numpy()))
    env.close()


MASKED = '''
include 'ppo_cart_pole.gin'
create_environment.env_name = 'Taxi-v4'
suite_gym.load.gym_env_wrappers = (@ActionMaskFromInfo, )
TrainerConfig.data_transformer_ctor = @ActionMask
'''


@pytest.mark.parametrize('suffix', ['pt2', 'onnx'])
def test_an_exported_policy_takes_valid_actions_only(suffix, tmp_path):
    if suffix == 'onnx':
        pytest.importorskip('onnxscript')
    (tmp_path / 'masked.gin').write_text(MASKED)
    policy, env = policy_of(str(tmp_path / 'masked.gin'), tmp_path)
    path = str(tmp_path / f'policy.{suffix}')
    assert exporting.export_to(path, policy, env, 'a policy', {}, num_steps=50) <= 1e-5
    env.close()
    if suffix == 'pt2':
        files = {exporting.METADATA: ''}
        step = torch.export.load(path, extra_files=files).module()
        names = [entry['name'] for entry in json.loads(files[exporting.METADATA])['observations']]
        for valid in range(6):
            values = dict(observation=torch.zeros(1, dtype=torch.int64),
                          valid_action_mask=torch.nn.functional.one_hot(torch.tensor([valid]), 6).to(torch.int8))
            state = [torch.zeros(1, dtype=torch.int64)] * 2  # steps of the episode, and the previous action
            assert step(torch.tensor([True]), torch.zeros(1), *map(values.get, names), *state)[0] == valid


def test_distributions_of_torch_that_validate_their_arguments_are_exported(tmp_path, monkeypatch):
    categorical = torch.distributions.Categorical
    policy, env = policy_of('ppo_cart_pole', tmp_path)
    predict_step = policy._algorithm.predict_step

    def validating(time_step, state):
        categorical(logits=torch.stack((time_step.observation.sum(-1), time_step.reward), -1))
        return predict_step(time_step, state)

    monkeypatch.setattr(policy._algorithm, 'predict_step', validating)
    exporting.export(policy, 'ppo_cart_pole')
    assert categorical._validate_args
    env.close()


def test_a_policy_that_draws_random_numbers_is_rejected_by_name(tmp_path):
    policy, env = policy_of('mbrl_random_pendulum', tmp_path)
    with pytest.raises(exporting.ExportError, match=r'(?s)the policy of mbrl_random_pendulum cannot be exported: .*'
                       r'random.*alfx\.load'):
        exporting.export(policy, 'mbrl_random_pendulum')
    env.close()


def test_other_formats_and_missing_packages_are_rejected(tmp_path, monkeypatch):
    with pytest.raises(ConfError, match=r'ends with \.pt2 or \.onnx'):
        exporting.check_path(str(tmp_path / 'policy.pt'))
    with pytest.raises(ConfError, match='does not exist'):
        exporting.check_path(str(tmp_path / 'none' / 'policy.pt2'))
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(ConfError, match=r'(?s)ONNX export needs onnxscript and onnxruntime.*pip install'):
        exporting.check_path(str(tmp_path / 'policy.onnx'))


def test_the_policy_is_the_same_in_onnx(remembering, tmp_path):
    pytest.importorskip('onnxscript')
    pytest.importorskip('onnxruntime')
    policy, env = remembering
    path = str(tmp_path / 'policy.onnx')
    assert exporting.export_to(path, policy, env, 'a policy', {}, num_steps=200) <= 1e-5
    assert os.path.getsize(path) > 0


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_weights_that_are_not_finite_are_not_exported(tmp_path, value):
    policy, env = policy_of('ppo_cart_pole', tmp_path)
    with torch.no_grad():
        for name, parameter in policy._algorithm.named_parameters():
            parameter.view(-1)[0] = value if 'value_network' in name else 0.0
    exporting.export(policy, 'a policy')  # the file does not contain the critic
    with torch.no_grad():
        next(p for name, p in policy._algorithm.named_parameters() if 'actor' in name).view(-1)[0] = value
    with pytest.raises(exporting.ExportError, match='expected finite weights, found NaN or infinite ones in .*actor'):
        exporting.export_to(str(tmp_path / 'policy.pt2'), policy, env, 'a policy', {})
    env.close()
    gin_utils.clear()
    assert 'policy.pt2' not in os.listdir(tmp_path)


def test_a_full_disk_is_an_error_and_leaves_no_file(remembering, tmp_path, monkeypatch):
    policy, env = remembering
    monkeypatch.setattr(exporting, 'load', lambda path: (_ for _ in ()).throw(OSError(28, 'No space left on device')))
    with pytest.raises(OSError, match='No space'):
        exporting.export_to(str(tmp_path / 'policy.pt2'), policy, env, 'a policy', {})
    assert not [name for name in os.listdir(tmp_path) if 'policy' in name]


def test_a_folder_is_rejected_before_the_work_is_done(tmp_path):
    (tmp_path / 'policy.pt2').mkdir()
    with pytest.raises(ConfError, match='policy.pt2 is a folder'):
        exporting.check_path(str(tmp_path / 'policy.pt2'))
