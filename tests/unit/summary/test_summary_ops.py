"""Tests of the summary operations, through the event files that TensorBoard reads."""

import logging
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.call_counts import calls_within
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from alfx import context, summary


@pytest.fixture
def events(tmp_path):
    """Return a function that closes the writer and reads the folder as TensorBoard does."""
    writer = summary.create_summary_writer(str(tmp_path))
    summary.set_default_writer(writer)

    def read() -> EventAccumulator:
        writer.close()
        accumulator = EventAccumulator(str(tmp_path), size_guidance={'tensors': 0, 'images': 0, 'histograms': 0})
        return accumulator.Reload()

    yield read
    writer.close()


def test_scalars_of_every_kind_arrive_with_scope_step_and_value(events):
    context.set_global_counter(5)
    with summary.record_if(True):
        with summary.scope('alg'), summary.scope('loss'):
            summary.scalar('actor', torch.tensor(1.5))
        summary.scalar('array', np.array([2.5]))
        summary.scalar('number', 3, step=9)
    read = events()
    assert [(e.step, e.value) for e in read.Scalars('alg/loss/actor')] == [(5, 1.5)]
    assert [(e.step, e.value) for e in read.Scalars('array')] == [(5, 2.5)]
    assert [(e.step, e.value) for e in read.Scalars('number')] == [(9, 3.0)]


def test_nothing_is_written_without_record_if_or_a_writer(events, tmp_path):
    summary.scalar('a', 1)
    with summary.record_if(False):
        summary.scalar('b', 1)
    summary.set_default_writer(None)
    with summary.record_if(True):
        summary.scalar('c', 1)
    assert events().Tags()['scalars'] == []
    assert not list(tmp_path.iterdir())  # not even a file


def test_a_scalar_of_several_elements_is_rejected_by_name(events):
    with summary.record_if(True), pytest.raises(ValueError, match="'loss'.*one element.*\\(3,\\)"):
        summary.scalar('loss', torch.zeros(3))


def test_data_may_change_after_the_call(events):
    data = torch.ones(8)
    with summary.record_if(True):
        summary.histogram('h', data)
        data.fill_(100)
    histogram = events().Histograms('h')[0].histogram_value
    assert (histogram.min, histogram.max, histogram.num, histogram.sum) == (1, 1, 8, 8)


def test_histogram_buckets_count_the_data(events):
    with summary.record_if(True):
        summary.histogram('h', torch.tensor([0., 1., 1., 2.]), bins=[0, 1, 2])
    value = events().Histograms('h')[0].histogram_value
    # [0, 1) holds one element, [1, 2] three; the first limit closes an empty bucket at the left end
    assert list(value.bucket_limit) == [0, 1, 2]
    assert list(value.bucket) == [0, 1, 3]
    assert (value.num, value.sum, value.sum_squares) == (4, 4, 6)


@pytest.mark.parametrize('data, message', [
    ('best', "expected a number, found 'best'"), ({'a': 1.0}, 'expected a number, found')])
def test_a_scalar_that_is_not_a_number_is_rejected_by_name(events, data, message):
    with summary.record_if(True), pytest.raises(ValueError, match=rf"summary.scalar\('loss/x'\): {message}"):
        summary.scalar('loss/x', data)


@pytest.mark.parametrize('least', [3.0, -3.0, 1e20, 1e150])
def test_histogram_of_neighboring_numbers_counts_both(events, least):
    data = np.array([least, np.nextafter(least, np.inf)])
    with summary.record_if(True):
        summary.histogram('h', data)
    value = events().Histograms('h')[0].histogram_value
    assert (value.num, value.min, value.max, sum(value.bucket)) == (2, *data, 2)


def test_histogram_skips_non_finite_values_and_warns(events, caplog):
    with summary.record_if(True), caplog.at_level(logging.WARNING):
        summary.histogram('bad', torch.tensor([1., float('nan'), float('inf')]))
        summary.histogram('empty', torch.zeros(0))
    read = events()
    assert read.Histograms('bad')[0].histogram_value.num == 1
    assert 'empty' not in read.Tags()['histograms']
    assert 'not finite' in caplog.text


def test_text_images_and_video_arrive(events):
    with summary.record_if(True):
        summary.text('conf', 'a = *1*')
        summary.images('frames', torch.rand(5, 3, 4, 6))
        summary.images('gray', np.zeros((7, 9), dtype=np.uint8), dataformat='HW')
        summary.video('clip', torch.rand(2, 3, 3, 4, 6))
    read = events()
    text = read.Tensors('conf/text_summary')[0].tensor_proto.string_val[0]
    assert text == b'a = *1*'
    # five 4x6 frames in a grid of 2 rows and 3 columns
    assert (read.Images('frames')[0].height, read.Images('frames')[0].width) == (8, 18)
    assert (read.Images('gray')[0].height, read.Images('gray')[0].width) == (7, 9)
    assert read.Images('clip')[0].encoded_image_string[:3] == b'GIF'


def test_an_image_of_the_wrong_format_is_rejected(events):
    with summary.record_if(True):
        with pytest.raises(ValueError, match="format 'NCHW'"):
            summary.images('frames', torch.rand(3, 4, 6))
        with pytest.raises(ValueError, match='found 5'):
            summary.images('frames', torch.rand(1, 5, 4, 6))


def test_embedding_writes_the_projector_files(events, tmp_path):
    with summary.record_if(True):
        summary.embedding('points', torch.rand(4, 3), class_labels=['a', 'b', 'c', 'd'])
    events()
    assert list(tmp_path.rglob('tensors.tsv')) and list(tmp_path.rglob('metadata.tsv'))


def test_summaries_continue_after_their_folder_is_removed(tmp_path, caplog):
    folder = tmp_path / 'run' / 'train'
    writer = summary.create_summary_writer(str(folder))
    for step in range(3):
        writer.add_scalar('a', 1.0, step)
        writer.flush()
        assert list(folder.iterdir())
        shutil.rmtree(tmp_path / 'run')
    writer.close()
    assert not caplog.text


def test_an_unwritable_folder_is_logged_and_the_run_continues(tmp_path, caplog):
    blocked = tmp_path / 'file'
    blocked.write_text('')
    writer = summary.create_summary_writer(str(blocked / 'train'))
    with summary.push_summary_writer(writer), summary.record_if(True), caplog.at_level(logging.ERROR):
        for _ in range(100):
            summary.scalar('a', 1)
        writer.flush()
    writer.close()
    assert 'cannot be written' in caplog.text


def test_enable_and_disable_set_and_remove_the_writer(events):
    with summary.record_if(True):
        summary.disable_summary()
        assert not summary.is_summary_enabled()
        summary.scalar('off', 1)
        summary.enable_summary()
        summary.scalar('on', 1)
    assert events().Tags()['scalars'] == ['on']


def test_ensure_summary_writes_at_the_first_opportunity_when_due(events):
    ensure = summary.EnsureSummary()
    for i in range(6):
        with summary.record_if(i in (1, 4)):
            ensure.tick()
            if i % 3 == 0:  # never coincides with a recording iteration
                with ensure:
                    summary.scalar('rare', i, step=i)
    assert [e.step for e in events().Scalars('rare')] == [3]


def test_an_unwritten_summary_costs_a_few_calls():
    assert calls_within(summary.scalar, 'name', torch.zeros(3)) < 5  # less than a microsecond


def test_importing_does_not_import_tensorboard():
    code = 'import sys, alfx.summary; assert not any(m.startswith("tensorboard") for m in sys.modules)'
    subprocess.run([sys.executable, '-c', code], check=True)
