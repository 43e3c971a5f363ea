"""Checkpoints that a run can be killed in the middle of writing, and that are read without executing code.

A checkpoint ``ckpt-N`` is what ``torch.save`` writes for ``{name: state_dict}``, followed by its SHA-256 in a line of
its own (which ``torch.load`` ignores). It is written under another name, flushed to the disk and renamed, so a file
named ``ckpt-N`` is complete or damaged by something else; the checksum tells. A damaged one is passed over with a
warning in favour of the one before it; a file that something else than alfx wrote is refused.

Replay buffers, which may be larger than all the rest, are in a file of the same kind beside it, ``ckpt-N.replay``. It
is written before its checkpoint, which holds its checksum; only those of the latest checkpoints are kept.

The state of the environments, which has to be pickled, is kept beside it as ``ckpt-N.env``. It carries the checksum of
its checkpoint and its own, and a code that only the user who wrote it could make (:mod:`alfx.checkpoints.user_key`): to
unpickle what another one wrote would execute code. It is read by nothing but
:meth:`Checkpointer.load_environment_state`.
"""
import contextlib
import errno
import hashlib
import hmac
import json
import logging
import os
import pickle
import pickletools
import re
import stat
import time
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from alfx.gin_utils import ConfError
from alfx.checkpoints import user_key
from alfx.checkpoints.user_key import NoKeyError

logger = logging.getLogger(__name__)

