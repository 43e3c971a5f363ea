"""ResetNetworks: new values, shrink and perturb, targets, optimizer state, selection, resume, and invalid settings."""
import os
import shutil
from types import SimpleNamespace

import pytest
import torch

import alfx
from alfx.gin_utils import ConfError
from alfx.optimizers import Adam, AdamTF
from alfx.runs.callbacks import Callback
from alfx.trainers.callback_runner import CallbackRunner
from alfx.trainers.reset_networks import ResetNetworks

SMALL = {'create_environment.num_parallel_environments': 1, 'create_environment.nonparallel': True,
         'TrainerConfig.initial_collect_steps': 20, 'TrainerConfig.mini_batch_size': 16,
         'TrainerConfig.num_updates_per_train_iter': 1, 'TrainerConfig.replay_buffer_length': 100,
         'TrainerConfig.random_seed': 1, 'TrainerConfig.num_threads': 1, 'TrainerConfig.num_checkpoints': 1,
         'TrainerConfig.num_summaries': 1, 'TrainerConfig.evaluate': False,
         'ActorDistributionNetwork.fc_layer_params': (32, 32), 'CriticNetwork.joint_fc_layer_params': (32, 32)}


class Snapshots(Callback):
    """Callback that stores copies of all parameters and buffers, and of the optimizer state, at given iterations."""

    def __init__(self, *iterations):
        self.at, self.tensors, self.moments = iterations, {}, {}

    def on_iteration_end(self, run):
        self.algorithm = run.algorithm
        if run.iteration in self.at:
            self.tensors[run.iteration] = {n: x.clone() for n, x in run.algorithm.state_dict().items()
                                           if torch.is_tensor(x) and 'optimizer' not in n}
            names = {p: n for n, p in run.algorithm.named_parameters()}
            self.moments[run.iteration] = {
                names[p]: {k: x.clone() for k, x in state.items()}
                for optimizer in run.algorithm.optimizers() for p, state in optimizer.state.items()}


def train(root_dir, *callbacks, conf='sac_pendulum', steps=60, **params):
    return alfx.train(conf, {**SMALL, 'TrainerConfig.callbacks': callbacks, 'TrainerConfig.num_env_steps': steps,
                             **params}, str(root_dir))


def weights(tensors, *parts):
    return {n: x for n, x in tensors.items() if any(part in n for part in parts)}


def test_a_reset_draws_new_values_and_clears_the_optimizer(tmp_path):
    before, after = Snapshots(1, 51), Snapshots(51)
    train(tmp_path, before, ResetNetworks(at_env_steps=(50,)), after)
    first, old, new = before.tensors[1], before.tensors[51], after.tensors[51]
    layers = [n for n in new if n.endswith('.weight')]
    assert len(layers) >= 9
    for name in layers:
        assert not torch.equal(new[name], old[name]) and not torch.equal(new[name], first[name]), name
        assert new[name].std() == pytest.approx(first[name].std(), rel=0.25), name
    alpha = next(n for n in new if n.endswith('_log_alpha'))
    assert new[alpha] == first[alpha] != old[alpha]
    for name in weights(new, '._target_critic_networks.'):
        assert torch.equal(new[name], new[name.replace('_target_critic', '_critic')]), name
    assert all(state['step'] > 30 for state in before.moments[51].values())
    assert len(after.moments[51]) == len(before.moments[51]) > 0
    assert all(not x.any() for state in after.moments[51].values() for x in state.values())
    assert after.algorithm.replay_buffer.total_size == 61  # is kept


class Trained(torch.nn.Sequential):
    """One weight with an optimizer."""

    def __init__(self, optimizer):
        super().__init__(torch.nn.Linear(1, 1, bias=False))
        optimizer.add_param_group({'params': [self[0].weight]})
        self._optimizer = optimizer

    def optimized_parameters(self):
        return [self._optimizer], [('weight', self[0].weight)]


