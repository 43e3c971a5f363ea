"""Creation of gymnasium environments by name; errors suggest the package to install or a similar name."""
import importlib
import inspect
import io
import logging
import multiprocessing
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator, registry
from gymnasium.vector import VectorEnv

from alfx import gin_utils
from alfx.environments.environment_errors import EnvironmentLoadError, nearest
from alfx.utils.extras import pip_install

_log = logging.getLogger(__name__)

# packages that register environments when imported: patterns of their ids
_PLUGINS = {'ale_py': r'ALE/|.*NoFrameskip-v', 'minigrid': r'MiniGrid-|BabyAI-', 'shimmy': r'dm_control/',
            'gymnasium_robotics': r'Fetch|HandReach|HandManipulate|AdroitHand|FrankaKitchen|PointMaze|AntMaze'}
# prefix of an entry point: the extra that installs what it needs
_EXTRAS = {'gymnasium.envs.box2d': 'box2d', 'gymnasium.envs.mujoco': 'mujoco', 'ale_py': 'atari',
           'minigrid': 'minigrid', 'gymnasium_robotics': 'robotics'}
EnvCtor = Callable[..., gymnasium.Env]
RENDER_MODES = ('rgb_array', 'human', None)


def make_env(environment_name: str | EnvCtor, max_episode_steps: int | None = None,
             render_mode: str | None = 'rgb_array', env_args: Mapping[str, Any] | None = None) -> gymnasium.Env:
    """Create the gymnasium environment ``environment_name``.

    Args:
        environment_name: a registered id; 'module:id', which imports the module first; or a class or function that
            returns an environment.
        max_episode_steps: steps after which an episode is truncated; ``None``: as registered; 0: never.
        render_mode: 'human' shows every step; 'rgb_array' allows images. It becomes ``None`` in environments that
            cannot be rendered, or whose constructor raises with it but not without.
        env_args: further arguments of the environment's constructor.

    Raises:
        EnvironmentLoadError: an unknown name, a missing package, wrong arguments.
    """
    if render_mode not in RENDER_MODES:
        raise EnvironmentLoadError(f'render_mode: expected one of {RENDER_MODES}, found {render_mode!r}')
    arguments = dict(env_args or {})
    if callable(environment_name):
        return _made_by(environment_name, max_episode_steps, render_mode, arguments)
    spec = find_spec(environment_name)
    if 'xml_file' in arguments:
        gin_utils.require_trust(f'the model xml_file = {arguments["xml_file"]!r} of {environment_name}')
    with _translated_errors(environment_name, spec):
        # gymnasium's checker costs as much as a step of CartPole; alf_wrappers.CheckedEnvironment checks more
        make = partial(gymnasium.make, spec, max_episode_steps=-1 if max_episode_steps == 0 else max_episode_steps,
                       disable_env_checker=True, **arguments)
        modes = None if render_mode is None else _render_modes(spec.entry_point)
        if render_mode is None or 'render_mode' in arguments or modes is not None and render_mode not in modes and not (
                render_mode == 'human' and 'rgb_array' in modes):
            return make()
        return make_rendered(make, render_mode, environment_name)


def _made_by(ctor: EnvCtor, max_episode_steps: int | None, render_mode: str | None,
             arguments: dict[str, Any]) -> gymnasium.Env:
    """Create an environment with a user-defined class or function; see :func:`make_env`."""
    name = getattr(ctor, '__qualname__', str(ctor))
    make = partial(ctor, **arguments)
    if render_mode is not None and 'render_mode' not in arguments and accepts_render_mode(ctor):
        env = make_rendered(make, render_mode, name)
    else:
        env = make()
    if not isinstance(env, gymnasium.Env):
        raise EnvironmentLoadError(f'create_environment.env_name = {name}: expected a function that returns a '
                                   f'gymnasium.Env, found one that returns a {type(env).__name__}')
    return gymnasium.wrappers.TimeLimit(env, max_episode_steps) if max_episode_steps else env


def function_name(function: Any) -> str:
    """Return the module and the name of a function, for a partial object those of the function that it calls."""
    while isinstance(function, partial):
        function = function.func
    return f'{getattr(function, "__module__", "")}.{getattr(function, "__name__", function)}'


def accepts_render_mode(function: Callable[..., Any]) -> bool:
    """Return whether ``function`` has an argument ``render_mode``, or accepts any keyword argument."""
    parameters = inspect.signature(function).parameters
    return 'render_mode' in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def make_rendered(make: Callable[..., gymnasium.Env], render_mode: str, name: str) -> gymnasium.Env:
    """Create an environment that can be rendered or, if only this fails, one that cannot, which suffices for training.

    Args:
        make: constructor, called with ``render_mode`` and then without arguments.
        render_mode: 'human', which has to work, or 'rgb_array'.
        name: name of the environment in messages.
    """
    try:
        return make(render_mode=render_mode)
    except Exception as error:  # no such argument, or no display
        if render_mode == 'human':
            raise
        env = make()
        if getattr(env, 'render_mode', None) != render_mode:
            _log.warning('%s is created without render_mode=%r and cannot be rendered: %s', name, render_mode, error)
        return env


