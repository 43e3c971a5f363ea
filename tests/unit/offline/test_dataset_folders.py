"""Datasets in folders: written completely or not at all, and read only if unchanged."""
import json
import os
import signal

import numpy as np
import pytest

from alfx.offline import dataset_folder
from alfx.offline import dataset_sources
from alfx.offline.dataset_episodes import Episodes
from alfx.offline.dataset_files import DatasetError, fingerprint, normalized_score


def make(value=1.0):
    return Episodes({'position': np.full((5, 2), value, np.float32), 'a/b': np.arange(5)},
                    {'': np.zeros((3, 1), np.float32)}, np.ones(3, np.float32), np.array([1, 0, 1], np.float32),
                    np.array([2, 1]))


def test_a_dataset_is_read_as_it_was_written(tmp_path):
    path = str(tmp_path / 'deep' / 'set')
    dataset_folder.write(path, make(), {'env_name': 'x', 'reference_returns': [0.0, 2.0]})
    found = dataset_sources.read(path)
    assert fingerprint(found.episodes) == fingerprint(make()) == found.fingerprint
    assert found.episodes.observation['a/b'].tolist() == [0, 1, 2, 3, 4] and found.is_verified
    assert found.about['env_name'] == 'x' and found.reference_returns() == (0.0, 2.0)


def test_other_contents_have_another_fingerprint():
    assert fingerprint(make(1.0)) != fingerprint(make(2.0))


def test_a_dataset_is_not_overwritten_by_chance(tmp_path):
    path = str(tmp_path)
    dataset_folder.write(path, make(), {})
    with pytest.raises(DatasetError, match='already'):
        dataset_folder.write(path, make(2.0), {})
    with pytest.raises(DatasetError, match='already'):
        dataset_folder.check_writable(path, overwrite=False)
    dataset_folder.write(path, make(2.0), {}, overwrite=True)
    assert dataset_folder.read(path).episodes.observation['position'][0, 0] == 2.0
    assert len([name for name in os.listdir(path) if name.startswith('alfx-data-')]) == 1


def test_other_folders_in_the_folder_of_a_dataset_are_kept(tmp_path):
    (tmp_path / 'data-raw').mkdir()
    (tmp_path / 'data-raw' / 'precious.npy').write_bytes(b'1')
    for _ in range(2):
        dataset_folder.write(str(tmp_path), make(), {}, overwrite=True)
    assert (tmp_path / 'data-raw' / 'precious.npy').read_bytes() == b'1'


@pytest.mark.parametrize('dtype', [np.uint8, np.int8, np.uint32, np.int32])
def test_lengths_of_any_integer_type_become_int64(tmp_path, dtype):
    dataset_folder.write(str(tmp_path), make()._replace(lengths=np.array([2, 1], dtype)), {})
    lengths = dataset_sources.read(str(tmp_path)).episodes.lengths
    assert lengths.dtype == np.int64 and lengths.tolist() == [2, 1]


def test_a_flipped_byte_is_detected(tmp_path):
    dataset_folder.write(str(tmp_path), make(), {})
    file = next(tmp_path.glob('alfx-data-*/reward.npy'))
    contents = bytearray(file.read_bytes())
    contents[-2] ^= 1
    file.write_bytes(contents)
    with pytest.raises(DatasetError, match='(?s)reward.npy.*have changed since it was written'):
        dataset_sources.read(str(tmp_path))


@pytest.mark.parametrize('damage, message', [
    (lambda path: next(path.glob('alfx-data-*/reward.npy')).write_bytes(b'\x93NUMPY'), 'reward.npy: cannot be read'),
    (lambda path: next(path.glob('alfx-data-*/reward.npy')).unlink(), 'reward.npy: cannot be read'),
    (lambda path: (path / 'dataset.json').write_text('{'), 'dataset.json: is damaged'),
    (lambda path: (path / 'dataset.json').write_text('[]'), 'dataset.json: is damaged'),
    (lambda path: (path / 'dataset.json').write_text(json.dumps({'format': 'alfx episodes', 'version': 99})),
     'expected format'),
    (lambda path: (path / 'dataset.json').unlink(), 'contains no dataset.json'),
])
def test_a_damaged_dataset_is_reported_with_its_location(tmp_path, damage, message):
    dataset_folder.write(str(tmp_path), make(), {})
    damage(tmp_path)
    with pytest.raises(DatasetError, match=message):
        dataset_sources.read(str(tmp_path))


