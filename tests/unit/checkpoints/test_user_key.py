"""The secret of the user."""
import os

import pytest

from alfx.checkpoints.user_key import NoKeyError, path, user_key


@pytest.fixture(autouse=True)
def config_folder(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CONFIG_HOME', str(tmp_path))


def test_the_key_is_created_once_and_for_the_user_only():
    key = user_key()
    assert len(key) == 32 and user_key() == key
    assert os.stat(path()).st_mode & 0o777 == 0o600 and os.listdir(os.path.dirname(path())) == ['key']
    os.remove(path())
    assert user_key() != key


@pytest.mark.parametrize('corrupt, message', [
    (lambda name: os.chmod(name, 0o644), 'other users can read it'),
    (lambda name: os.truncate(name, 5), 'damaged'),
    (lambda name: os.remove(name) or os.mkdir(name), 'cannot be created or read'),
    (lambda name: os.remove(name) or os.symlink('nowhere', name), 'cannot be created or read'),
])
def test_an_invalid_or_shared_key_is_rejected(corrupt, message):
    user_key()
    corrupt(path())
    with pytest.raises(NoKeyError, match=f'{path()}.*{message}'):
        user_key()
