"""Checkpoints that survive a kill while they are written, and that are read without executing code.

A checkpoint ``ckpt-N`` is the output of ``torch.save`` for ``{name: state_dict}``, followed by its SHA-256 in a
separate line (which ``torch.load`` ignores). It is written under a temporary name, flushed to disk and renamed, so a
file named ``ckpt-N`` is complete unless something else damaged it, which the checksum detects. A damaged checkpoint is
skipped with a warning and the previous one is loaded. Files that were not written by alfx are rejected.

Replay buffers, which may be larger than everything else, are stored next to the checkpoint in a file of the same
format, ``ckpt-N.replay``. It is written before its checkpoint, which holds its checksum. Only the replay buffers of the
latest checkpoints are kept.

The state of the environments has to be pickled and is stored next to the checkpoint as ``ckpt-N.env``. The file holds
the checksums of its checkpoint and of itself, and an authentication code that only the user who wrote it can compute
(:mod:`alfx.checkpoints.user_key`), because unpickling a file of another user could execute code. Only
:meth:`Checkpointer.load_environment_state` reads it.
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
_EXTRA, _REPLAY = '_extra_state', 'replay_buffer'  # keys of the part of a state that goes into the replay file
_REPLAYS_KEPT = 2  # one more than needed, in case the latest checkpoint is damaged
_UNFINISHED = re.compile(r'(ckpt-\d+(\.env|\.replay)?|temporary\.json)\.tmp\d+')


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or used; the message says which one, why, and what to do."""


class _Damaged(Exception):
    """A file is unusable as a checkpoint; the message says why."""


def enable_checkpoint(module: nn.Module, flag: bool = True) -> None:
    """Include or exclude the state of ``module`` in checkpoints; by default it is included.

    An excluded module keeps its values when a checkpoint is loaded.
    """
    module._is_checkpoint_enabled = flag  # type: ignore[assignment]


def is_checkpoint_enabled(module: nn.Module) -> bool:
    """Return whether checkpoints include the state of ``module``."""
    return bool(getattr(module, '_is_checkpoint_enabled', True))


