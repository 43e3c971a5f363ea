"""Process of the asynchronous actor of :mod:`alfx.algorithms.async_unroller`."""
import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

from alfx import context, summary
from alfx.engine.remote.channel import Timing, UnrollChannel
from alfx.trainers.acting.rollout_worker import RolloutWorker
from alfx.trainers.acting.worker_process import LogForwarding, SummaryForwarding, prepare
from alfx.utils.processes import POLL_SECONDS, is_orphan


class _Stopped(Exception):
    """Raised if the learner has stopped this process or has exited."""


def work(tell: Callable[[str, Any], None], channel: UnrollChannel, conf_file: str, settings: dict[str, Any]) -> None:
    """Act until the learner stops this process or exits.

    Args:
        tell: function that sends a message, see :class:`~alfx.utils.processes.MessagingProcess`. Additional messages
            are 'ready' with the number of environments, 'final_infos' with the numbers in the final infos of episodes,
            and 'summary' with calls ``(method, arguments)`` of a summary writer.
        channel: channel for steps, weights and statistics.
        conf_file: see ``RolloutWorker``.
        settings: see ``RolloutWorker``; additionally 'unroll_step_interval'.
    """
    prepare(settings)
    with LogForwarding(lambda level, text: tell('log', (level, text))).active(), contextlib.suppress(_Stopped):
        _act(channel, conf_file, settings, tell)


def _act(channel: UnrollChannel, conf_file: str, settings: dict[str, Any], tell: Any) -> None:
    with contextlib.closing(RolloutWorker(conf_file, settings)) as worker:
        tell('ready', worker.batch_size)
        while not channel.take_weights(worker.load, _stop_check(channel)):
            _stop_check(channel)()
            time.sleep(POLL_SECONDS / 10)
        _run(worker, channel, settings['unroll_step_interval'], tell)


def _run(worker: RolloutWorker, channel: UnrollChannel, interval: float, tell: Any) -> None:
    check_stop = _stop_check(channel)
    next_step = time.perf_counter()
    while True:
        while not channel.ring.wait_for_room():
            check_stop()
        check_stop()
        if interval:
            next_step = max(next_step, time.perf_counter() - interval) + interval
            while (left := next_step - interval - time.perf_counter()) > 0:
                time.sleep(min(left, POLL_SECONDS))
                check_stop()
        channel.take_weights(worker.load, check_stop)
        summary_step = channel.take_summary_request()
        started = time.perf_counter()
        steps = worker.collect(1) if summary_step is None else _recorded_step(worker, summary_step, tell)
        if infos := worker.take_final_infos():
            tell('final_infos', infos)
        numbers = worker.env_seconds, time.perf_counter() - started, context.get_global_counter()
        channel.publish_statistics(worker.take_statistics(), worker.tensor, check_stop)
        channel.put(steps, Timing(*torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)))


def _recorded_step(worker: RolloutWorker, summary_step: int, tell: Any) -> Any:
    """Collect one step and send its summaries to the learner, which writes them at ``summary_step``."""
    written: list[tuple[str, tuple]] = []
    writer = SummaryForwarding(lambda method, arguments: written.append((method, arguments)))
    with (summary.push_summary_writer(writer), context.record_if(True),  # type: ignore[arg-type]
          context.summaries_at(lambda: summary_step)):
        steps = worker.collect(1)
    if written:
        tell('summary', written)
    return steps


def _stop_check(channel: UnrollChannel) -> Any:
    def check_stop() -> None:
        if channel.is_stopped or is_orphan():
            raise _Stopped
    return check_stop
