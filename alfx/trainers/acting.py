"""Who acts in a run: this process, or others that the conf asks for."""
from typing import Any

from alfx.algorithms.config import TrainerConfig
from alfx.engine.remote_unroll import UnrollSource, check_source


def create_environment(config: TrainerConfig) -> Any:
    """The environments to train in; where other processes act, only their description.

    Args:
        config: of the run.

    Raises:
        ConfError, EnvironmentLoadError: there can be none.
    """
    from alfx.environments import utils
    options = {'only_described': True} if option(config) else {}
    return utils.create_environment(seed=config.random_seed, **options)


def option(config: TrainerConfig) -> str:
    """The field of the configuration that lets other processes act, '' if this one does."""
    return 'async_unroll' if config.async_unroll else ''


def check(algorithm: Any, config: TrainerConfig) -> None:
    """Refuse an algorithm that cannot learn from what other processes did, if they act.

    Raises:
        ConfError: that is so.
    """
    if option(config):
        check_source(algorithm, config, option(config))


def start(algorithm: Any, config: TrainerConfig) -> UnrollSource | None:
    """Start the processes that act; ``None`` if this one does.

    Args:
        algorithm: the root algorithm, with the weights and counters that the run goes on from.
        config: of the run.

    Raises:
        ConfError: they cannot be started.
    """
    if not config.async_unroll:
        return None
    from alfx.algorithms.async_unroller import AsyncUnroller
    source = AsyncUnroller(algorithm, config)
    algorithm.set_unroll_source(source, config.unroll_parameter_update_period)
    return source