class Checkpointer:
    """Saver and loader of a set of modules, as ``<ckpt_dir>/ckpt-<step>``.

    Args:
        ckpt_dir: folder of the checkpoints; created with the first checkpoint.
        **modules: contents of a checkpoint: modules, or objects with ``state_dict()`` and ``load_state_dict()``. The
            result of ``state_dict`` may only contain dicts, lists, tuples, tensors, numbers, strings and None.
    """

    def __init__(self, ckpt_dir: str, **modules: Any):
        self._dir = str(ckpt_dir)
        self._modules = modules

    @property
    def ckpt_dir(self) -> str:
        """Folder of the checkpoints."""
        return self._dir

    def path(self, global_step: int) -> str:
        """Return the path of the checkpoint of ``global_step``, whether or not it exists."""
        return os.path.join(self._dir, f'ckpt-{global_step}')

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, in ascending order."""
        if not os.path.isdir(self._dir):
            return []
        return sorted(int(match[1]) for name in os.listdir(self._dir) if (match := _NAME.fullmatch(name)))

    def has_checkpoint(self, global_step: int | str = 'latest') -> bool:
        """Return whether there is a checkpoint of ``global_step``, or any checkpoint for ``'latest'``."""
        return bool(self.steps()) if global_step == 'latest' else int(global_step) in self.steps()

    def save(self, global_step: int, environment_state: Any = None, temporary: bool = False) -> str:
        """Write a checkpoint; earlier checkpoints are unchanged if it fails.

        Args:
            global_step: number of the checkpoint. A checkpoint with the same number is replaced.
            environment_state: picklable state for the file next to the checkpoint; ``None`` for no such file.
            temporary: allow ``remove_temporaries`` to remove the checkpoint.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointError: the checkpoint cannot be written (disk full, no permission).
        """
        self._write(global_step, self._states(), environment_state, temporary)
        return self.path(global_step)

    def _states(self) -> dict[str, dict[str, Any]]:
        """Return the contents of a checkpoint written now."""
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
                                  'space or correct the permissions; older checkpoints are unchanged') from error

    def _remove_unfinished(self) -> None:
        """Remove the temporary files of processes that were killed."""
        for name in os.listdir(self._dir):
            if _UNFINISHED.fullmatch(name):
                os.remove(os.path.join(self._dir, name))

    def load(self, global_step: int | str = 'latest', ignored_parameter_prefixes: Sequence[str] = (),
             ignore_unexpected: bool = False, load_options: dict[str, dict[str, Any]] | None = None) -> int:
        """Load a checkpoint into the modules.

        Args:
            global_step: step of the checkpoint; ``'latest'`` is the newest undamaged one.
            ignored_parameter_prefixes: entries ``<module name>.<key>`` that start with one of these prefixes keep
                their current values.
            ignore_unexpected: ignore entries of the checkpoint that the modules do not have, for example to play a
                policy without its critics. Entries that the modules have and the checkpoint lacks are always an error.
            load_options: arguments of the ``load_state_dict`` of a module, by its name.

        Returns:
            The step of the checkpoint.

        Raises:
            CheckpointError: there is no checkpoint; it is damaged; it was not written by alfx; or it lacks entries that
                the modules need, which the message names.
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
            except ConfError:  # its message already says what to do
                raise
            except (RuntimeError, ValueError, KeyError) as error:
                raise CheckpointError(f'{path} does not match the modules to load, part {name!r}: {error}; was it '
                                      'written with another conf?') from error
        return step

    def load_environment_state(self, global_step: int) -> Any:
        """Return the environment state of a checkpoint.

        ``None`` if there is none, if it belongs to another checkpoint, or if another user wrote it.
        """
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
                           'If it belongs to your run on another machine, copy the key from there', path,
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
        """Return step, path and states of the requested checkpoint."""
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
            except (_Damaged, FileNotFoundError) as error:  # a run in progress may just have removed the file
                logger.warning('skipping the damaged checkpoint %s: %s', self.path(step), error)
        why = '' if self.steps() else ': there are no checkpoints; a run writes its first one after some minutes'
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
            logger.warning('the state of the environments is not saved; a resumed run will start new episodes: %s',
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
                raise _Damaged('it is not a list of numbers')
            return set(steps)
        except FileNotFoundError:
            return set()
        except (ValueError, _Damaged):
            logger.warning('%s in %s is damaged: no checkpoint is treated as temporary', _TEMPORARIES, self._dir)
            return set()

    def _write_temporaries(self, steps: set[int]) -> None:
        with _temporary_file(os.path.join(self._dir, _TEMPORARIES)) as (file, commit):
            file.write(json.dumps(sorted(steps)).encode())
            commit()


def read_checkpoint(path: str) -> dict[str, Any]:
    """Return the states ``{name: state_dict}`` of a checkpoint, on the CPU; reading executes no code.

    Replay buffers are included if it is one of the latest checkpoints.

    Raises:
        CheckpointError: there is no such file, it is damaged, or it was not written by alfx.
    """
    return _read_sound(path, with_replay=True)


def _read_sound(path: str, with_replay: bool) -> dict[str, Any]:
    """Return the states of exactly this checkpoint; see :func:`read_checkpoint`."""
    if os.path.isdir(path):
        raise CheckpointError(f'{path} is a folder; pass a checkpoint in it, such as {path}/ckpt-100')
    try:
        return _read_states(path, with_replay)
    except FileNotFoundError as error:
        raise CheckpointError(f'there is no checkpoint {path}') from error
    except _Damaged as error:
        raise CheckpointError(f'the checkpoint {path} is damaged: {error}') from error


def extract_sub_state_dict_from_checkpoint(checkpoint_prefix: str, checkpoint_path: str) -> dict[str, Any]:
    """Return part of a checkpoint, to load into a part of an algorithm; without replay buffers.

    Args:
        checkpoint_prefix: path from the checkpoint to the part, ``'alg'`` for the whole algorithm,
            ``'alg._sub.net'`` for one of its modules.
        checkpoint_path: path of the file, ``'.../train/algorithm/ckpt-100'``.

    Returns:
        The state dict of that part, with keys without the prefix.

    Raises:
        CheckpointError: the checkpoint cannot be read, or has no such part; the message names existing parts.
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
        logger.warning('the replay buffer of %s is missing: %s.replay', path, path)
    except _Damaged as error:
        logger.warning('the replay buffer in %s.replay is not loaded, the file is damaged: %s', path, error)
    return states


def _read_content(path: str) -> dict[str, Any]:
    """Return the content passed to :func:`_save`."""
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
        except pickle.UnpicklingError as error:  # torch's message suggests to execute it
            raise CheckpointError(f'{path} holds more than weights and numbers, so reading it could execute code; it '
                                  'is not used') from error
        except (RuntimeError, EOFError) as error:
            raise CheckpointError(f'{path} cannot be read by torch {torch.__version__}: {error}') from error
    if content[_MARK] != _FORMAT:
        raise CheckpointError(f'{path} has format {content[_MARK]}, this version of alfx reads format {_FORMAT}')
    return content


def _open(path: str) -> Any:
    """Open a file for reading without blocking.

    Raises:
        FileNotFoundError: there is no such file.
        _Damaged: it is not a regular file, is a broken link, or cannot be read from the disk.
    """
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):  # opening a pipe could block forever
            raise _Damaged('it is a folder' if stat.S_ISDIR(mode) else 'it is not a file but a pipe or a device')
        return open(path, 'rb')
    except FileNotFoundError:
        if os.path.islink(path):
            raise _Damaged(f'it is a link to {os.readlink(path)}, which does not exist') from None
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EIO):
            raise _Damaged(error.strerror) from error
        raise


def _refuse_foreign(path: str, file: Any) -> None:
    """Raise an error if a file without our checksum is intact and therefore written by another program."""
    file.seek(0)
    if not zipfile.is_zipfile(file) and not _is_pickle(file):
        return
    file.seek(0)
    try:
        content = torch.load(file, map_location='cpu', weights_only=True)
    except pickle.UnpicklingError as error:
        if 'unsupported' in str(error).lower():  # an intact file with classes that weights_only does not load
            raise CheckpointError(f'{path} was not written by alfx: it holds more than weights and numbers, so reading '
                                  'it could execute code') from error
        return
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError):
        return
    if not (isinstance(content, dict) and _MARK in content):
        raise CheckpointError(f'{path} was not written by alfx: it lacks the mark and the checksum of checkpoints')


def _is_pickle(file: Any) -> bool:
    """Return whether the file starts with pickle instructions, as old torch files do; none is executed."""
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
    """Write a checkpoint file and return its checksum."""
    writer = _HashingWriter(file)
    writer.save(content)
    file.write(_TRAILER + writer.hexdigest().encode())
    return writer.hexdigest()


def _take_replay_out(states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split ``{name: state_dict}`` into the states without replay buffers, and the replay buffers by name and key."""
    rest, replay = {}, {}
    for name, state in states.items():
        found = {key: value[_REPLAY] for key, value in state.items()
                 if key.split('.')[-1] == _EXTRA and isinstance(value, dict) and _REPLAY in value}
        rest[name] = {**state, **{key: {k: v for k, v in state[key].items() if k != _REPLAY} for key in found}}
        if found:
            replay[name] = found
    return rest, replay


def _put_replay_in(states: dict[str, Any], replay: dict[str, Any]) -> dict[str, Any]:
    """Undo :func:`_take_replay_out`."""
    return {name: {**state, **{key: {**state[key], _REPLAY: buffer}
                               for key, buffer in replay.get(name, {}).items()}} for name, state in states.items()}


def _has_replay_buffer(module: Any) -> bool:
    parts = module.modules() if isinstance(module, nn.Module) else ()
    return any(getattr(part, _REPLAY, None) is not None for part in parts)


def _remove(path: str) -> None:
    """Remove a file if it exists."""
    _put_aside_folder(path)
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)