_FORMAT = 1
_MARK = 'alfx_checkpoint'
_TRAILER = b'\nalfx-sha256:'
_TRAILER_SIZE = len(_TRAILER) + 64
_ENV_MARK = b'alfx-env-2:'
_NAME = re.compile(r'ckpt-(\d+)')
_TEMPORARIES = 'temporary.json'
_EXTRA, _REPLAY = '_extra_state', 'replay_buffer'  # where a state has what goes into the file of replay buffers
_REPLAYS_KEPT = 2  # one more than needed, should the latest checkpoint be damaged
_UNFINISHED = re.compile(r'(ckpt-\d+(\.env|\.replay)?|temporary\.json)\.tmp\d+')


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or cannot be used; the message says which, why, and what to do."""


class _Damaged(Exception):
    """What makes a file unusable as a checkpoint although its name says that it is one."""


def enable_checkpoint(module: nn.Module, flag: bool = True) -> None:
    """Say whether checkpoints hold the state of ``module``; they do unless told otherwise.

    What is left out keeps its value when a checkpoint is loaded.
    """
    module._is_checkpoint_enabled = flag  # type: ignore[assignment]


def is_checkpoint_enabled(module: nn.Module) -> bool:
    """Whether checkpoints hold the state of ``module``."""
    return bool(getattr(module, '_is_checkpoint_enabled', True))


class Checkpointer:
    """Saves and loads a set of modules as ``<ckpt_dir>/ckpt-<step>``.

    Args:
        ckpt_dir: the folder, made with the first checkpoint.
        **modules: what a checkpoint holds: modules, or anything with ``state_dict()`` and ``load_state_dict()``. What
            ``state_dict`` returns is made of dicts, lists, tuples, tensors, numbers, strings and None only.
    """

    def __init__(self, ckpt_dir: str, **modules: Any):
        self._dir = str(ckpt_dir)
        self._modules = modules

    @property
    def ckpt_dir(self) -> str:
        """The folder."""
        return self._dir

    def path(self, global_step: int) -> str:
        """The path of the checkpoint of ``global_step``, whether it exists or not."""
        return os.path.join(self._dir, f'ckpt-{global_step}')

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, in ascending order."""
        if not os.path.isdir(self._dir):
            return []
        return sorted(int(match[1]) for name in os.listdir(self._dir) if (match := _NAME.fullmatch(name)))

    def has_checkpoint(self, global_step: int | str = 'latest') -> bool:
        """Whether there is a checkpoint of ``global_step``, or any at all for ``'latest'``."""
        return bool(self.steps()) if global_step == 'latest' else int(global_step) in self.steps()

    def save(self, global_step: int, environment_state: Any = None, temporary: bool = False) -> str:
        """Write a checkpoint; on failure the ones before it are as they were.

        Args:
            global_step: its number. A checkpoint of the same number is replaced.
            environment_state: something picklable that goes into the file beside it; None for no such file.
            temporary: whether ``remove_temporaries`` may remove it.

        Returns:
            Its path.

        Raises:
            CheckpointError: it cannot be written (disk full, no permission).
        """
        self._write(global_step, self._states(), environment_state, temporary)
        return self.path(global_step)

    def _states(self) -> dict[str, dict[str, Any]]:
        """What a checkpoint written now holds."""
        return {name: _state_of(module) for name, module in self._modules.items()}

    def _write(self, global_step: int, states: dict[str, dict[str, Any]], environment_state: Any,
               temporary: bool) -> None:
        """Write ``states``; see :meth:`save`."""
        path = self.path(global_step)
        states, replay = _take_replay_out(states)
        try:
            os.makedirs(self._dir, exist_ok=True)
            self._remove_unfinished()
            with contextlib.ExitStack() as stack:
                replay_checksum = None
                if replay:
                    replay_file = stack.enter_context(_temporary_file(f'{path}.replay'))
                    replay_checksum = _save(replay_file.file, {_MARK: _FORMAT, 'modules': replay})
                file = stack.enter_context(_temporary_file(path))
                checksum = _save(file.file, {_MARK: _FORMAT, 'global_step': global_step, 'modules': states,
                                             'replay': replay_checksum})
                self._save_environment_state(path, checksum, environment_state)
                if temporary:
                    self._write_temporaries({*self._temporaries(), global_step})
                elif global_step in self._temporaries():
                    self._write_temporaries(self._temporaries() - {global_step})
                if replay:
                    replay_file.commit()
                else:
                    _remove(f'{path}.replay')
                file.commit()
            for step in self.steps()[:-_REPLAYS_KEPT]:
                _remove(f'{self.path(step)}.replay')
        except OSError as error:
            raise CheckpointError(f'the checkpoint {path} cannot be written: {error.strerror or error}; free some '
                                  'space or correct the permissions, older checkpoints are untouched') from error

    def _remove_unfinished(self) -> None:
        """Remove what processes that were killed were writing."""
        for name in os.listdir(self._dir):
            if _UNFINISHED.fullmatch(name):
                os.remove(os.path.join(self._dir, name))

    def load(self, global_step: int | str = 'latest', ignored_parameter_prefixes: Sequence[str] = (),
             ignore_unexpected: bool = False, load_options: dict[str, dict[str, Any]] | None = None) -> int:
        """Load a checkpoint into the modules.

        Args:
            global_step: which one; ``'latest'`` is the newest that is not damaged.
            ignored_parameter_prefixes: entries ``<module name>.<key>`` that begin with one of these keep the values
                that they have.
            ignore_unexpected: pass over what the checkpoint holds and the modules do not have, as when a policy is
                played without its critics. What the modules have and the checkpoint does not hold is always an error.
            load_options: arguments for the ``load_state_dict`` of a module, by its name.

        Returns:
            The step of the checkpoint.

        Raises:
            CheckpointError: there is none; it is damaged; it was not written by alfx; or it does not hold what the
                modules need, which is then named.
        """
        step, path, states = self._read(global_step)
        missing = [name for name in self._modules if name not in states]
        if missing:
            raise CheckpointError(f'{path} has no part {", ".join(map(repr, missing))}; it holds {", ".join(states)}')
        for name, module in self._modules.items():
            state = _fill_in(module, states[name], name, ignored_parameter_prefixes, ignore_unexpected)
            _check_keys(path, name, module, state)
            try:
                module.load_state_dict(state, **(load_options or {}).get(name, {}))
            except ConfError:  # says itself what to do
                raise
            except (RuntimeError, ValueError, KeyError) as error:
                raise CheckpointError(f'{path} does not fit what is to be loaded, part {name!r}: {error}; was it '
                                      'written by another conf?') from error
        return step

    def load_environment_state(self, global_step: int) -> Any:
        """The environment state of a checkpoint; None if there is none, or it is not of this very checkpoint, or
        another user wrote it."""
        path = self.path(global_step) + '.env'
        try:
            with _open(self.path(global_step)) as file:
                checksum = _trailer(file)
            with _open(path) as file:
                header, code = file.read(len(_ENV_MARK) + 128), file.read(64)
                payload = file.read()
        except FileNotFoundError:
            return None
        except _Damaged as error:
            logger.warning('the environment state %s cannot be read: %s', path, error)
            return None
        if header != _ENV_MARK + checksum + _digest(payload):
            logger.warning('the environment state %s is damaged or belongs to another checkpoint', path)
            return None
        try:
            is_own = hmac.compare_digest(code, _code(header))
        except NoKeyError as error:
            logger.warning('the environment state %s is not used: %s', path, error)
            return None
        if not is_own:
            logger.warning('the environment state %s is not used: it was not written with the key of this user (%s). '
                           'If it is of a run of yours on another machine, copy the key from there', path,
                           user_key.path())
            return None
        return pickle.loads(payload)

    def remove_temporaries(self, keep: int) -> None:
        """Remove all but the newest ``keep`` checkpoints that were saved as temporary."""
        temporaries = sorted(self._temporaries() & set(self.steps()))
        old = temporaries[:-keep] if keep else temporaries
        for step in old:
            for ending in ('', '.env', '.replay'):
                _remove(self.path(step) + ending)
        if old:
            self._write_temporaries(set(temporaries) - set(old))

    def _read(self, global_step: int | str) -> tuple[int, str, dict[str, Any]]:
        """Step, path and states of the checkpoint asked for."""
        wants_replay = any(_has_replay_buffer(module) for module in self._modules.values())
        if global_step != 'latest':
            path = self.path(int(global_step))
            if not os.path.lexists(path):
                found = ', '.join(map(str, self.steps())) or 'none'
                raise CheckpointError(f'there is no checkpoint {path}; steps in that folder: {found}')
            return int(global_step), path, _read_sound(path, wants_replay)
        for step in reversed(self.steps()):
            try:
                return step, self.path(step), _read_states(self.path(step), wants_replay)
            except (_Damaged, FileNotFoundError) as error:  # the latter: a run that goes on has removed it
                logger.warning('%s is passed over, it is damaged: %s', self.path(step), error)
        why = '' if self.steps() else ': there is none at all; the first one of a run is written after some minutes'
        raise CheckpointError(f'there is no undamaged checkpoint in {self._dir}{why}')

    def _save_environment_state(self, path: str, checksum: str, state: Any) -> None:
        _remove(f'{path}.env')
        if state is None:
            return
        payload = pickle.dumps(state, protocol=pickle.HIGHEST_PROTOCOL)
        header = _ENV_MARK + checksum.encode() + _digest(payload)
        try:
            code = _code(header)
        except NoKeyError as error:
            logger.warning('the state of the environments is not saved, a run that goes on starts new episodes: %s',
                           error)
            return
        with _temporary_file(path + '.env') as (file, commit):
            file.write(header + code + payload)
            commit()

    def _temporaries(self) -> set[int]:
        try:
            with _open(os.path.join(self._dir, _TEMPORARIES)) as file:
                steps = json.load(file)
            if not (isinstance(steps, list) and all(type(step) is int for step in steps)):
                raise _Damaged('it is no list of numbers')
            return set(steps)
        except FileNotFoundError:
            return set()
        except (ValueError, _Damaged):
            logger.warning('%s in %s is damaged: no checkpoint is taken to be temporary', _TEMPORARIES, self._dir)
            return set()

    def _write_temporaries(self, steps: set[int]) -> None:
        with _temporary_file(os.path.join(self._dir, _TEMPORARIES)) as (file, commit):
            file.write(json.dumps(sorted(steps)).encode())
            commit()


