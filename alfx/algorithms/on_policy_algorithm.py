"""Base class of algorithms that train on their latest unroll."""
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.data_structures import AlgStep, TimeStep
from alfx.gin_utils import configurable
from alfx.tensor_specs import NestedTensor


@configurable
class OnPolicyAlgorithm(OffPolicyAlgorithm):
    """Base class of algorithms that train once on each unroll.

    A subclass implements ``rollout_step`` and ``calc_loss``. An iteration does::

        for _ in range(unroll_length):
            action, state, info = rollout_step(time_step, state)
            store info
            time_step = env.step(action)
        loss = calc_loss(all infos)
        update the parameters

    The arguments are the same as in :class:`alfx.algorithms.rl_algorithm.RLAlgorithm`.
    """

    needs_own_rollouts = True

    @property
    def on_policy(self) -> bool | None:
        """Return ``True``."""
        return True

    def train_step(self, inputs: TimeStep, state: NestedTensor, rollout_info: NestedTensor) -> AlgStep:
        """Run ``rollout_step``; a subclass may use ``rollout_info`` instead."""
        return self.rollout_step(inputs, state)