class AdamWithCount(Adam):
    """An optimizer with a Python number in its state."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group['params']:
                self.state[p]['count'] = self.state[p].get('count', 0) + 1


@pytest.mark.parametrize('optimizer_class', [Adam, AdamTF, AdamWithCount])
def test_a_reset_restarts_the_bias_correction(optimizer_class):
    optimizer = optimizer_class(lr=0.01)
    algorithm, reset, steps = Trained(optimizer), ResetNetworks(at_env_steps=(50, )), []
    run = SimpleNamespace(algorithm=algorithm, iteration=0, env_steps=0)
    algorithm.updater = SimpleNamespace(ranks=None)
    reset.on_training_start(run)
    for run.env_steps in range(1, 61):
        before = algorithm[0].weight.item()
        algorithm[0].weight.grad = torch.ones(1, 1)
        optimizer.step()
        steps.append(before - algorithm[0].weight.item())
        reset.on_iteration_end(run)
    assert steps == pytest.approx([0.01] * 60, rel=1e-3)  # a constant gradient gives steps of the learning rate
    if optimizer_class is AdamWithCount:
        assert optimizer.state[algorithm[0].weight]['count'] == 10


@pytest.mark.parametrize('keep', [0.25, 0.8])
def test_keep_shrinks_and_perturbs(tmp_path, keep):
    class Seed(Callback):
        def on_iteration_end(self, run):
            torch.manual_seed(7)

    results = []
    for weight in (0.0, keep):
        before, after = Snapshots(51), Snapshots(51)
        train(tmp_path / str(weight), before, Seed(), ResetNetworks(at_env_steps=(50,), keep=weight), after, steps=50)
        results.append((before.tensors[51], after.tensors[51]))
    (old, fresh), (same, mixed) = results
    assert all(torch.equal(old[name], same[name]) for name in old)
    for name in weights(fresh, '._actor_network.', '._critic_networks.', '_log_alpha'):
        torch.testing.assert_close(mixed[name], keep * old[name] + (1 - keep) * fresh[name], rtol=1e-6, atol=1e-7)


def test_modules_selects_parameters_and_the_steps_are_counted(tmp_path):
    snapshots = Snapshots(*range(1, 62))
    changes = Snapshots(*range(1, 62))
    reset = ResetNetworks(at_env_steps=(33,), every_env_steps=20, until_env_steps=45, modules=['critic_networks'])
    train(tmp_path, snapshots, reset, changes)
    changed = {n: {name for name, x in snapshots.tensors[n].items() if not torch.equal(x, changes.tensors[n][name])}
               for n in snapshots.tensors}
    assert [n - 1 for n, names in changed.items() if names] == [20, 33, 40]  # an iteration more than steps
    for names in changed.values():
        assert all('critic_networks.' in name for name in names)
    assert any('_target_critic_networks.' in name for name in changed[41])
    moments = changes.moments[41]
    assert {name for name, state in moments.items() if not state['step']} == {n for n in moments if '_critic_net' in n}


def test_constraints_and_running_statistics_hold_after_a_reset(tmp_path):
    after = Snapshots(41)
    small = {'critic/BlockEncodingNetwork.hidden_size': 16, 'actor/BlockEncodingNetwork.hidden_size': 16,
             'create_environment.env_name': 'Pendulum-v1', 'TrainerConfig.replay_buffer_length': 100}
    settings = {name: value for name, value in SMALL.items() if 'fc_layer_params' not in name}
    alfx.train('flash_sac_small_half_cheetah', {
        **settings, **small, 'TrainerConfig.num_env_steps': 40,
        'TrainerConfig.callbacks': (ResetNetworks(at_env_steps=(40,), keep=0.5), after)}, str(tmp_path))
    layers = [m for m in after.algorithm.modules() if getattr(m, 'projects_parameters', False)]
    assert any(m.weight.shape[-1] == 16 and m.weight.dim() > 1 for m in layers)
    for layer in layers:
        old = [p.clone() for p in layer.parameters(recurse=False)]
        with torch.no_grad():
            layer.project_parameters()
        torch.testing.assert_close(list(layer.parameters(recurse=False)), old)
    means = weights(after.tensors[41], 'running_mean')
    assert means and all(not x.any() for name, x in means.items())


def test_a_run_resumed_after_a_reset_continues_exactly(tmp_path):
    class Copier(Callback):
        def on_iteration_end(self, run):
            if run.iteration == 46:
                shutil.copytree(run.root_dir, tmp_path / 'killed', ignore=shutil.ignore_patterns('train.lock'))

    def reset():
        return ResetNetworks(at_env_steps=(30, 40), keep=0.3)

    ends = [Snapshots(61), Snapshots(61)]
    checkpoints = {'TrainerConfig.num_checkpoints': 3}  # after iterations 21, 41 and 61
    train(tmp_path / 'run', reset(), Copier(), ends[0], **checkpoints)
    assert os.path.exists(tmp_path / 'killed/train/algorithm/ckpt-41')
    train(tmp_path / 'killed', reset(), ends[1], **checkpoints)
    one, two = (end.tensors[61] for end in ends)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_settings_of_a_resumed_run_may_change(tmp_path):
    """After resets at 20 and 40, resets every 15 steps are due at 45 and 60, and only of the critics."""
    train(tmp_path, ResetNetworks(every_env_steps=20), steps=41)
    ends = Snapshots(*range(42, 62))
    train(tmp_path, ResetNetworks(every_env_steps=15, modules=('critic_networks', )), ends, steps=61)
    cleared = [i for i, moments in ends.moments.items() if any(not x['exp_avg'].any() for x in moments.values())]
    assert cleared == [46, 61]  # iteration 46 reaches step 45
    assert all('critic_networks' in name for name, x in ends.moments[46].items() if not x['exp_avg'].any())


def test_recorded_updates_use_the_new_values(tmp_path):
    class DropGraphs(Callback):
        def on_iteration_end(self, run):
            if run.env_steps == 40:
                run.algorithm.updater.invalidate_caches()
                run.algorithm.learner.invalidate_caches()

    ends = [Snapshots(81), Snapshots(81)]
    train(tmp_path / 'a', ResetNetworks(at_env_steps=(40,)), ends[0], steps=80)
    train(tmp_path / 'b', ResetNetworks(at_env_steps=(40,)), DropGraphs(), ends[1], steps=80)
    one, two = (end.tensors[81] for end in ends)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-5)


def test_wrong_settings_are_rejected(tmp_path):
    with pytest.raises(ConfError, match='there are no steps to reset at'):
        ResetNetworks()
    for steps in ((0,), ('x',)):
        with pytest.raises(ConfError, match='expected numbers of environment steps of 1 or more, found'):
            ResetNetworks(at_env_steps=steps)
    with pytest.raises(ConfError, match='until_env_steps: has no effect without every_env_steps'):
        ResetNetworks(at_env_steps=(5,), until_env_steps=9)
    with pytest.raises(ConfError, match='keep'):
        ResetNetworks(at_env_steps=(5,), keep=1.0)
    with pytest.raises(ConfError, match="no trained parameters have 'critic_network' in their path"
                       r"(.|\n)*'critic_networks'"):
        train(tmp_path / 'a', ResetNetworks(at_env_steps=(5,), modules=('critic_network',)))
    config = SimpleNamespace(callbacks=[ResetNetworks(at_env_steps=(5,))], root_dir='', ml_type='sl', collects=True,
                             evaluate=False, eval_uncertainty=False)
    with pytest.raises(ConfError, match='contains ResetNetworks, whose steps would never be reached'):
        CallbackRunner(config, None, None)


def test_several_processes_are_rejected(tmp_path):
    class Joined(Callback):
        def on_training_start(self, run):
            run.algorithm.updater.ranks = object()

    with pytest.raises(ConfError, match='only works in a single process'):
        train(tmp_path, Joined(), ResetNetworks(at_env_steps=(5,)))