def read_checkpoint(path: str) -> dict[str, Any]:
    """The states ``{name: state_dict}`` that a checkpoint holds, on the CPU; nothing is executed in reading it.

    Replay buffers are among them if it is one of the latest checkpoints.

    Raises:
        CheckpointError: there is no such file, it is damaged, or it was not written by alfx.
    """
    return _read_sound(path, with_replay=True)


def _read_sound(path: str, with_replay: bool) -> dict[str, Any]:
    """The states of one checkpoint, none other will do; see :func:`read_checkpoint`."""
    if os.path.isdir(path):
        raise CheckpointError(f'{path} is a folder; name the checkpoint in it, such as {path}/ckpt-100')
    try:
        return _read_states(path, with_replay)
    except FileNotFoundError as error:
        raise CheckpointError(f'there is no checkpoint {path}') from error
    except _Damaged as error:
        raise CheckpointError(f'the checkpoint {path} is damaged: {error}') from error


def extract_sub_state_dict_from_checkpoint(checkpoint_prefix: str, checkpoint_path: str) -> dict[str, Any]:
    """Part of a checkpoint, to be loaded into a part of an algorithm; without replay buffers.

    Args:
        checkpoint_prefix: path from the checkpoint to the part, ``'alg'`` for the whole algorithm,
            ``'alg._sub.net'`` for a module of it.
        checkpoint_path: the file, ``'.../train/algorithm/ckpt-100'``.

    Returns:
        The state dict of that part: keys without the prefix.

    Raises:
        CheckpointError: the checkpoint cannot be read, or has no such part; parts that it has are named.
    """
    states = _read_sound(os.path.expanduser(checkpoint_path), with_replay=False)
    name, _, rest = checkpoint_prefix.partition('.')
    if name in states and not rest:
        return states[name]
    if name in states:
        part = {key[len(rest) + 1:]: value for key, value in states[name].items() if key.startswith(rest + '.')}
        if part:
            return part
    inner = {f'{n}.{key.split(".")[0]}' for n, state in states.items() for key in state if '.' in key}
    raise CheckpointError(f'{checkpoint_path} has no part {checkpoint_prefix!r}; it has '
                          f'{", ".join(sorted(inner | set(states)))}')


