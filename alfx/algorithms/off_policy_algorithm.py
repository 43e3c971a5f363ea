"""Base of algorithms that train on a replay buffer."""
from alfx.algorithms.rl_algorithm import RLAlgorithm
from alfx.gin_utils import configurable


@configurable
class OffPolicyAlgorithm(RLAlgorithm):
    """An algorithm that stores what ``rollout_step`` collects and trains with ``train_step`` on what it stored.

    A subclass implements ``rollout_step``, ``train_step`` and ``calc_loss``. An iteration does::

        for _ in range(unroll_length):
            action, state, info = rollout_step(time_step, state)
            store (time_step, action, info, state)
            time_step = env.step(action)
        for _ in range(num_updates_per_train_iter):
            batch = sample from the replay buffer
            loss = calc_loss(train_step(batch.time_step, state, batch.rollout_info).info)
            update the parameters

    The arguments are those of :class:`alfx.algorithms.rl_algorithm.RLAlgorithm`.
    """

    @property
    def on_policy(self) -> bool | None:
        """False unless a subclass supports both ways."""
        return False
