"""Choice of the processes that act in a run: the training process, or asynchronous actors."""
from functools import partial
from typing import Any

from alfx.config import TrainerConfig
from alfx.engine.remote.remote_unroll import UnrollSource, check_source
from alfx.gin_utils import ConfError, problem_at


def create_environment(config: TrainerConfig) -> Any:
    """Create the training environments, or only their description if other processes act.

    Args:
        config: configuration of the run.

    Raises:
        ConfError, EnvironmentLoadError: the environments cannot be created.
    """
    from alfx.environments import rendering, utils
    from alfx.environments.described_environment import DescribedEnvironment
    from alfx.offline.dataset_spaces import RecordedEnvironment
    options: dict[str, Any] = {'only_described': True} if config.async_actor_field else {}
    if datasets := config.offline_datasets():
        options['described_by'] = partial(RecordedEnvironment, datasets)
    with rendering.wanted(False):
        env = utils.create_environment(seed=config.random_seed, **options)
    if isinstance(env, RecordedEnvironment) and (config.collects or config.evaluate):
        setting = 'evaluate' if config.evaluate else 'unroll_length'
        raise ConfError([problem_at('create_environment', 'env_name', "= 'offline' has no environment to act in, but "
                                    f'TrainerConfig.{setting} = {getattr(config, setting)}',
                                    f'set TrainerConfig.{setting} to {type(getattr(config, setting))()}, or name an '
                                    'environment')])
    return DescribedEnvironment(env, config.num_ray_workers * env.batch_size) if config.num_ray_workers else env


def check(algorithm: Any, config: TrainerConfig) -> None:
    """Check that the algorithm supports asynchronous actors if the conf uses them.

    Raises:
        ConfError: the algorithm does not support asynchronous actors, or Ray is not installed.
    """
    if config.async_actor_field:
        check_source(algorithm, config, config.async_actor_field)
    if config.num_ray_workers:
        from alfx.trainers.acting.ray_cluster import import_ray
        import_ray(f'TrainerConfig.num_ray_workers = {config.num_ray_workers}')


def act_here(config: TrainerConfig) -> None:
    """Change a configuration so that this process acts, for a test run."""
    config.unroll_length = config.unroll_length or config.max_unroll_length
    config.async_unroll, config.num_ray_workers = False, 0


def start(algorithm: Any, config: TrainerConfig) -> UnrollSource | None:
    """Start the asynchronous actors; return None if this process acts.

    Args:
        algorithm: root algorithm, with the weights and counters from which the run starts or resumes.
        config: configuration of the run.

    Raises:
        ConfError: the actors cannot be started.
    """
    source: UnrollSource
    if config.num_ray_workers:
        from alfx.trainers.acting.ray_rollout import RayRollout
        source = RayRollout(algorithm, config)
    elif config.async_unroll:
        from alfx.algorithms.async_unroller import AsyncUnroller
        source = AsyncUnroller(algorithm, config)
    else:
        return None
    algorithm.learner.collector.use_source(source, config.unroll_parameter_update_period)
    return source