def _read_states(path: str, with_replay: bool) -> dict[str, Any]:
    content = _read_content(path)
    states, checksum = content['modules'], content.get('replay')
    if not with_replay or checksum is None:
        return states
    try:
        with _open(f'{path}.replay') as file:
            if _trailer(file) != checksum.encode():
                raise _Damaged('it belongs to another checkpoint')
        return _put_replay_in(states, _read_content(f'{path}.replay')['modules'])
    except FileNotFoundError:
        logger.warning('the replay buffer of %s is not there any more: %s.replay', path, path)
    except _Damaged as error:
        logger.warning('the replay buffer in %s.replay is left out, the file is damaged: %s', path, error)
    return states


def _read_content(path: str) -> dict[str, Any]:
    """What :func:`_save` was given."""
    with _open(path) as file:
        try:
            checksum = _trailer(file)
        except _Damaged:
            _refuse_foreign(path, file)
            raise
        if checksum != _file_digest(file, os.path.getsize(path) - _TRAILER_SIZE):
            raise _Damaged('its checksum is wrong')
        file.seek(0)
        try:
            content = torch.load(file, map_location='cpu', weights_only=True)
        except pickle.UnpicklingError as error:  # whose text proposes to execute it
            raise CheckpointError(f'{path} holds more than weights and numbers, and to read it could execute code: it '
                                  'is not used') from error
        except (RuntimeError, EOFError) as error:
            raise CheckpointError(f'{path} cannot be read by torch {torch.__version__}: {error}') from error
    if content[_MARK] != _FORMAT:
        raise CheckpointError(f'{path} has format {content[_MARK]}, this version of alfx reads format {_FORMAT}')
    return content


