"""Reading of checkpoints without executing code.

A damaged file is distinguished from one that another program wrote: the first is skipped if there is an older
checkpoint, the second is always an error.
"""
import logging
import os
import pickle
import pickletools
import zipfile
from typing import Any

import torch

from alfx.checkpoints.files import (FORMAT, MARK, TRAILER_SIZE, CheckpointError, Damaged, file_digest, open_file,
                                    trailer)
from alfx.checkpoints.module_states import NOT_FITTING, put_replay_in
from alfx.gin_utils import stored_files

logger = logging.getLogger(__name__)
_CONTENT = {MARK: int, 'modules': {str: {str: object}}, 'replay?': (str, type(None))}
_MOST_EXPANDED = 2**26  # bytes; a tensor of stride 0 views more numbers than the file contains


def read_checkpoint(path: str) -> dict[str, Any]:
    """Return the states ``{name: state_dict}`` of a checkpoint, on the CPU; reading executes no code.

    Replay buffers are included if it is one of the latest checkpoints.

    Raises:
        CheckpointError: there is no such file, it is damaged, or it was not written by alfx.
    """
    return read_sound(path, with_replay=True)


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
    states = read_sound(os.path.expanduser(checkpoint_path), with_replay=False)
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


def read_sound(path: str, with_replay: bool) -> dict[str, Any]:
    """Return the states of exactly this checkpoint; see :func:`read_checkpoint`."""
    if os.path.isdir(path):
        raise CheckpointError(f'{path} is a folder; pass a checkpoint in it, such as {path}/ckpt-100')
    try:
        return read_states(path, with_replay)
    except FileNotFoundError as error:
        raise CheckpointError(f'there is no checkpoint {path}') from error
    except (Damaged, OSError) as error:
        raise CheckpointError(f'the checkpoint {path} is damaged: {error}; use another checkpoint') from error


def read_states(path: str, with_replay: bool) -> dict[str, Any]:
    """Return the states of a checkpoint, with its replay buffers if they are wanted and undamaged.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: the disk cannot be read.
        Damaged: the file is damaged.
        CheckpointError: its contents are not those of a checkpoint.
    """
    content = _read_content(path)
    states, checksum = content['modules'], content['replay']
    if not with_replay or checksum is None:
        return states
    try:
        with open_file(f'{path}.replay') as file:
            if trailer(file) != checksum.encode():
                raise Damaged('it belongs to another checkpoint')
        return put_replay_in(states, _read_content(f'{path}.replay')['modules'])
    except FileNotFoundError:
        logger.warning('the replay buffer is empty: %s.replay is missing (only the latest checkpoints have one)', path)
    except (Damaged, OSError) as error:
        logger.warning('the replay buffer in %s.replay is not loaded, the file is damaged: %s', path, error)
    return states


def _read_content(path: str) -> dict[str, Any]:
    """Return the content passed to :func:`alfx.checkpoints.files.save`."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            checksum = trailer(file)
        except Damaged:
            _refuse_foreign(path, file)
            raise
        if checksum != file_digest(file, size - TRAILER_SIZE):
            raise Damaged('its checksum is wrong')
        try:
            content = load_archive(file, size)
        except pickle.UnpicklingError as error:  # torch's message suggests executing it
            raise CheckpointError(f'{path} holds more than weights and numbers, so reading it could execute code; it '
                                  'is not used') from error
        except (*NOT_FITTING, EOFError, zipfile.BadZipFile, RecursionError, MemoryError) as error:
            raise CheckpointError(f'{path} cannot be read by torch {torch.__version__}: {error}; use another '
                                  'checkpoint') from error
    problem = stored_files.mismatch(content, _CONTENT) or _too_large(content, size)
    if problem:
        raise CheckpointError(f'{path} is not a checkpoint of alfx: {problem}; use another checkpoint')
    if content[MARK] != FORMAT:
        raise CheckpointError(f'{path} has format {content[MARK]}, this version of alfx reads format {FORMAT}')
    return {'replay': None, **content}


def load_archive(file: Any, size: int) -> Any:
    """Load weights and plain values from an archive written by ``torch.save``.

    Raises:
        ValueError: unpacking the archive needs more memory than its own size, or a large buffer.
    """
    with zipfile.ZipFile(file) as archive:
        records = archive.infolist()
        if any(record.compress_type != zipfile.ZIP_STORED for record in records):
            raise ValueError('expected uncompressed records, found compressed ones')
        unpacked = sum(record.file_size for record in records)
        if unpacked > size:
            raise ValueError(f'expected at most {size:,} bytes, found records of {unpacked:,} bytes')
        for record in records:
            if record.filename.endswith('data.pkl'):
                for operation, argument, _ in pickletools.genops(archive.read(record)):
                    if operation.name == 'GLOBAL' and str(argument).endswith(' bytearray'):
                        raise ValueError('expected tensors and plain values, found a bytearray')
    file.seek(0)
    return torch.load(file, map_location='cpu', weights_only=True)


def _too_large(content: Any, size: int) -> str:
    """Describe the first tensor that views far more numbers than the file contains; '' if there is none."""
    most, seen, waiting = max(size, _MOST_EXPANDED), set(), [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            if value.numel() * value.element_size() > most:
                return f'expected at most {most:,} bytes, found a tensor of shape {tuple(value.shape)}'
        elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            waiting += value.values() if isinstance(value, dict) else value
    return ''


def _refuse_foreign(path: str, file: Any) -> None:
    """Raise an error if a file without our checksum is intact and therefore written by another program."""
    foreign = f'{path} was not written by alfx: it lacks the mark and the checksum of checkpoints'
    if _is_pickle(file):  # not loaded, because it may declare tensors of any size
        raise CheckpointError(foreign)
    try:
        content = load_archive(file, os.fstat(file.fileno()).st_size)
    except pickle.UnpicklingError as error:
        if 'unsupported' in str(error).lower():  # an intact file with classes that weights_only does not load
            raise CheckpointError(f'{path} was not written by alfx: it holds more than weights and numbers, so reading '
                                  'it could execute code') from error
        return
    except (*NOT_FITTING, EOFError, OSError, zipfile.BadZipFile, RecursionError, MemoryError):
        return
    if not (isinstance(content, dict) and MARK in content):
        raise CheckpointError(foreign)


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
