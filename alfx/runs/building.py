"""Construction of the environment and the algorithm of a run, for training, evaluation and play."""
from typing import Any

from alfx import context
from alfx.algorithms.rl_algorithm import RLAlgorithm
from alfx.config import TrainerConfig
from alfx.runs import start_checks


def create_algorithm(config: TrainerConfig, env: Any, trains: bool) -> Any:
    """Create the algorithm of a run.

    The data transformer is created and stored in ``config.data_transformer``. The specs of the run are published in the
    context, where the objects that the conf constructs can read them.

    Args:
        config: configuration of the run.
        env: environment of the algorithm; None in supervised learning.
        trains: whether the algorithm trains. If so, it gets the environment, metrics and a replay buffer.

    Raises:
        ConfError: the first update would fail, see :mod:`alfx.runs.start_checks`.
    """
    if env is None:
        algorithm = config.required_algorithm_ctor()(config=config)
    else:
        observation_spec = _create_data_transformer(config, env)
        algorithm = config.required_algorithm_ctor()(
            observation_spec=observation_spec, action_spec=env.action_spec(), reward_spec=env.reward_spec(),
            env=env if trains else None, config=config, debug_summaries=config.debug_summaries)
        if trains:
            start_checks.check_learning(algorithm, config, env)
    algorithm.to(context.get_default_device())
    algorithm.set_path('')
    algorithm.finalize()
    return algorithm


def create_eval_environment(config: TrainerConfig, num_environments: int, nonparallel: bool | None = None,
                            renders: bool | None = None) -> Any:
    """Create environments for evaluation or play, with different random numbers than in training.

    Args:
        config: configuration of the run; ``random_seed`` is used.
        num_environments: number of environments.
        nonparallel: whether to step them in this process; None for the setting of the conf. A single environment is
            always stepped in this process.
        renders: whether the environments will be rendered; None: unknown.
    """
    from alfx.environments import rendering
    from alfx.environments.utils import create_environment
    options = {'nonparallel': True} if num_environments == 1 or nonparallel else {}
    with rendering.wanted(renders):
        return create_environment(for_evaluation=True, num_parallel_environments=num_environments,
                                  seed=config.random_seed, **options)


def set_epsilon_greedy(algorithm: Any, epsilon_greedy: float) -> None:
    """Make ``predict_step`` sample an action with this probability, and take the most likely action otherwise."""
    for part in algorithm.modules():
        if isinstance(part, RLAlgorithm):
            part.set_epsilon_greedy(epsilon_greedy)


def _create_data_transformer(config: TrainerConfig, env: Any) -> Any:
    """Create the data transformer and return the spec of the transformed observation."""
    raw_spec = env.observation_spec()
    context.set_run_specs(raw_spec, raw_spec, env.action_spec(), env.reward_spec())
    ctors = config.data_transformer_ctors()
    if not ctors:
        start_checks.check_observation(raw_spec)
        return raw_spec
    from alfx.algorithms.data_transformer import HindsightExperienceTransformer, create_data_transformer
    config.data_transformer = create_data_transformer(ctors, raw_spec)
    for part in config.data_transformer.modules():
        if isinstance(part, HindsightExperienceTransformer):
            part.use_goal_reward(env.goal_reward_fn())
    spec = config.data_transformer.transformed_observation_spec
    start_checks.check_observation(spec)
    context.set_run_specs(raw_spec, spec, env.action_spec(), env.reward_spec())
    return spec
