"""Base class of algorithms that train from a replay buffer."""
from alfx.algorithms.rl_algorithm import RLAlgorithm
from alfx.gin_utils import configurable


@configurable
class OffPolicyAlgorithm(RLAlgorithm):
    """Base class of algorithms that store the steps of ``rollout_step`` and train on samples with ``train_step``.

    A subclass implements ``rollout_step``, ``train_step`` and ``calc_loss``. An iteration does::

        for _ in range(unroll_length):
            action, state, info = rollout_step(time_step, state)
            store (time_step, action, info, state)
            time_step = env.step(action)
        for _ in range(num_updates_per_train_iter):
            batch = sample from the replay buffer
            loss = calc_loss(train_step(batch.time_step, state, batch.rollout_info).info)
            update the parameters

    The arguments are the same as in :class:`alfx.algorithms.rl_algorithm.RLAlgorithm`.
    """

    @property
    def on_policy(self) -> bool | None:
        """Return ``False``; a subclass that supports both modes overrides this."""
        return False
