"""Where unrolls come from when other processes act: the learner's half of the seam.

A worker (``trainers/acting/rollout_worker.py``) produces an endless *stream* of steps. An :class:`UnrollSource` brings
them here, from one process (``algorithms/async_unroller.py``) or from many; :class:`RemoteUnroll` cuts the stream into
unrolls that look like those of :func:`alfx.engine.rollout.unroll`, so that the learner treats both the same.
"""
import abc
import logging
import os
from typing import Any

import torch

from alfx import context, nest
from alfx.engine.contract import Acts
from alfx.engine.remote.policy_state import look_up_buffers, policy_buffers, policy_tensors
from alfx.engine.rollout import Steps, map_steps
from alfx.gin_utils import ConfError
from alfx.gin_utils.value_checks import problem_at

logger = logging.getLogger(__name__)


class UnrollSource(abc.ABC):
    """Brings the steps that other processes take."""

    @abc.abstractmethod
    def gather(self, length: int, at_least: int | None = None) -> Steps | None:
        """The next steps of the stream.

        Args:
            length: how many, at most; of each environment.
            at_least: wait for so many; ``None``: for ``length`` of them.

        Returns:
            The steps; ``None`` if there are none, which only happens with ``at_least=0``.

        Raises:
            LostProcessError: a process that the stream cannot do without is gone.
        """

    @abc.abstractmethod
    def update_parameter(self, algorithm: Acts) -> None:
        """Hand the present weights, the global counter and the progresses to those who act.

        What acting itself changes (:meth:`take_statistics`) is not overwritten.

        Raises:
            LostProcessError: as of :meth:`gather`.
        """

    def take_statistics(self, algorithm: Acts) -> None:  # noqa: B027 - where nothing comes, nothing is taken
        """Write the latest statistics that acting changes into the learner's ``algorithm``; called after ``gather``.

        They belong to worker 0. Where they come with the steps, ``gather`` keeps them until this is called.
        """

    def wants_summaries(self, step: int) -> None:  # noqa: B027 - a source may have none
        """Let summaries be recorded while acting, at this step; called in iterations that write them."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the processes. May be called more than once."""


class RemoteUnroll:
    """Cuts the stream of a source into unrolls.

    Where an unroll ends with a step to bootstrap from, this is the first step of the next one, as in a local unroll;
    only that it is really taken, once.

    Args:
        source: brings the steps; :meth:`close` closes it.
        update_period: hand it the weights every so many iterations.
    """

    def __init__(self, source: UnrollSource, update_period: int):
        self._source = source
        self._update_period = update_period
        self._iteration = 0
        self._kept: Steps | None = None

    def start_iteration(self, algorithm: Acts, records: bool, summary_step: int) -> None:
        """Hand on the weights if it is time to; called once an iteration, before :meth:`unroll`.

        Args:
            algorithm: the learner's.
            records: whether the iteration records summaries.
            summary_step: where it writes them.
        """
        if self._iteration % self._update_period == 0:
            self._source.update_parameter(algorithm)
        self._iteration += 1
        if records:
            self._source.wants_summaries(summary_step)

    def unroll(self, algorithm: Acts, length: int, at_least: int, bootstrap: bool) -> Steps | None:
        """The next unroll.

        Args:
            algorithm: the learner's; gets the statistics that come with the steps.
            length: environment steps, at most.
            at_least: wait for so many.
            bootstrap: append one more step, from which values can be bootstrapped.

        Returns:
            Steps ``[T, B, ...]`` on the device of ``algorithm``, ``T`` from ``at_least`` to ``length``; experience and
            inputs are ``[T + 1, B, ...]`` with ``bootstrap``. ``None`` for ``T = 0``.
        """
        more = int(bootstrap and self._kept is None)
        steps = self._source.gather(length + more, at_least + more if at_least else 0)
        if steps is None:
            return None
        self._source.take_statistics(algorithm)
        device = algorithm.device
        if device.type != 'cpu':
            steps = map_steps(lambda x: x.to(device), steps)
        if not bootstrap:
            return steps
        if self._kept is not None:
            steps = map_steps(lambda a, b: torch.cat((a, b)), self._kept, steps)
        count = steps.env_steps.step_type.shape[0] - 1
        self._kept = map_steps(lambda x: x[count:].clone(), steps)
        if not count:
            return None
        return steps._replace(env_steps=nest.map_structure(lambda x: x[:count], steps.env_steps))

    def close(self) -> None:
        """Close the source."""
        self._source.close()


class ActingStatistics:
    """Writes what acting changes in another process into the learner's algorithm.

    Args:
        algorithm: the learner's.
    """

    def __init__(self, algorithm: Acts):
        self._tensors, self._buffers = policy_tensors(algorithm), policy_buffers(algorithm)
        self._versions: dict[str, int] = {}
        self._warned = False

    def write(self, values: dict[str, torch.Tensor]) -> None:
        """Take over tensors by key, as of ``RolloutWorker.statistics``."""
        look_up_buffers(self._tensors, self._buffers)
        changed_here = [key for key, version in self._versions.items() if self._tensors[key]._version != version]
        if changed_here and not self._warned:
            self._warned = True
            logger.warning('both acting and training change %s: acting takes place in another process, and what it '
                           'makes of them replaces what training does', ', '.join(changed_here))
        with torch.no_grad():
            for key, value in values.items():
                self._tensors[key].copy_(value)
                self._versions[key] = self._tensors[key]._version


def check_source(algorithm: Acts, config: Any, option: str) -> None:
    """Refuse what cannot be trained on the steps of other processes.

    Args:
        algorithm: the root algorithm.
        config: of the run.
        option: the field of ``TrainerConfig`` that asks for it: 'async_unroll'.

    Raises:
        ConfError: the algorithm learns only from what its present parameters do.
    """
    value = getattr(config, option)
    if algorithm.on_policy:
        raise ConfError([problem_at(
            'TrainerConfig', option, f'= {value!r}: {algorithm.name} is on-policy: it learns only from what its '
            'present parameters did, and steps of another process are older',
            'leave it out, or use an algorithm that corrects for that (ImpalaAlgorithm) or is off-policy')])


def conf_file_of(config: Any, option: str) -> str:
    """The conf in the run folder, from which other processes make environments and algorithm anew.

    Args:
        config: of the run.
        option: as in :func:`check_source`.

    Raises:
        ConfError: there is none.
    """
    conf_file = os.path.join(config.root_dir, 'conf', 'config.gin')
    if not os.path.isfile(conf_file):
        raise ConfError([problem_at(
            'TrainerConfig', option, f'= {getattr(config, option)!r}: other processes make environments and algorithm '
            f'anew from the conf of the run, but there is no {conf_file}',
            'start the run by alfx.bin.train, or call gin_utils.write_conf before')])
    return conf_file


def worker_settings(config: Any) -> dict[str, Any]:
    """What a process that acts or evaluates has to know besides the conf: plain values that can be sent anywhere.

    Args:
        config: of the run; its random seed has been drawn.
    """
    iteration = int(context.get_progress('iterations'))
    return {'root_dir': config.root_dir, 'random_seed': config.random_seed, 'summary_axis': config.summary_axis,
            'float32_matmul_precision': context.get_acting_precision(),
            'first_environment': context.first_environment(), 'start': iteration + 1 if iteration else 0}
