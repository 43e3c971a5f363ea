"""How often a run writes summaries and evaluates, where the conf says how many times in all."""
import math

from alfx.config import TrainerConfig


def compute_summary_or_eval_interval(config: TrainerConfig, batch_size: int, calls: int = 100) -> int:
    """Iterations between two summaries or evaluations, so that there are ``calls`` of them in the whole run.

    Args:
        config: says how long the run is.
        batch_size: number of environments.
        calls: how many there shall be.
    """
    iterations = config.num_iterations
    if config.num_env_steps:
        unroll_length = config.unroll_length or config.max_unroll_length
        until_steps = math.ceil(config.num_env_steps / max(unroll_length * batch_size, 1e-9))
        iterations = min(iterations, until_steps) if iterations else until_steps
    return max(1, math.ceil(iterations / calls))
