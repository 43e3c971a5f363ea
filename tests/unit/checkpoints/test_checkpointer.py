"""Checkpoints restore the saved state, and damage of any kind is detected."""

import errno
import hashlib
import io
import logging
import os
import pickle
import random
import resource
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

from alfx.checkpoints import files, reading
from alfx.utils.checkpoint_utils import (Checkpointer, CheckpointError, enable_checkpoint,
                                         extract_sub_state_dict_from_checkpoint, is_checkpoint_enabled,
                                         read_checkpoint)


class Algorithm(nn.Module):
    """Two networks and an optimizer that is part of the state, as in a real algorithm."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        self.target = nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.1)

    def update(self):
        self.optimizer.zero_grad()
        self.net(torch.ones(2, 3)).sum().backward()
        self.optimizer.step()

    def get_extra_state(self):
        return {'optimizer': self.optimizer.state_dict()}

    def set_extra_state(self, state):
        self.optimizer.load_state_dict(state['optimizer'])


class Counter:
    """An object with a state that is not a module."""

    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {'value': self.value}

    def load_state_dict(self, state):
        self.value = state['value']


def saved(tmp_path, *steps: int) -> Checkpointer:
    alg = Algorithm()
    counter = Counter()
    checkpointer = Checkpointer(str(tmp_path / 'ckpt'), alg=alg, counter=counter)
    for step in steps:
        alg.update()
        counter.value = step
        checkpointer.save(step)
    return checkpointer


def loaded(tmp_path, step='latest') -> tuple[int, Algorithm, Counter]:
    alg, counter = Algorithm(seed=1), Counter()
    return Checkpointer(str(tmp_path / 'ckpt'), alg=alg, counter=counter).load(step), alg, counter


def test_everything_is_restored_and_training_continues_identically(tmp_path):
    checkpointer = saved(tmp_path, 1, 2)
    step, alg, counter = loaded(tmp_path)
    assert (step, counter.value) == (2, 2)
    original = checkpointer._modules['alg']
    for algorithm in (original, alg):
        algorithm.update()
    for a, b in zip(original.state_dict().values(), alg.state_dict().values()):
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b)


def test_any_step_can_be_loaded_and_a_missing_one_lists_the_others(tmp_path):
    saved(tmp_path, 1, 2, 10)
    assert loaded(tmp_path, 2)[2].value == 2
    assert loaded(tmp_path, 'latest')[2].value == 10
    with pytest.raises(CheckpointError, match='ckpt-3; steps in that folder: 1, 2, 10'):
        loaded(tmp_path, 3)


def test_a_folder_without_checkpoints_has_none(tmp_path):
    checkpointer = Checkpointer(str(tmp_path / 'nothing'), counter=Counter())
    assert not checkpointer.has_checkpoint() and not checkpointer.has_checkpoint(3)
    with pytest.raises(CheckpointError, match='no undamaged checkpoint'):
        checkpointer.load()
    saved(tmp_path, 3)
    checkpointer = Checkpointer(str(tmp_path / 'ckpt'), counter=Counter())
    assert checkpointer.has_checkpoint() and checkpointer.has_checkpoint(3) and not checkpointer.has_checkpoint(4)


def _truncate(data: bytes) -> bytes:
    return data[:len(data) // 2]


def _flip_a_bit(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1:]


@pytest.mark.parametrize('damage', [_truncate, _flip_a_bit, lambda data: b'', lambda data: bytes(len(data)),
                                    lambda data: data[:-1], lambda data: data[:40], lambda data: data + b' '])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, caplog, damage):
    path = saved(tmp_path, 1, 2).path(2)
    with open(path, 'rb') as file:
        data = damage(file.read())
    with open(path, 'wb') as file:
        file.write(data)
    with caplog.at_level(logging.WARNING):
        step, _, counter = loaded(tmp_path)
    assert (step, counter.value) == (1, 1)
    assert 'skipping the damaged checkpoint' in caplog.text and 'ckpt-2: ' in caplog.text
    with pytest.raises(CheckpointError, match='ckpt-2 is damaged'):
        loaded(tmp_path, 2)


def _random_bytes(path):
    path.write_bytes(random.Random(0).randbytes(20_000))


def _bytes_that_begin_like_a_pickle(path):
    path.write_bytes(b'\x80\x02' + random.Random(0).randbytes(20_000))


def _bytes_that_begin_like_an_archive(path):
    path.write_bytes(b'PK\x03\x04' + random.Random(0).randbytes(20_000))


def _flipped_names(path):
    data = path.with_name('ckpt-1').read_bytes()
    path.write_bytes(data.replace(b'_rebuild_tensor_v2', b'_rebuild_tensor_v9'))


def _dangling_link(path):
    path.symlink_to('nowhere')


def _looping_link(path):
    path.symlink_to(path.name)


def _folder(path):
    (path / 'with').mkdir(parents=True)


def _link_to_a_folder(path):
    path.symlink_to('..')


def _device(path):
    path.symlink_to('/dev/zero')


@pytest.mark.parametrize('make', [_random_bytes, _bytes_that_begin_like_a_pickle, _bytes_that_begin_like_an_archive,
                                  _flipped_names, _dangling_link, _looping_link, _folder, _link_to_a_folder, os.mkfifo,
                                  _device])
def test_a_path_named_like_a_checkpoint_is_skipped_and_replaced(tmp_path, caplog, make):
    """Load an older checkpoint if another file or folder has the name of a checkpoint; the next save replaces it."""
    saved(tmp_path, 1)
    make(tmp_path / 'ckpt' / 'ckpt-2')
    with caplog.at_level(logging.WARNING):
        step, alg, counter = loaded(tmp_path)
    assert (step, counter.value) == (1, 1)
    assert 'skipping the damaged checkpoint' in caplog.text and 'ckpt-2: ' in caplog.text
    with pytest.raises(CheckpointError, match='ckpt-2 is (damaged|a folder)'):
        loaded(tmp_path, 2)
    with pytest.raises(CheckpointError, match='ckpt-2 is (damaged|a folder)'):
        read_checkpoint(str(tmp_path / 'ckpt' / 'ckpt-2'))
    checkpointer = Checkpointer(str(tmp_path / 'ckpt'), alg=alg, counter=counter)
    assert checkpointer.load_environment_state(2) is None
    checkpointer.save(2, temporary=True)
    assert loaded(tmp_path)[0] == 2
    checkpointer.remove_temporaries(0)
    assert checkpointer.steps() == [1]


@pytest.mark.parametrize('make', [_random_bytes, _dangling_link, _looping_link, _folder, os.mkfifo, _device])
def test_other_paths_named_like_an_environment_state_are_ignored(tmp_path, caplog, make):
    checkpointer = saved(tmp_path, 1)
    make(tmp_path / 'ckpt' / 'ckpt-1.env')
    assert checkpointer.load_environment_state(1) is None
    checkpointer.save(1, environment_state=[1])
    assert checkpointer.load_environment_state(1) == [1]


@pytest.mark.parametrize('content', [b'', b'{', b'[]]', b'{"a": 1}', b'["a"]', b'3', b'\xff', None])
def test_without_a_sound_list_no_checkpoint_is_temporary(tmp_path, caplog, content):
    checkpointer = saved(tmp_path, 1)
    checkpointer.save(2, temporary=True)
    path = tmp_path / 'ckpt' / 'temporary.json'
    path.unlink()
    path.write_bytes(content) if content is not None else os.mkfifo(path)
    checkpointer.remove_temporaries(0)
    assert checkpointer.steps() == [1, 2] and 'temporary.json' in caplog.text
    checkpointer.save(3, temporary=True)
    checkpointer.remove_temporaries(0)
    assert checkpointer.steps() == [1, 2]


class Replaying(Algorithm):
    """An algorithm whose checkpoints contain a replay buffer."""

    def __init__(self, contents=None):
        super().__init__()
        self.replay_buffer = 'one'
        self.contents = contents

    def get_extra_state(self):
        replay = {} if self.contents is None else {'replay_buffer': {'blocks': [torch.full((1000, ), self.contents)]}}
        return {**super().get_extra_state(), **replay}

    def set_extra_state(self, state):
        super().set_extra_state(state)
        self.contents = float(state['replay_buffer']['blocks'][0][0]) if 'replay_buffer' in state else None


def replaying(tmp_path, *steps):
    """Create checkpoints of these steps, whose replay buffers contain the number of the step."""
    alg = Replaying()
    checkpointer = Checkpointer(str(tmp_path / 'ckpt'), alg=alg)
    for step in steps:
        alg.contents = float(step)
        checkpointer.save(step)
    return checkpointer


def test_the_latest_two_checkpoints_hold_the_replay_buffer(tmp_path):
    checkpointer = replaying(tmp_path, 1, 2, 3)
    loaded = []
    for step in (1, 2, 3):
        alg = Replaying(-1.0)
        assert Checkpointer(str(tmp_path / 'ckpt'), alg=alg).load(step) == step
        loaded.append(alg.contents)
    assert loaded == [None, 2.0, 3.0]
    assert float(read_checkpoint(checkpointer.path(3))['alg']['_extra_state']['replay_buffer']['blocks'][0][0]) == 3.0
    assert 'replay_buffer' not in read_checkpoint(checkpointer.path(1))['alg']['_extra_state']
    checkpointer._modules['alg'].contents = None  # the buffer is too large to be saved
    checkpointer.save(3)
    assert [name for name in os.listdir(checkpointer.ckpt_dir) if 'replay' in name] == ['ckpt-2.replay']


def test_algorithms_without_replay_buffer_do_not_read_one(tmp_path):
    checkpointer = replaying(tmp_path, 1)
    os.remove(checkpointer.path(1) + '.replay')
    os.mkfifo(checkpointer.path(1) + '.replay')
    assert Checkpointer(str(tmp_path / 'ckpt'), alg=Algorithm()).load() == 1


@pytest.mark.parametrize('make', [_random_bytes, _dangling_link, _folder, os.mkfifo, 'another', None])
def test_a_damaged_replay_buffer_is_skipped_with_a_warning(tmp_path, caplog, make):
    checkpointer = replaying(tmp_path, 1, 2)
    path = tmp_path / 'ckpt' / 'ckpt-2.replay'
    if make == 'another':
        os.replace(checkpointer.path(1) + '.replay', path)
    else:
        path.unlink()
        if make is not None:
            make(path)
    alg = Replaying(-1.0)
    assert Checkpointer(str(tmp_path / 'ckpt'), alg=alg).load() == 2
    assert alg.contents is None and 'ckpt-2.replay' in caplog.text
    checkpointer.save(2)
    assert Checkpointer(str(tmp_path / 'ckpt'), alg=alg).load() == 2 and alg.contents == 2.0


def test_partial_files_of_a_killed_process_go_with_the_next_checkpoint(tmp_path):
    checkpointer = replaying(tmp_path, 1)
    for name in ('ckpt-2.tmp77', 'ckpt-2.replay.tmp77', 'temporary.json.tmp77'):
        (tmp_path / 'ckpt' / name).write_text('')
    checkpointer.save(3)
    assert sorted(os.listdir(tmp_path / 'ckpt')) == ['ckpt-1', 'ckpt-1.replay', 'ckpt-3', 'ckpt-3.replay']


def test_any_cut_of_a_checkpoint_is_noticed(tmp_path):
    path = saved(tmp_path, 1, 2).path(2)
    with open(path, 'rb') as file:
        data = file.read()
    rng = random.Random(0)
    for _ in range(25):
        with open(path, 'wb') as file:
            file.write(data[:rng.randrange(len(data))])
        assert loaded(tmp_path)[0] == 1


def test_a_file_that_alfx_did_not_write_is_rejected(tmp_path):
    saved(tmp_path, 1)
    torch.save({'alg': Algorithm().state_dict()}, tmp_path / 'ckpt' / 'ckpt-5')
    with pytest.raises(CheckpointError, match='ckpt-5 was not written by alfx'):
        loaded(tmp_path)


def test_a_file_that_would_execute_code_is_rejected_without_executing_it(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f'touch {tmp_path}/executed', )

    saved(tmp_path, 1)
    torch.save({'alg': Evil()}, tmp_path / 'ckpt' / 'ckpt-5')
    with pytest.raises(CheckpointError, match='ckpt-5 was not written by alfx.*execute code'):
        loaded(tmp_path)
    assert not (tmp_path / 'executed').exists()


def test_a_checksummed_file_that_would_execute_code_is_rejected(tmp_path):
    path = saved(tmp_path, 1).path(1)
    with open(path, 'wb') as file:
        files.save(file, {'modules': _Evil(tmp_path / 'executed')})
    with pytest.raises(CheckpointError, match='could execute code') as caught:
        loaded(tmp_path)
    assert 'weights_only' not in str(caught.value) and not (tmp_path / 'executed').exists()


def test_before_the_first_checkpoint_the_error_states_this(tmp_path):
    with pytest.raises(CheckpointError, match='there are no checkpoints'):
        loaded(tmp_path)


@pytest.mark.parametrize('key, name', [('_extra_state', '_extra_state'), ('target.weight', 'target.weight')])
def test_a_missing_optimizer_or_target_network_is_an_error_that_names_it(tmp_path, key, name):
    class Incomplete(Algorithm):
        def state_dict(self, *args, **kwargs):
            state = super().state_dict(*args, **kwargs)
            del state[key]
            return state

    Checkpointer(str(tmp_path / 'ckpt'), alg=Incomplete(), counter=Counter()).save(1)
    with pytest.raises(CheckpointError, match=f"(?s)part 'alg'.*{name}"):
        loaded(tmp_path)


def test_a_missing_part_is_an_error_that_names_it(tmp_path):
    Checkpointer(str(tmp_path / 'ckpt'), alg=Algorithm()).save(1)
    with pytest.raises(CheckpointError, match="has no part 'counter'; it holds alg"):
        loaded(tmp_path)


def test_unexpected_entries_are_an_error_unless_they_are_to_be_ignored(tmp_path):
    class Larger(Algorithm):
        def __init__(self):
            super().__init__()
            self.critic = nn.Linear(2, 2)

    Checkpointer(str(tmp_path / 'ckpt'), alg=Larger()).save(1)
    checkpointer = Checkpointer(str(tmp_path / 'ckpt'), alg=Algorithm(seed=1))
    with pytest.raises(CheckpointError, match='critic.weight'):
        checkpointer.load()
    assert checkpointer.load(ignore_unexpected=True) == 1


@pytest.mark.parametrize('prefix, keeps_net', [('alg.target', False), ('target.w', False), ('alg', True)])
def test_ignored_prefixes_keep_their_values(prefix, keeps_net, tmp_path):
    saved(tmp_path, 1)
    alg = Algorithm(seed=1)
    before = {key: value.clone() for key, value in alg.named_parameters()}
    Checkpointer(str(tmp_path / 'ckpt'), alg=alg).load(ignored_parameter_prefixes=[prefix])
    assert torch.equal(alg.target.weight, before['target.weight'])
    assert torch.equal(alg.net[0].weight, before['net.0.weight']) == keeps_net


def test_a_module_can_be_left_out_of_checkpoints(tmp_path):
    alg = Algorithm()
    assert is_checkpoint_enabled(alg.target)
    enable_checkpoint(alg.target, False)
    assert not is_checkpoint_enabled(alg.target)
    path = Checkpointer(str(tmp_path), alg=alg).save(1)
    assert not any(key.startswith('target') for key in read_checkpoint(path)['alg'])
    weight = alg.target.weight.clone()
    Checkpointer(str(tmp_path), alg=alg).load()
    assert torch.equal(alg.target.weight, weight)


def test_part_of_a_checkpoint_can_be_taken_out_by_its_prefix(tmp_path):
    checkpointer = saved(tmp_path, 7)
    alg = checkpointer._modules['alg']
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    net.load_state_dict(extract_sub_state_dict_from_checkpoint('alg.net', checkpointer.path(7)))
    assert torch.equal(net[1].weight, alg.net[1].weight)
    assert set(extract_sub_state_dict_from_checkpoint('alg', checkpointer.path(7))) == set(alg.state_dict())
    with pytest.raises(CheckpointError, match="no part 'alg.nat'; it has alg, alg.net, alg.target, counter"):
        extract_sub_state_dict_from_checkpoint('alg.nat', checkpointer.path(7))
    with pytest.raises(CheckpointError, match='no checkpoint .*ckpt-8'):
        extract_sub_state_dict_from_checkpoint('alg', checkpointer.path(8))
    with pytest.raises(CheckpointError, match='is a folder'):
        extract_sub_state_dict_from_checkpoint('alg', checkpointer.ckpt_dir)


def test_a_file_too_large_for_the_disk_leaves_the_older_checkpoints(tmp_path):
    """Limit the size of a file to simulate a full disk."""
    saved(tmp_path, 1)
    code = f'''
import resource, torch
from alfx.utils.checkpoint_utils import Checkpointer, CheckpointError
resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))
module = torch.nn.Linear(100, 100)
before = module.weight.clone()
try:
    Checkpointer({str(tmp_path / "ckpt")!r}, alg=module).save(2)
except CheckpointError as error:
    assert 'ckpt-2 cannot be written: File too large; free some space' in str(error), error
    assert torch.equal(module.weight, before)
else:
    raise SystemExit('no error')
'''
    subprocess.run([sys.executable, '-c', code], check=True)
    assert os.listdir(tmp_path / 'ckpt') == ['ckpt-1']
    assert loaded(tmp_path)[0] == 1


def test_a_folder_that_cannot_be_created_is_a_clear_error(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(CheckpointError, match='cannot be written: Not a directory'):
        Checkpointer(str(tmp_path / 'file' / 'ckpt'), counter=Counter()).save(1)


def test_no_file_is_left_behind_by_a_save_that_was_interrupted(tmp_path, monkeypatch):
    checkpointer = saved(tmp_path, 1)

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, 'fsync', interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpointer.save(2, environment_state=b'x')
    assert os.listdir(checkpointer.ckpt_dir) == ['ckpt-1']


def test_environment_state_is_bound_to_its_checkpoint(tmp_path, caplog):
    checkpointer = saved(tmp_path, 1)
    checkpointer.save(2, environment_state={'steps': 5})
    checkpointer.save(3, environment_state={'steps': 6})
    assert checkpointer.load_environment_state(1) is None
    assert checkpointer.load_environment_state(2) == {'steps': 5}
    os.replace(checkpointer.path(3) + '.env', checkpointer.path(2) + '.env')
    assert checkpointer.load_environment_state(2) is None
    assert checkpointer.load_environment_state(3) is None
    assert 'belongs to another checkpoint' in caplog.text


def test_a_tampered_environment_state_is_not_unpickled(tmp_path):
    checkpointer = saved(tmp_path, 1)
    checkpointer.save(2, environment_state=[1, 2, 3])
    path = checkpointer.path(2) + '.env'
    with open(path, 'rb') as file:
        data = file.read()
    with open(path, 'wb') as file:
        file.write(data[:-1] + b'x')
    assert checkpointer.load_environment_state(2) is None


class _Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f'touch {self.path}', )


def test_an_environment_state_of_another_user_is_not_unpickled(tmp_path, caplog, monkeypatch):
    checkpointer = saved(tmp_path, 1)
    with monkeypatch.context() as other_user:
        other_user.setenv('XDG_CONFIG_HOME', str(tmp_path / 'stranger'))
        checkpointer.save(1, environment_state=_Evil(tmp_path / 'executed'))
    assert checkpointer.load_environment_state(1) is None
    assert 'not written with the key of this user' in caplog.text
    assert not (tmp_path / 'executed').exists()


def test_an_environment_state_with_old_checksums_is_not_unpickled(tmp_path):
    checkpointer = saved(tmp_path, 1)
    with open(checkpointer.path(1), 'rb') as file:
        checksum = file.read()[-64:]
    payload = pickle.dumps(_Evil(tmp_path / 'executed'))
    with open(checkpointer.path(1) + '.env', 'wb') as file:
        file.write(b'alfx-env:' + checksum + hashlib.sha256(payload).hexdigest().encode() + payload)
    assert checkpointer.load_environment_state(1) is None
    assert not (tmp_path / 'executed').exists()


def test_without_a_key_checkpoints_omit_the_environment_state(tmp_path, caplog, monkeypatch):
    (tmp_path / 'file').write_text('')
    monkeypatch.setenv('XDG_CONFIG_HOME', str(tmp_path / 'file'))
    checkpointer = saved(tmp_path, 1)
    checkpointer.save(2, environment_state=[1])
    assert checkpointer.load() == 2 and checkpointer.load_environment_state(2) is None
    assert 'is not saved' in caplog.text and 'XDG_CONFIG_HOME' in caplog.text


def test_a_checkpoint_without_environment_state_removes_the_old_one(tmp_path):
    checkpointer = saved(tmp_path, 1)
    checkpointer.save(1, environment_state=1)
    checkpointer.save(1)
    assert os.listdir(checkpointer.ckpt_dir) == ['ckpt-1']


def test_temporary_checkpoints_are_removed_and_the_others_stay(tmp_path):
    checkpointer = saved(tmp_path, 1, 5)
    for step in (2, 3, 4):
        checkpointer.save(step, environment_state=step, temporary=True)
    checkpointer.remove_temporaries(keep=2)
    assert checkpointer.steps() == [1, 3, 4, 5]
    checkpointer.save(3)  # no longer temporary
    checkpointer.remove_temporaries(keep=0)
    assert checkpointer.steps() == [1, 3, 5]
    assert not os.path.exists(checkpointer.path(4) + '.env')


def test_torch_can_read_a_checkpoint_without_alfx(tmp_path):
    path = saved(tmp_path, 4).path(4)
    assert torch.load(path, weights_only=True)['modules']['counter'] == {'value': 4}


def rewritten(path, change, compression=zipfile.ZIP_STORED):
    """Change the content of a checkpoint and write it with a correct checksum."""
    content = torch.load(path, weights_only=True)
    buffer = io.BytesIO()
    torch.save(change(content), buffer)
    packed = io.BytesIO()
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(packed, 'w', compression) as new:
        for record in old.infolist():
            new.writestr(record.filename, old.read(record))
    body = packed.getvalue()
    with open(path, 'wb') as file:
        file.write(body + b'\nalfx-sha256:' + hashlib.sha256(body).hexdigest().encode())
    return len(body)


def _set(part, key, value):
    def change(content):
        (content if part is None else content['modules'][part])[key] = value
        return content
    return change


@pytest.mark.parametrize('change', [
    lambda content: [1], lambda content: 'text', lambda content: {}, _set(None, 'alfx_checkpoint', '1'),
    _set(None, 'alfx_checkpoint', 7), _set(None, 'modules', [1]), _set(None, 'modules', {'alg': 3}),
    _set(None, 'modules', {'alg': {3: 4}}), _set(None, 'replay', 3), _set('alg', 'net.0.weight', 'text'),
    _set('alg', 'net.0.weight', torch.zeros(7)), _set('alg', '_extra_state', None), _set('alg', '_extra_state', {}),
    _set('alg', '_extra_state', {'optimizer': [1]}), _set('alg', 'net.0.weight', torch.zeros(1).expand(10**10))])
def test_wrong_contents_with_a_correct_checksum_are_an_error(tmp_path, change):
    path = saved(tmp_path, 1).path(1)
    rewritten(path, change)
    with pytest.raises(CheckpointError, match=r'(?s)ckpt-1 .*(expected|found|match|format)'):
        loaded(tmp_path)


@pytest.mark.parametrize('has_checksum', [True, False])
def test_a_compressed_checkpoint_is_not_unpacked(tmp_path, has_checksum):
    path = saved(tmp_path, 1, 2).path(2)
    size = rewritten(path, _set('alg', 'net.0.weight', torch.zeros(2**20)), zipfile.ZIP_DEFLATED)
    assert size < 100_000
    if not has_checksum:
        os.truncate(path, size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if has_checksum:
        with pytest.raises(CheckpointError, match='ckpt-2 cannot be read.*expected uncompressed records'):
            loaded(tmp_path)
    else:
        assert loaded(tmp_path)[0] == 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_a_disk_that_fails_while_reading_leads_to_the_older_checkpoint(tmp_path, monkeypatch, caplog):
    path = saved(tmp_path, 1, 2).path(2)
    digest = reading.file_digest

    def fail(file, size):
        if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            raise OSError(errno.EIO, 'Input/output error')
        return digest(file, size)

    monkeypatch.setattr(reading, 'file_digest', fail)
    assert loaded(tmp_path)[0] == 1 and 'Input/output error' in caplog.text
    with pytest.raises(CheckpointError, match='ckpt-2 is damaged: .*Input/output error'):
        loaded(tmp_path, 2)


@pytest.mark.parametrize('sparse', [False, True])
def test_views_of_one_memory_with_several_dtypes_are_saved(tmp_path, sparse):
    # as on a GPU, where a time step arrives as one block of bytes
    block = torch.arange(32, dtype=torch.uint8)
    state = {'flag': block[:4].view(torch.bool), 'number': block[16:].view(torch.int64), 'own': torch.rand(2)}
    if sparse:
        state['sparse'] = torch.eye(3).to_sparse()
    counter = Counter()
    counter.value = state
    checkpointer = Checkpointer(str(tmp_path), counter=counter)
    checkpointer.save(1)
    counter.value = None
    checkpointer.load(1)
    for name, x in state.items():
        assert counter.value[name].dtype == x.dtype and torch.equal(counter.value[name].to_dense(), x.to_dense())


@pytest.mark.parametrize('value, found', [(np.float64(3.5), 'numpy.float64'), (np.zeros(2), 'numpy.ndarray'),
                                          ({1, 2}, 'builtins.set')])
def test_a_state_that_could_not_be_loaded_is_not_saved(tmp_path, value, found):
    checkpointer = saved(tmp_path, 1)
    checkpointer._modules['counter'].value = {'best': [1.0, value]}
    with pytest.raises(TypeError, match=rf"found {found} in the state \['counter'\]\['value'\]\['best'\]\[1\]"):
        checkpointer.save(2)
    assert checkpointer.steps() == [1] and loaded(tmp_path)[0] == 1
