"""Unrolls from other processes: the learner's side.

A worker (:mod:`alfx.trainers.acting.rollout_worker`) produces an endless *stream* of steps. An :class:`UnrollSource`
transfers them to this process, from one worker (:mod:`alfx.algorithms.async_unroller`) or from many.
:class:`RemoteUnroll` cuts the stream into unrolls that look like those of :func:`alfx.engine.rollout.rollout`, so that
the learner treats both the same.
"""
import abc
import logging
import os
from typing import Any

import torch

from alfx import context, nest
from alfx.engine.contract import Acts
from alfx.engine.remote.policy_state import look_up_buffers, policy_buffers, policy_tensors, states_in_python
from alfx.engine.rollout import Steps, map_steps
from alfx.gin_utils import ConfError, problem_at

logger = logging.getLogger(__name__)


class UnrollSource(abc.ABC):
    """Transfers the steps of other processes to this one."""

    @abc.abstractmethod
    def gather(self, length: int, at_least: int | None = None) -> Steps | None:
        """Return the next steps of the stream.

        Args:
            length: maximum number of steps of each environment.
            at_least: number of steps to wait for; ``None`` for ``length``.

        Returns:
            The steps; ``None`` if there are none, which only happens with ``at_least=0``.

        Raises:
            LostProcessError: a process that the stream needs has ended.
        """

    @abc.abstractmethod
    def update_parameter(self, algorithm: Acts) -> None:
        """Send the current weights, the global counter and the progress values to the actors.

        Tensors that acting changes (:meth:`take_statistics`) are not overwritten.

        Raises:
            LostProcessError: see :meth:`gather`.
        """

    def take_statistics(self, algorithm: Acts) -> None:  # noqa: B027 - optional
        """Write the latest statistics of acting into the learner's ``algorithm``; called after :meth:`gather`.

        The statistics of worker 0 are used. If they arrive with the steps, ``gather`` keeps them until this is called.
        """

    def request_summaries(self, step: int) -> None:  # noqa: B027 - optional
        """Request summaries of acting at this step; called in iterations that write summaries."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the processes. May be called more than once."""


class RemoteUnroll:
    """Cuts the stream of a source into unrolls.

    If an unroll ends with a step to bootstrap from, this step is the first one of the next unroll, as in a local
    unroll; but here it is actually taken, once.

    Args:
        source: source of the steps; :meth:`close` closes it.
        update_period: iterations between two transfers of the weights.
    """

    def __init__(self, source: UnrollSource, update_period: int):
        self._source = source
        self._update_period = update_period
        self._iteration = 0
        self._bootstrap_step: Steps | None = None

    def start_iteration(self, algorithm: Acts, records: bool, summary_step: int) -> None:
        """Send the weights if it is time to; called once per iteration, before :meth:`unroll`.

        Args:
            algorithm: the learner's algorithm.
            records: whether the iteration records summaries.
            summary_step: step at which it writes them.
        """
        if self._iteration % self._update_period == 0:
            self._source.update_parameter(algorithm)
        self._iteration += 1
        if records:
            self._source.request_summaries(summary_step)

    def unroll(self, algorithm: Acts, length: int, at_least: int, bootstrap: bool) -> Steps | None:
        """Return the next unroll.

        Args:
            algorithm: the learner's algorithm; it receives the statistics that come with the steps.
            length: maximum number of environment steps.
            at_least: number of steps to wait for.
            bootstrap: append one more step, from which values can be bootstrapped.

        Returns:
            Steps ``[T, B, ...]`` on the device of ``algorithm``, ``T`` from ``at_least`` to ``length``; experience and
            inputs are ``[T + 1, B, ...]`` with ``bootstrap``. ``None`` for ``T = 0``.
        """
        more = int(bootstrap and self._bootstrap_step is None)
        steps = self._source.gather(length + more, at_least + more if at_least else 0)
        if steps is None:
            return None
        self._source.take_statistics(algorithm)
        device = algorithm.device
        if device.type != 'cpu':
            steps = map_steps(lambda x: x.to(device), steps)
        if not bootstrap:
            return steps
        if self._bootstrap_step is not None:
            steps = map_steps(lambda a, b: torch.cat((a, b)), self._bootstrap_step, steps)
        count = steps.env_steps.step_type.shape[0] - 1
        self._bootstrap_step = map_steps(lambda x: x[count:].clone(), steps)
        if not count:
            return None
        return steps._replace(env_steps=nest.map_structure(lambda x: x[:count], steps.env_steps))

    def close(self) -> None:
        """Close the source."""
        self._source.close()


class ActingStatistics:
    """Writes tensors that acting changes in another process into the learner's algorithm.

    Args:
        algorithm: the learner's algorithm.
    """

    def __init__(self, algorithm: Acts):
        self._tensors, self._buffers = policy_tensors(algorithm), policy_buffers(algorithm)
        self._versions: dict[str, int] = {}
        self._warned = False

    def write(self, values: dict[str, torch.Tensor]) -> None:
        """Copy tensors by key, as returned by ``RolloutWorker.statistics``."""
        look_up_buffers(self._tensors, self._buffers)
        changed_here = [key for key, version in self._versions.items() if self._tensors[key]._version != version]
        if changed_here and not self._warned:
            self._warned = True
            logger.warning('both acting and training change %s: the values of the asynchronous actor overwrite those '
                           'of training', ', '.join(changed_here))
        with torch.no_grad():
            for key, value in values.items():
                self._tensors[key].copy_(value)
                self._versions[key] = self._tensors[key]._version


def check_source(algorithm: Acts, config: Any, option: str) -> None:
    """Raise an error for an algorithm that cannot be trained on the steps of other processes.

    Args:
        algorithm: root algorithm.
        config: configuration of the run.
        option: field of ``TrainerConfig`` that enables asynchronous actors, such as 'async_unroll'.

    Raises:
        ConfError: the algorithm learns only from steps of its current parameters.
    """
    value = getattr(config, option)
    if algorithm.on_policy:
        raise ConfError([problem_at(
            'TrainerConfig', option, f'= {value!r}: {algorithm.name} is on-policy: it learns only from steps of its '
            'current parameters, and asynchronous actors use older ones',
            'leave it out, or use ImpalaAlgorithm, which corrects for that, or an off-policy algorithm')])
    for name in states_in_python(algorithm):
        logger.warning('%s: %s keeps state outside of buffers, which actors and training do not share; register it as '
                       'a buffer', option, name)


def conf_file_of(config: Any, option: str) -> str:
    """Return the conf in the run folder, from which other processes create environments and algorithm.

    Args:
        config: configuration of the run.
        option: see :func:`check_source`.

    Raises:
        ConfError: there is no such file.
    """
    conf_file = os.path.join(config.root_dir, 'conf', 'config.gin')
    if not os.path.isfile(conf_file):
        raise ConfError([problem_at(
            'TrainerConfig', option, f'= {getattr(config, option)!r}: other processes create environments and '
            f'algorithm from the conf of the run, but there is no {conf_file}',
            'start the run with alfx.bin.train, or call gin_utils.write_conf first')])
    return conf_file


def worker_settings(config: Any) -> dict[str, Any]:
    """Return what a process that acts or evaluates needs besides the conf: plain values that can be sent anywhere.

    Args:
        config: configuration of the run; its random seed has been drawn.
    """
    iteration = int(context.get_progress('iterations'))
    return {'root_dir': config.root_dir, 'random_seed': config.random_seed, 'summary_axis': config.summary_axis,
            'float32_matmul_precision': context.get_acting_precision(),
            'first_environment': context.first_environment(), 'start': iteration + 1 if iteration else 0}
