"""Acting in another process: environments and algorithm of a run, made anew from the conf in its run folder.

Here is what every such process does, whoever starts it and however its steps travel: ``algorithms/async_unroller.py``
has one on this machine, Ray has many anywhere.
"""
from typing import Any

import torch

from alfx import context
from alfx.algorithms.config import TrainerConfig
from alfx.data_structures import TimeStep
from alfx.engine.remote_unroll import Steps
from alfx.engine.unroll import Cursor, start, unroll
from alfx.environments.alf_environment import AlfEnvironment
from alfx.environments.seeding import derived_seed
from alfx.environments.wrapper_base import AlfEnvironmentBaseWrapper
from alfx.trainers import building, random_state
from alfx.trainers.policy_state import load_policy_state, policy_tensors


class RolloutWorker:
    """Acts with the weights that it is given.

    Worker w of W has the environments ``w * E`` to ``(w + 1) * E - 1``, with the random streams that these would have
    in one process, and ``TimeStep.env_id`` counted through. Worker 0 alone draws the random numbers of a run in which
    nobody else acts.

    Args:
        conf_file: the conf that everything is made from: one in which everything is resolved.
        settings: what the learner has decided:

            - 'root_dir', 'random_seed', 'float32_matmul_precision', 'flush_denormal';
            - 'start': 0 for a new run; another number for every time that a run goes on, so that its random streams
              are new ones;
            - 'num_environments': E; left out: what the conf says;
            - 'first_environment': added to the number of every environment; 0 if left out.
        worker_index: w.
        num_workers: W.

    Raises:
        ConfError, EnvironmentLoadError: as in a run of one process.
    """

    def __init__(self, conf_file: str, settings: dict[str, Any], worker_index: int = 0, num_workers: int = 1):
        raise NotImplementedError

    @property
    def batch_size(self) -> int:
        """E, the number of environments of this worker."""
        raise NotImplementedError

    @property
    def algorithm(self) -> Any:
        """The root algorithm of this process."""
        raise NotImplementedError

    def collect(self, length: int) -> Steps:
        """Act for ``length`` steps: ``[length, E, ...]``, on the CPU."""
        raise NotImplementedError

    def load(self, state: dict[str, torch.Tensor], global_counter: int, progresses: dict[str, float]) -> None:
        """Act with these weights from the next step on.

        Args:
            state: as of ``policy_state``.
            global_counter: the learner's counter.
            progresses: what schedules depend on.
        """
        raise NotImplementedError

    def statistics(self) -> dict[str, torch.Tensor]:
        """Copies of the tensors that acting itself has changed; worker 0 alone has any."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the environments."""
        raise NotImplementedError
