"""Checkpoints of a run.

A checkpoint ``ckpt-N`` contains ``{name: state_dict}``; see :mod:`alfx.checkpoints.files` for the format. Replay
buffers, which may be larger than everything else, are stored next to the checkpoint in a file of the same format,
``ckpt-N.replay``. That file is written first, and the checkpoint contains its checksum. Only the replay buffers of the
latest checkpoints are kept. The state of the environments is in ``ckpt-N.env``, see
:mod:`alfx.checkpoints.environment_states`.
"""
import contextlib
import json
import logging
import os
import re
from collections.abc import Sequence
from typing import Any

from alfx.checkpoints import environment_states
from alfx.checkpoints.files import FORMAT, MARK, CheckpointError, Damaged, remove, save, temporary_file
from alfx.checkpoints.module_states import (NOT_FITTING, check_keys, check_plain, fill_in, has_replay_buffer,
                                            mismatch_error, state_of, take_replay_out)
from alfx.checkpoints.reading import read_sound, read_states
from alfx.gin_utils import ConfError, stored_files

logger = logging.getLogger(__name__)

_NAME = re.compile(r'ckpt-(\d+)')
_TEMPORARIES = 'temporary.json'
_REPLAYS_KEPT = 2  # one more than needed, in case the latest checkpoint is damaged
_UNFINISHED = re.compile(r'(ckpt-\d+(\.env|\.replay)?|temporary\.json)\.tmp\d+')


