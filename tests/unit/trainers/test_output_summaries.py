"""Outputs of networks among the summaries."""
import pytest
import torch
from torch import nn

from alfx import TensorSpec, context, gin_utils, summary
from alfx.algorithms.config import TrainerConfig
from alfx.networks.network import NetworkWrapper
from alfx.trainers.policy_trainer import RLTrainer
from alfx.trainers.run_summary import summarize_outputs


class Writer:
    """A writer that stores everything written to it."""
    takes_tensors = True

    def __init__(self):
        self.scalars, self.histograms = {}, {}

    def add_scalar(self, tag, value, step, walltime=None):
        self.scalars.setdefault(tag, []).append((step, float(value)))

    def add_histogram(self, tag, counts, edges, stats, step, walltime=None):
        self.histograms.setdefault(tag, []).append((step, *stats[:2]))


@pytest.fixture
def summarized_network():
    network = NetworkWrapper(lambda x: {'twice': 2 * x, 'negative': -x}, TensorSpec(()))
    summarize_outputs(nn.ModuleDict({'actor': network}))
    summary.should_summarize_output(True)
    yield network
    summary.should_summarize_output(False)


def test_the_output_of_the_first_call_in_a_mode_at_a_step_is_written(summarized_network):
    writer = Writer()
    summarized_network(torch.tensor([5.0, 5.0]))  # no summaries yet
    with summary.push_summary_writer(writer), context.record_if(True):
        for step in (3, 4):
            context.set_global_counter(step)
            with context.replay_context():
                summarized_network(torch.tensor([1.0, step]))
                summarized_network(torch.tensor([7.0, 7.0]))
            with context.rollout_context():
                summarized_network(torch.tensor([9.0, 9.0]))
    assert writer.scalars == {
        'network_output/replay/actor/negative/mean': [(3, -2.0), (4, -2.5)],
        'network_output/replay/actor/twice/mean': [(3, 4.0), (4, 5.0)],
        'network_output/rollout/actor/negative/mean': [(3, -9.0), (4, -9.0)],
        'network_output/rollout/actor/twice/mean': [(3, 18.0), (4, 18.0)],
    }
    assert writer.histograms['network_output/replay/actor/twice/value'] == [(3, 2.0, 6.0), (4, 2.0, 8.0)]


def test_nothing_is_written_while_outputs_are_switched_off(summarized_network):
    summary.should_summarize_output(False)
    writer = Writer()
    with summary.push_summary_writer(writer), context.record_if(True):
        summarized_network(torch.ones(2))
    assert not writer.scalars


@pytest.mark.parametrize('summarize_output', [True, False])
def test_a_run_can_summarize_the_networks_of_all_its_updates(tmp_path, monkeypatch, replayed_at_once,
                                                                   summarize_output):
    written = Writer()
    monkeypatch.setattr(summary.writer.SummaryWriter, 'add_scalar', lambda self, *args: written.add_scalar(*args))
    conf = ['create_environment.num_parallel_environments=1', 'TrainerConfig.num_env_steps=0',
            'TrainerConfig.num_iterations=12', 'TrainerConfig.initial_collect_steps=8', 'TrainerConfig.evaluate=False',
            'TrainerConfig.mini_batch_size=8', 'TrainerConfig.summary_interval=2', 'TrainerConfig.num_checkpoints=0',
            'TrainerConfig.num_summaries=None', 'TrainerConfig.random_seed=0', 'TrainerConfig.unroll_length=8',
            f'TrainerConfig.summarize_output={summarize_output}']
    with gin_utils.loaded('sac_pendulum', conf):
        trainer = RLTrainer(TrainerConfig(root_dir=str(tmp_path)))
        trainer.train()
    outputs = {tag: values for tag, values in written.scalars.items() if 'network_output' in tag}
    if not summarize_output:
        assert not outputs
        return
    by_network = {tag for tag in outputs if '/replay/' in tag}
    assert any('actor' in tag for tag in by_network) and any('critic' in tag for tag in by_network), outputs.keys()
    steps = [step for step, _ in written.scalars['loss']]
    assert all([step for step, _ in outputs[tag]] == steps for tag in by_network), (steps, outputs)
