"""What processes that act or evaluate have in common."""
import logging
import warnings

import pytest
import torch

from alfx import BoundedTensorSpec, TensorSpec, context, summary
from alfx.environments.described_environment import DescribedEnvironment
from alfx.environments.environment_errors import UnsupportedOperationError
from alfx.environments.suite_unittest import ActionType, PolicyUnittestEnv
from alfx.environments.utils import create_environment
from alfx.trainers.acting.worker_process import LogForwarding, SummaryForwarding


def test_alfx_logs_and_all_warnings_are_forwarded():
    records = []
    with LogForwarding(lambda level, text: records.append((level, text))).active():
        logging.getLogger('alfx.some.part').info('a %s', 'word')
        logging.getLogger('other').info('not this')
        logging.getLogger('other').warning('but this')
        warnings.warn('and this', stacklevel=1)
        try:
            raise ValueError('wrong')
        except ValueError:
            logging.getLogger('alfx').exception('it failed')
    logging.getLogger('alfx').warning('too late')
    assert records[:2] == [(logging.INFO, 'a word'), (logging.WARNING, 'other: but this')]
    assert 'and this' in records[2][1] and 'ValueError: wrong' in records[3][1] and len(records) == 4


def test_summaries_are_forwarded_as_writer_calls(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    calls = []
    with summary.push_summary_writer(SummaryForwarding(lambda *call: calls.append(call))), context.record_if(True):
        context.set_global_counter(7)
        with summary.scope('worker'):
            summary.scalar('number', 3)
            summary.histogram('numbers', torch.arange(5))
            summary.text('words', 'hello')
    writer = summary.create_summary_writer(str(tmp_path))
    for method, arguments in calls:
        getattr(writer, method)(*arguments)
    writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars('worker/number')] == [(7, 3.0)]
    assert events.Tags()['histograms'] == ['worker/numbers'] and len(calls) == 3
    with pytest.raises(AttributeError):
        SummaryForwarding(print).flush()


def test_a_description_has_all_specs_but_cannot_be_stepped():
    env = PolicyUnittestEnv(batch_size=1, episode_length=5, action_type=ActionType.Continuous, reward_dim=3)
    described = DescribedEnvironment(env, 7)
    assert described.batch_size == 7 and described.time_step_spec() == env.time_step_spec()
    assert described.reward_spec() == TensorSpec((3, )) and isinstance(described.action_spec(), BoundedTensorSpec)
    assert (described.name, described.num_tasks, described.get_state()) == (env.name, env.num_tasks, None)
    described.seed(3)
    for call in (described.reset, described.current_time_step, lambda: described.step(None)):
        with pytest.raises(UnsupportedOperationError, match='other processes'):
            call()


def test_environments_are_described_without_creating_a_batch():
    described = create_environment(num_parallel_environments=5000, only_described=True)
    assert described.batch_size == 5000 and described.observation_spec().shape == (4, )