class Checkpointer:
    """Saver and loader of a set of modules, as ``<ckpt_dir>/ckpt-<step>``.

    Args:
        ckpt_dir: folder of the checkpoints; created with the first checkpoint.
        **modules: contents of a checkpoint: modules, or objects with ``state_dict()`` and ``load_state_dict()``. The
            result of ``state_dict`` may only contain dicts, lists, tuples, tensors, numbers, strings and None.
    """

    def __init__(self, ckpt_dir: str, **modules: Any):
        self.ckpt_dir = str(ckpt_dir)
        self._modules = modules

    def path(self, global_step: int) -> str:
        """Return the path of the checkpoint of ``global_step``, whether or not it exists."""
        return os.path.join(self.ckpt_dir, f'ckpt-{global_step}')

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, in ascending order."""
        if not os.path.isdir(self.ckpt_dir):
            return []
        return sorted(int(match[1]) for name in os.listdir(self.ckpt_dir) if (match := _NAME.fullmatch(name)))

    def has_checkpoint(self, global_step: int | str = 'latest') -> bool:
        """Return whether there is a checkpoint of ``global_step``, or any checkpoint for ``'latest'``."""
        return bool(self.steps()) if global_step == 'latest' else int(global_step) in self.steps()

    def save(self, global_step: int, environment_state: Any = None, temporary: bool = False,
             subfolder: str = '') -> str:
        """Write a checkpoint; earlier checkpoints are unchanged if it fails.

        Args:
            global_step: number of the checkpoint. A checkpoint with the same number is replaced.
            environment_state: picklable state for the file next to the checkpoint; ``None`` for no such file.
            temporary: allow ``remove_temporaries`` to remove the checkpoint.
            subfolder: write the checkpoint there instead, without replay buffers, and remove all others from there.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointError: the checkpoint cannot be written (disk full, no permission).
        """
        self._write(global_step, self._states(), environment_state, temporary, subfolder)
        return self.path(global_step)

    def _states(self) -> dict[str, dict[str, Any]]:
        """Return the contents of a checkpoint written now."""
        return {name: state_of(module) for name, module in self._modules.items()}

    def _write(self, global_step: int, states: dict[str, dict[str, Any]], environment_state: Any,
               temporary: bool, subfolder: str = '') -> None:
        """Write ``states``; see :meth:`save`."""
        path = self.path(global_step)
        states, replay = take_replay_out(states)
        check_plain(states)
        if subfolder:
            single = Checkpointer(os.path.join(self.ckpt_dir, subfolder))
            single._write(global_step, states, environment_state, False)
            for step in single.steps():
                if step != global_step:
                    single._remove(step)
            return
        try:
            os.makedirs(self.ckpt_dir, exist_ok=True)
            self._remove_unfinished()
            with contextlib.ExitStack() as stack:
                replay_checksum = None
                if replay:
                    replay_file, commit_replay = stack.enter_context(temporary_file(f'{path}.replay'))
                    replay_checksum = save(replay_file, {MARK: FORMAT, 'modules': replay})
                file, commit = stack.enter_context(temporary_file(path))
                checksum = save(file, {MARK: FORMAT, 'global_step': global_step, 'modules': states,
                                             'replay': replay_checksum})
                environment_states.save_environment_state(path, checksum, environment_state)
                if temporary:
                    self._write_temporaries({*self._temporaries(), global_step})
                elif global_step in self._temporaries():
                    self._write_temporaries(self._temporaries() - {global_step})
                if replay:
                    commit_replay()
                else:
                    remove(f'{path}.replay')
                commit()
            for step in self.steps()[:-_REPLAYS_KEPT]:
                remove(f'{self.path(step)}.replay')
        except OSError as error:
            raise CheckpointError(f'the checkpoint {path} cannot be written: {error.strerror or error}; free some '
                                  'space or correct the permissions; older checkpoints are unchanged') from error

    def _remove_unfinished(self) -> None:
        """Remove the temporary files of processes that were killed."""
        for name in os.listdir(self.ckpt_dir):
            if _UNFINISHED.fullmatch(name):
                os.remove(os.path.join(self.ckpt_dir, name))

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
            state = fill_in(module, states[name], name, ignored_parameter_prefixes, ignore_unexpected)
            check_keys(path, name, module, state)
            try:
                module.load_state_dict(state, **(load_options or {}).get(name, {}))
            except ConfError:  # its message already says what to do
                raise
            except NOT_FITTING as error:
                raise mismatch_error(path, name, error) from error
        return step

    def load_environment_state(self, global_step: int) -> Any:
        """Return the environment state of a checkpoint.

        ``None`` if there is none, if it belongs to another checkpoint, or if another user wrote it.
        """
        return environment_states.load_environment_state(self.path(global_step))

    def remove_temporaries(self, keep: int) -> None:
        """Remove all but the newest ``keep`` checkpoints that were saved as temporary."""
        temporaries = sorted(self._temporaries() & set(self.steps()))
        old = temporaries[:-keep] if keep else temporaries
        for step in old:
            self._remove(step)
        if old:
            self._write_temporaries(set(temporaries) - set(old))

    def _remove(self, step: int) -> None:
        for ending in ('', '.env', '.replay'):
            remove(self.path(step) + ending)

    def _read(self, global_step: int | str) -> tuple[int, str, dict[str, Any]]:
        """Return step, path and states of the requested checkpoint."""
        wants_replay = any(has_replay_buffer(module) for module in self._modules.values())
        if global_step != 'latest':
            path = self.path(int(global_step))
            if not os.path.lexists(path):
                found = ', '.join(map(str, self.steps())) or 'none'
                raise CheckpointError(f'there is no checkpoint {path}; steps in that folder: {found}')
            return int(global_step), path, read_sound(path, wants_replay)
        for step in reversed(self.steps()):
            try:
                return step, self.path(step), read_states(self.path(step), wants_replay)
            except (Damaged, OSError) as error:  # the disk fails, or a run in progress may just have removed the file
                logger.warning('skipping the damaged checkpoint %s: %s', self.path(step), error)
        why = ('; restore one, or start again in another folder' if self.steps() else
               ': there are no checkpoints; a run writes its first one after some minutes')
        raise CheckpointError(f'there is no undamaged checkpoint in {self.ckpt_dir}{why}')

    def _temporaries(self) -> set[int]:
        try:
            return set(stored_files.read_json(os.path.join(self.ckpt_dir, _TEMPORARIES), [int]))
        except FileNotFoundError:
            return set()
        except stored_files.FileError as error:
            logger.warning('old checkpoints are kept, because the list of temporary ones cannot be read: %s', error)
            return set()

    def _write_temporaries(self, steps: set[int]) -> None:
        with temporary_file(os.path.join(self.ckpt_dir, _TEMPORARIES)) as (file, commit):
            file.write(json.dumps(sorted(steps)).encode())
            commit()