def _put_aside_folder(path: str) -> None:
    """Rename a folder with the name of a file to be written; files are simply overwritten."""
    if os.path.isdir(path) and not os.path.islink(path):
        os.rename(path, f'{path}.{time.time_ns()}')


def _trailer(file: Any) -> bytes:
    """Return the checksum at the end of a checkpoint file."""
    size = file.seek(0, os.SEEK_END)
    if size < _TRAILER_SIZE:
        raise _Damaged('it is empty' if size == 0 else 'it is truncated')
    file.seek(size - _TRAILER_SIZE)
    trailer = file.read()
    if not trailer.startswith(_TRAILER):
        raise _Damaged('it is truncated')
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
    """Return the authentication code of the header of an environment state, which only this user can compute."""
    return hmac.new(user_key.user_key(), header, 'sha256').hexdigest().encode()


class _HashingWriter:
    """File for ``torch.save`` that computes a checksum and records the error of a failed write.

    torch replaces that error by one that does not state the cause.
    """

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
    """Open a temporary file that ``commit()`` flushes to disk and renames to ``path``.

    It is removed without a commit or after an error.
    """
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
    """Return the key prefixes of the parts that checkpoints exclude."""
    return tuple(f'{name}.' for name, part in module.named_modules() if name and not is_checkpoint_enabled(part))


def _fill_in(module: Any, state: dict[str, Any], name: str, ignored: Sequence[str], ignore_unexpected: bool) -> Any:
    """Return ``state`` with the current values of the module for entries that are kept."""
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
    """Raise an error that names missing and unexpected entries, before anything is loaded."""
    own = module.state_dict()
    problems = [f'{what} {", ".join(keys)}' for what, keys in (('missing:', [k for k in own if k not in state]),
                                                             ('unexpected:', [k for k in state if k not in own]))
                if keys]
    if problems:
        raise CheckpointError(f'{path} does not match the modules to load, part {name!r}: {"; ".join(problems)}; was '
                              'it written with another conf?')
