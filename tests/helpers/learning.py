"""Training until a policy is good, so that tests of learning take no longer than necessary."""
import torch

from alfx import context


def greedy_return(agent, env, num_steps=4):
    """Return the mean sum of the rewards of the first steps of an episode, for a policy without state."""
    total, time_step = torch.zeros(env.batch_size), env.reset()
    with torch.no_grad(), context.eval_context():
        for _ in range(num_steps):
            time_step = env.step(agent.predict_step(time_step, agent.get_initial_predict_state(env.batch_size)).output)
            total += time_step.reward
    return float(total.mean())


def trains_until(is_good, train_iter, iterations, interval=25):
    """Train for at most ``iterations`` and return whether ``is_good()``, which is asked every ``interval`` iterations.

    Args:
        is_good: function without arguments that returns whether the policy has learned the task.
        train_iter: function without arguments that trains for one iteration.
        iterations: number of iterations after which the test fails.
        interval: number of iterations between two evaluations.
    """
    for i in range(1, iterations + 1):
        train_iter()
        if (i % interval == 0 or i == iterations) and is_good():
            return True
    return False