def _open(path: str) -> Any:
    """Open a file for reading, never waiting for it.

    Raises:
        FileNotFoundError: there is nothing of that name.
        _Damaged: it is no file, or a link to none; or the disk does not give it.
    """
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):  # to open a pipe could take for ever
            raise _Damaged('it is a folder' if stat.S_ISDIR(mode) else 'it is no file but a pipe or a device')
        return open(path, 'rb')
    except FileNotFoundError:
        if os.path.islink(path):
            raise _Damaged(f'it is a link to {os.readlink(path)}, which is not there') from None
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EIO):
            raise _Damaged(error.strerror) from error
        raise


def _refuse_foreign(path: str, file: Any) -> None:
    """Raise if a file without our checksum is intact, hence something else's."""
    file.seek(0)
    if not zipfile.is_zipfile(file) and not _is_pickle(file):
        return
    file.seek(0)
    try:
        content = torch.load(file, map_location='cpu', weights_only=True)
    except pickle.UnpicklingError as error:
        if 'unsupported' in str(error).lower():  # a sound file of classes that weights_only does not load
            raise CheckpointError(f'{path} was not written by alfx: it holds more than weights and numbers, and to '
                                  'read it could execute code') from error
        return
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError):
        return
    if not (isinstance(content, dict) and _MARK in content):
        raise CheckpointError(f'{path} was not written by alfx: it lacks the mark and the checksum of its checkpoints')


def _is_pickle(file: Any) -> bool:
    """Whether what comes first in the file are the instructions of a pickle, as torch once wrote; none is executed."""
    file.seek(0)
    if file.read(1) != pickle.PROTO:
        return False
    file.seek(0)
    try:
        for _ in pickletools.genops(file):
            pass
    except (ValueError, OverflowError, MemoryError):
        return False
    return True


def _save(file: Any, content: dict[str, Any]) -> str:
    """Write a checkpoint file; returns its checksum."""
    writer = _HashingWriter(file)
    writer.save(content)
    file.write(_TRAILER + writer.hexdigest().encode())
    return writer.hexdigest()


