"""States of environments, which are pickled and stored next to a checkpoint as ``ckpt-N.env``.

The file holds the checksums of its checkpoint and of itself, and an authentication code that only the user who wrote it
can compute (:mod:`alfx.checkpoints.user_key`), because unpickling a file of another user could execute code.
"""
import hashlib
import hmac
import logging
import pickle
from typing import Any

from alfx.checkpoints import user_key
from alfx.checkpoints.files import Damaged, open_file, remove, temporary_file, trailer
from alfx.checkpoints.user_key import NoKeyError

logger = logging.getLogger(__name__)
_ENV_MARK = b'alfx-env-2:'


def save_environment_state(path: str, checksum: str, state: Any) -> None:
    """Write the environment state of a checkpoint, or log that this user has no key.

    Args:
        path: path of the checkpoint.
        checksum: checksum of the checkpoint.
        state: picklable state; None for no file.
    """
    remove(f'{path}.env')
    if state is None:
        return
    payload = pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL)
    header = _ENV_MARK + checksum.encode() + _digest(payload)
    try:
        code = _code(header)
    except NoKeyError as error:
        logger.warning('the state of the environments is not saved; a resumed run will start new episodes: %s', error)
        return
    with temporary_file(path + '.env') as (file, commit):
        file.write(header + code + payload)
        commit()


def load_environment_state(checkpoint: str) -> Any:
    """Return the environment state of a checkpoint.

    ``None`` if there is none, if it belongs to another checkpoint, or if another user wrote it.

    Args:
        checkpoint: path of the checkpoint.
    """
    path = checkpoint + '.env'
    try:
        with open_file(checkpoint) as file:
            checksum = trailer(file)
        with open_file(path) as file:
            header, code = file.read(len(_ENV_MARK) + 128), file.read(64)
            if not header.startswith(_ENV_MARK + checksum):
                raise Damaged('it belongs to another checkpoint, or its first bytes are damaged')
            payload = file.read()
        if header != _ENV_MARK + checksum + _digest(payload):
            raise Damaged('its checksum is wrong')
        if not hmac.compare_digest(code, _code(header)):
            raise NoKeyError(f'it was not written with the key of this user ({user_key.path()}). If it belongs to your '
                             'run on another machine, copy the key from there')
    except FileNotFoundError:
        return None
    except (Damaged, NoKeyError, OSError) as error:
        logger.warning('the environment state %s is not used, new episodes start: %s', path, error)
        return None
    return pickle.loads(payload)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def _code(header: bytes) -> bytes:
    """Return the authentication code of the header of an environment state, which only this user can compute."""
    return hmac.new(user_key.user_key(), header, 'sha256').hexdigest().encode()
