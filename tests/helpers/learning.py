"""Training until a policy is good, so that tests of learning take no longer than necessary."""


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