def make_native(environment_name: str, batch_size: int, max_episode_steps: int | None = None,
                render_mode: str | None = None, env_args: Mapping[str, Any] | None = None) -> VectorEnv:
    """Create the natively batched implementation of ``environment_name``.

    Args:
        environment_name: a registered id with a ``vector_entry_point``.
        batch_size: number of environments.
        max_episode_steps: passed on if not ``None``.
        render_mode: passed on if the implementation lists it in its metadata.
        env_args: further arguments of the constructor.

    Raises:
        EnvironmentLoadError: there is no such implementation, or for the reasons of :func:`make_env`.
    """
    spec = find_spec(environment_name)
    if spec.vector_entry_point is None:
        raise EnvironmentLoadError(f'{spec.id} has no natively batched implementation: leave out native=True')
    arguments = dict(env_args or {})
    if max_episode_steps is not None:
        arguments['max_episode_steps'] = max_episode_steps or 2**31 - 1  # 0 would end the episode at each step
    with _translated_errors(environment_name, spec):
        if render_mode in (_render_modes(spec.vector_entry_point) or ()):
            arguments.setdefault('render_mode', render_mode)
        return gymnasium.make_vec(spec, num_envs=batch_size, vectorization_mode='vector_entry_point', **arguments)


def find_spec(environment_name: str) -> EnvSpec:
    """Return the specification registered as ``environment_name``, importing the package that registers it if known.

    Raises:
        EnvironmentLoadError: no such environment; the message suggests similar names.
    """
    module, _, name = environment_name.rpartition(':')
    if not gin_utils.is_trusted():
        return _builtin_spec(environment_name)
    if module:
        _import(module, f'{environment_name!r} names the module {module!r}')
    for package, pattern in _PLUGINS.items():
        if name not in registry and re.match(pattern, name):
            _import_plugin(package, name)
    if name in registry:
        return registry[name]
    if not re.search(r'-v\d+$', name):
        versions = _versions(name)
        if versions:
            raise EnvironmentLoadError(f'environment {name!r} does not exist without a version; did you mean '
                                       f'{" or ".join(map(repr, versions))}?')
    for package in _PLUGINS:
        _import_if_there(package)
    if name not in registry:
        raise EnvironmentLoadError(_unknown(name))
    return registry[name]


def _builtin_spec(environment_name: str) -> EnvSpec:
    """Return the specification of an environment of gymnasium itself, without importing anything else.

    Raises:
        ConfError: it belongs to another package, which an untrusted conf may not import.
    """
    spec = registry.get(environment_name)
    entry_points = () if spec is None else (spec.entry_point, spec.vector_entry_point)
    if spec is None or not all(entry is None or isinstance(entry, str) and entry.startswith('gymnasium.envs.')
                               for entry in entry_points):
        gin_utils.require_trust(f'the environment {environment_name!r}')
    assert spec is not None, 'require_trust should have raised an error'
    return spec


def _versions(name: str) -> list[str]:
    """Return the registered ids that differ from ``name`` in their version only."""
    stem = re.sub(r'-v\d+$', '', name)
    return sorted(known for known in registry if re.fullmatch(re.escape(stem) + r'-v\d+', known))


def _version(name: str) -> int:
    return int(name.rpartition('-v')[2] if '-v' in name else -1)


def _unknown(name: str) -> str:
    latest = (max([known, *_versions(known)], key=_version) for known in nearest(name, registry))
    suggestions = _versions(name) or [*dict.fromkeys(latest)]
    hint = f'did you mean {" or ".join(map(repr, suggestions))}?' if suggestions else (
        'gymnasium.registry lists all; to register a custom environment, import its module: '
        f"'your_module:{name}'")
    if multiprocessing.parent_process() is not None:
        hint += (". This process knows only what is registered when the program is imported: register it outside of if "
                 "__name__ == '__main__', or set TrainerConfig.async_eval = False")
    return f'no environment is registered as {name!a}; {hint}'


def _import(module: str, why: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise EnvironmentLoadError(f'{why}, which cannot be imported: {error}') from error


def _import_plugin(package: str, name: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError:
        command = pip_install(_EXTRAS[package]) if package in _EXTRAS else "pip install 'shimmy[dm-control]'"
        raise EnvironmentLoadError(f"{name} needs the package {package.replace('_', '-')}: {command}") from None


def _import_if_there(package: str) -> None:
    """Import a package if it is installed, hiding its messages about environments that may not be used."""
    unread = io.StringIO()
    try:
        with redirect_stdout(unread), redirect_stderr(unread):
            importlib.import_module(package)
    except ImportError:
        _log.debug('%s is not installed', package)


def _render_modes(creator: Any) -> Sequence[str | None] | None:
    """Return the render modes that the class of an environment declares; ``None`` if a function creates it.

    Args:
        creator: class or function, or its name, 'module:name'.
    """
    if isinstance(creator, str):
        creator = load_env_creator(creator)
    return (getattr(creator, 'metadata', None) or {}).get('render_modes') or () if isinstance(creator, type) else None


@contextmanager
def _translated_errors(name: str, spec: EnvSpec) -> Iterator[None]:
    """Translate the errors of gymnasium into :class:`EnvironmentLoadError`."""
    try:
        yield
    except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
        entry = spec.entry_point if isinstance(spec.entry_point, str) else ''
        extra = next((extra for prefix, extra in _EXTRAS.items() if entry.startswith(prefix)), None)
        if extra is None or any(text in str(error) for text in ('have been moved', 'mujoco_py')):
            newest = max(_versions(name), key=_version, default=name)
            hint = f'; did you mean {newest!r}?' if newest != name else ''
            raise EnvironmentLoadError(f'{name} cannot be imported: {error}{hint}') from error
        raise EnvironmentLoadError(
            f'{name} needs a package that is not installed: {pip_install(extra)} ({error})') from error
    except gymnasium.error.DeprecatedEnv as error:
        raise EnvironmentLoadError(str(error)) from error
    except TypeError as error:
        if 'unexpected keyword argument' not in str(error):
            raise
        raise EnvironmentLoadError(f'{name}: {error}; env_args are passed to its constructor') from error


EnvWrapper = Callable[[gymnasium.Env], gymnasium.Env]