def _take_replay_out(states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``{name: state_dict}`` without replay buffers; and those, in the same order of names and keys."""
    rest, replay = {}, {}
    for name, state in states.items():
        found = {key: value[_REPLAY] for key, value in state.items()
                 if key.split('.')[-1] == _EXTRA and isinstance(value, dict) and _REPLAY in value}
        rest[name] = {**state, **{key: {k: v for k, v in state[key].items() if k != _REPLAY} for key in found}}
        if found:
            replay[name] = found
    return rest, replay


def _put_replay_in(states: dict[str, Any], replay: dict[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`_take_replay_out`."""
    return {name: {**state, **{key: {**state[key], _REPLAY: buffer}
                               for key, buffer in replay.get(name, {}).items()}} for name, state in states.items()}


def _has_replay_buffer(module: Any) -> bool:
    parts = module.modules() if isinstance(module, nn.Module) else ()
    return any(getattr(part, _REPLAY, None) is not None for part in parts)


def _remove(path: str) -> None:
    """Remove a file, if there is one."""
    _put_aside_folder(path)
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


def _put_aside_folder(path: str) -> None:
    """Rename a folder that has the name of a file which is about to be written; anything else gives way by itself."""
    if os.path.isdir(path) and not os.path.islink(path):
        os.rename(path, f'{path}.{time.time_ns()}')


def _trailer(file: Any) -> bytes:
    """The checksum that a checkpoint ends with."""
    size = file.seek(0, os.SEEK_END)
    if size < _TRAILER_SIZE:
        raise _Damaged('it is empty' if size == 0 else 'it is cut off')
    file.seek(size - _TRAILER_SIZE)
    trailer = file.read()
    if not trailer.startswith(_TRAILER):
        raise _Damaged('it is cut off')
    return trailer[len(_TRAILER):]


def _file_digest(file: Any, size: int) -> bytes:
    file.seek(0)
    digest = hashlib.sha256()
    while size > 0 and (chunk := file.read(min(size, 1 << 20))):
        digest.update(chunk)
        size -= len(chunk)
    return digest.hexdigest().encode()


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def _code(header: bytes) -> bytes:
    """What only this user can make of the header of an environment state, which tells all that is in the file."""
    return hmac.new(user_key.user_key(), header, 'sha256').hexdigest().encode()


class _HashingWriter:
    """A file for ``torch.save`` that takes the checksum of what passes, and keeps the error of a failed write, which
    torch replaces by one that does not tell why."""

    def __init__(self, file: Any):
        self._file = file
        self._digest = hashlib.sha256()
        self._error: OSError | None = None

    def save(self, content: Any) -> None:
        try:
            torch.save(content, self)  # type: ignore[arg-type]
            self._file.flush()
        except RuntimeError as error:
            if self._error is None:
                raise
            raise self._error from error

    def write(self, data: Any) -> int:
        try:
            written = self._file.write(data)
        except OSError as error:
            self._error = error
            raise
        self._digest.update(data)
        return written

    def flush(self) -> None:
        self._file.flush()

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


class _TemporaryFile(NamedTuple):
    file: Any
    commit: Any


@contextlib.contextmanager
def _temporary_file(path: str) -> Iterator[_TemporaryFile]:
    """A file under another name that ``commit()`` flushes to the disk and renames to ``path``; without it, or on an
    error, it is removed."""
    temporary = f'{path}.tmp{os.getpid()}'

    def commit() -> None:
        file.flush()
        os.fsync(file.fileno())
        _put_aside_folder(path)
        os.replace(temporary, path)
        _sync_folder(os.path.dirname(path) or '.')

    try:
        with open(temporary, 'wb') as file:
            yield _TemporaryFile(file, commit)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _state_of(module: Any) -> dict[str, Any]:
    state = module.state_dict()
    if isinstance(module, nn.Module):
        left_out = _left_out(module)
        state = {key: value for key, value in state.items() if not key.startswith(left_out)}
    return dict(state)


def _left_out(module: nn.Module) -> tuple[str, ...]:
    """Key prefixes of the parts that checkpoints do not hold."""
    return tuple(f'{name}.' for name, part in module.named_modules() if name and not is_checkpoint_enabled(part))


def _fill_in(module: Any, state: dict[str, Any], name: str, ignored: Sequence[str], ignore_unexpected: bool) -> Any:
    """``state`` with the module's own values where they are to be kept."""
    if not isinstance(module, nn.Module):
        return state
    own = module.state_dict()
    kept_parts = _left_out(module)
    prefixes = tuple(prefix.removeprefix(f'{name}.') for prefix in ignored)
    kept = {key: value for key, value in own.items() if key.startswith(kept_parts) or key.startswith(prefixes)}
    if ignore_unexpected:
        state = {key: value for key, value in state.items() if key in own}
    return {**{key: value for key, value in state.items() if not key.startswith(prefixes)}, **kept}


def _check_keys(path: str, name: str, module: Any, state: dict[str, Any]) -> None:
    """Raise an error that names what is missing or too much, before anything is loaded."""
    own = module.state_dict()
    problems = [f'{what} {", ".join(keys)}' for what, keys in (('it lacks', [k for k in own if k not in state]),
                                                             ('not expected are', [k for k in state if k not in own]))
                if keys]
    if problems:
        raise CheckpointError(f'{path} does not fit what is to be loaded, part {name!r}: {"; ".join(problems)}; was it '
                              'written by another conf?')
