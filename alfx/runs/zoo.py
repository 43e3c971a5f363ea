"""Trained agents that are part of alfx: ``alfx play zoo:ppo_lunar_lander``.

An agent is a run folder that contains the conf, a checkpoint without critics, optimizers and replay buffers, and
``card.json``, which states how the agent was trained and how well it does. ``tools/zoo.py`` creates them.
"""
import glob
import os
from typing import Any

PREFIX = 'zoo:'
FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'examples', 'agents')
CARD = 'card.json'


def names() -> list[str]:
    """Return the names of the agents. Like importing this module, this needs no torch."""
    return sorted(os.path.basename(os.path.dirname(path)) for path in glob.glob(os.path.join(FOLDER, '*', CARD)))


def agents() -> dict[str, dict[str, Any]]:
    """Return the card of each agent by its name.

    A card has the keys ``conf``, ``environment``, ``seed``, ``steps``, ``returns`` (of the evaluation episodes),
    ``epsilon_greedy``, ``parameters``, ``omitted`` (the modules that acting does not need), ``date`` and ``versions``.
    """
    return {name: read_card(os.path.join(FOLDER, name)) for name in names()}


def read_card(root_dir: str) -> dict[str, Any]:
    """Return the card of an agent; empty for other run folders."""
    from alfx.gin_utils import stored_files
    try:
        return stored_files.read_json(os.path.join(root_dir, CARD), {str: object})
    except FileNotFoundError:
        return {}


def run_folder(run: str, trains: bool = False) -> str:
    """Return the run folder of ``zoo:NAME``, and any other path with ``~`` expanded.

    Args:
        run: path of a run folder, or ``zoo:NAME``.
        trains: whether the run will be trained, for which an agent lacks the optimizers.

    Raises:
        ConfError: alfx has no agent of this name, or the agent would be trained.
    """
    from alfx.gin_utils import ConfError, hint_nearest
    if not run.startswith(PREFIX):
        return os.path.expanduser(run)
    known, name = agents(), run.removeprefix(PREFIX)
    if name in known and trains:
        raise ConfError(f'{run}: an agent of alfx has no optimizers, so it cannot be trained further',
                        f'train its conf: alfx train {known[name]["conf"]}')
    if name in known:
        return os.path.join(FOLDER, name)
    hint = hint_nearest(run, [f'{PREFIX}{other}' for other in known])
    raise ConfError(f'{run}: alfx has no trained agent of this name', f'{hint} Agents: {", ".join(known)}'.lstrip())
