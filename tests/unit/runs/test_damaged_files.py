"""A damaged file of a run or dataset leads to the last good state or to one message, never to another error."""
import os
import random
import resource

import pytest
from helpers import damaged_files
from hypothesis import given, settings
from hypothesis import strategies as st

from alfx.checkpoints.files import CheckpointError
from alfx.gin_utils import ConfError

MOST_MEMORY = 2**20  # KiB that a damaged file may take


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
    return damaged_files.make(str(tmp_path_factory.mktemp('damaged')))


def try_to_read(source, name, kind, seed, reader):
    """Read a copy of a folder with one damaged file; return the message, or '' if it was read."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with damaged_files.copied(source, f'{source}-copy') as target:
        damaged_files.damage(os.path.join(target, name), kind, random.Random(seed))
        try:
            reader(target)
            message = ''
        except (ConfError, CheckpointError) as error:
            message = str(error)
            assert target in message or os.path.basename(name) in message
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_MEMORY
    return message


@settings(max_examples=25)
@given(st.data())
def test_a_damaged_file_of_a_run_is_passed_over_or_named(folders, data):
    name = data.draw(st.sampled_from(damaged_files.files_of(folders[0])))
    try_to_read(folders[0], name, data.draw(st.sampled_from(damaged_files.KINDS)), data.draw(st.integers(0, 2**32)),
                data.draw(st.sampled_from(damaged_files.RUN_READERS)))


@settings(max_examples=40)
@given(st.data())
def test_a_damaged_file_of_a_dataset_is_named(folders, data):
    name = data.draw(st.sampled_from(damaged_files.files_of(folders[1])))
    try_to_read(folders[1], name, data.draw(st.sampled_from(damaged_files.KINDS)), data.draw(st.integers(0, 2**32)),
                damaged_files.read_dataset)