def test_a_missing_dataset_is_reported_with_its_neighbours(tmp_path):
    dataset_folder.write(str(tmp_path / 'pendulum'), make(), {})
    with pytest.raises(DatasetError, match='(?s)pendulums.*datasets in .*: pendulum'):
        dataset_sources.read(str(tmp_path / 'pendulums'))


def test_an_unwritable_folder_is_rejected_before_recording(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(DatasetError, match='not a writable folder'):
        dataset_folder.check_writable(str(tmp_path / 'file' / 'set'), overwrite=False)


def write_and_kill(path, episodes, kill_at):
    """Overwrite a dataset in another process, which is killed at its ``kill_at``-th call that touches the disk."""
    pid = os.fork()
    if not pid:
        calls = 0

        def counted(function):
            def call(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)
            return call

        for module, names in ((os, ('fsync', 'replace', 'listdir', 'makedirs')), (np, ('save', ))):
            for name in names:
                setattr(module, name, counted(getattr(module, name)))
        dataset_folder.write(path, episodes, {}, overwrite=True)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_killed_writer_leaves_the_old_or_the_new_dataset(tmp_path):
    path, seen = str(tmp_path / 'set'), set()
    old, new = (Episodes({'': np.full((3, 1), value)}, {'': np.zeros((2, 1))}, np.ones(2), np.ones(2), np.array([2]))
                for value in (1.0, 2.0))
    dataset_folder.write(path, old, {})
    for kill_at in range(1, 16):
        dataset_folder.write(path, old, {}, overwrite=True)
        code = write_and_kill(path, new, kill_at)
        seen.add((code, float(dataset_folder.read(path).episodes.observation[''][0, 0])))
    assert seen == {(-signal.SIGKILL, 1.0), (-signal.SIGKILL, 2.0), (0, 2.0)}
    dataset_folder.write(path, old, {}, overwrite=True)
    assert len([name for name in os.listdir(path) if name.startswith('alfx-data-')]) == 1


def test_an_interrupt_after_the_replacement_keeps_the_new_dataset(tmp_path, monkeypatch):
    dataset_folder.write(str(tmp_path), make(), {})
    replace = os.replace

    def replace_and_interrupt(*paths):
        replace(*paths)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, 'replace', replace_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        dataset_folder.write(str(tmp_path), make(2.0), {}, overwrite=True)
    assert dataset_folder.read(str(tmp_path)).episodes.observation['position'][0, 0] == 2.0


def test_two_writers_of_a_dataset_do_not_meet(tmp_path):
    with dataset_folder._locked(str(tmp_path)), pytest.raises(DatasetError, match='another process'):
        dataset_folder.write(str(tmp_path), make(), {})


def test_a_score_is_0_for_random_and_100_for_expert():
    assert normalized_score(-1200.0, (-1200.0, -200.0)) == 0 and normalized_score(-200.0, (-1200.0, -200.0)) == 100
    assert normalized_score(-700.0, (-1200.0, -200.0)) == 50
    with pytest.raises(ValueError, match='higher'):
        normalized_score(0.0, (1.0, 1.0))


def changed(path, change):
    """Change the manifest of a dataset."""
    manifest = json.loads((path / 'dataset.json').read_text())
    change(manifest)
    (path / 'dataset.json').write_text(json.dumps(manifest))


def _put(*keys_and_value):
    *keys, last, value = keys_and_value

    def change(manifest):
        for key in keys:
            manifest = manifest[key]
        manifest[last] = value
    return change


@pytest.mark.parametrize('change, message', [
    (_put('data', 3), 'data: expected text, found 3'), (_put('arrays', []), r'arrays: expected a dict, found \[\]'),
    (_put('arrays', 'reward', None), 'arrays.reward: expected a dict, found None'),
    (_put('arrays', 'reward', 'file', {}), 'arrays.reward.file: expected text'),
    (_put('about', 'x'), 'about: expected'),
    (_put('version', True), 'version: expected an integer, found True'),
    (_put('episodes', -1), 'episodes: expected an'),
    (_put('about', 'env_name', 3), 'about.env_name: expected text'),
    (_put('actions', '5'), 'actions: expected an integer'),
    (_put('about', 'reference_returns', [1]), 'about.reference_returns: expected'),
    (_put('about', 'reference_returns', ['a', 'b']), 'about.reference_returns: expected'),
    (_put('about', 'action_bounds', {'': 3}), 'about.action_bounds.: expected a list, found 3'),
    (_put('about', 'specs', {'observation': {}}), "about.specs: expected an entry 'action'"),
    (_put('about', 'specs', {key: {'': {'shape': [10**9], 'dtype': 'float32'}}
                             for key in ('observation', 'action', 'reward')}), 'expected shape .*, as in the arrays')])
def test_wrong_types_in_the_manifest_are_named(tmp_path, change, message):
    dataset_folder.write(str(tmp_path), make(), {})
    changed(tmp_path, change)
    with pytest.raises(DatasetError, match=f'dataset.json: .*{message}(.|\n)*record the dataset again'):
        dataset_folder.read(str(tmp_path))


def test_big_endian_arrays_are_read_as_native_numbers(tmp_path):
    episodes = make()
    swapped = episodes._replace(reward=episodes.reward.astype('>f4'), lengths=episodes.lengths.astype('>i8'))
    dataset_folder.write(str(tmp_path), swapped, {})
    read = dataset_folder.read(str(tmp_path)).episodes
    assert read.reward.dtype.isnative and np.array_equal(read.reward, episodes.reward)
    assert read.lengths.dtype.isnative and np.array_equal(read.lengths, episodes.lengths)


@pytest.mark.parametrize('array', [np.zeros(3, 'S4'), np.zeros(3, np.complex64), np.zeros(3, np.longdouble)])
def test_arrays_of_other_types_are_rejected(tmp_path, array):
    dataset_folder.write(str(tmp_path), make()._replace(reward=array), {})
    with pytest.raises(DatasetError, match='reward.npy: expected an array of numbers of at most 64 bits, found'):
        dataset_folder.read(str(tmp_path))


@pytest.mark.parametrize('create', [os.mkfifo, os.mkdir, lambda path: path.symlink_to('/dev/zero')])
def test_a_pipe_instead_of_an_array_does_not_block(tmp_path, create):
    dataset_folder.write(str(tmp_path), make(), {})
    path, = tmp_path.glob('alfx-data-*/reward.npy')
    path.unlink()
    create(path)
    with pytest.raises(DatasetError, match='reward.npy: cannot be read: .*expected a file, found a'):
        dataset_folder.read(str(tmp_path))


def test_a_full_disk_is_named_when_a_dataset_is_written(tmp_path, monkeypatch):
    def save(*args, **kwargs):
        raise OSError('1000 requested and 200 written')  # as numpy does

    monkeypatch.setattr(np, 'save', save)
    with pytest.raises(DatasetError, match='cannot be written: No space left on device\n  nothing has been changed'):
        dataset_folder.write(str(tmp_path / 'data'), make(), {})
    assert not os.listdir(tmp_path / 'data')


def test_a_dataset_is_written_to_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    dataset_folder.write('~/own', make(), {})
    assert dataset_folder.is_dataset(str(tmp_path / 'own'))
    with pytest.raises(DatasetError, match='exists already'):
        dataset_folder.check_writable('~/own', overwrite=False)
