"""Unrolls of an older policy, in this process."""
import torch

from alfx.engine.remote.remote_unroll import UnrollSource
from alfx.engine.rollout import rollout, start


class StaleUnrolls(UnrollSource):
    """Steps of a copy of the learner, with the weights of the last `update_parameter`.

    Args:
        actor: the same algorithm as the learner's, in a separate environment.
    """

    def __init__(self, actor):
        self.actor, self._env = actor, actor._env
        self._cursor = None
        self.num_updates = 0

    def gather(self, length, at_least=None):
        if self._cursor is None:
            self._cursor = start(self.actor, self._env)
        return rollout(self.actor, self._env, self._cursor, length, with_grad=False, bootstrap=False,
                       transformed=bool(self.actor.on_policy),
                       keep_inputs=self.actor.capabilities.needs_unroll_inputs)

    def update_parameter(self, algorithm):
        self.num_updates += 1
        with torch.no_grad():
            for old, new in zip(self.actor.parameters(), algorithm.parameters(), strict=True):
                old.copy_(new)

    def close(self):
        """Do nothing, since there is no process."""
