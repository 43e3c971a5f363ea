"""Base of algorithms that train on their latest unroll."""
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.data_structures import AlgStep, TimeStep
from alfx.gin_utils import configurable
from alfx.tensor_specs import NestedTensor


@configurable
class OnPolicyAlgorithm(OffPolicyAlgorithm):
    """An algorithm that trains once on each unroll.

    A subclass implements ``rollout_step`` and ``calc_loss``. An iteration does::

        for _ in range(unroll_length):
            action, state, info = rollout_step(time_step, state)
            keep info
            time_step = env.step(action)
        loss = calc_loss(all infos)
        update the parameters

    The arguments are those of :class:`alfx.algorithms.rl_algorithm.RLAlgorithm`.
    """

    @property
    def on_policy(self) -> bool | None:
        """True."""
        return True

    def train_step(self, inputs: TimeStep, state: NestedTensor, rollout_info: NestedTensor) -> AlgStep:
        """The same as ``rollout_step``, unless a subclass makes better use of ``rollout_info``."""
        return self.rollout_step(inputs, state)
