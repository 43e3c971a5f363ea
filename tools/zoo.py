"""Put trained agents into the package, and write docs/agents.md.

    python tools/zoo.py ppo_cart_pole sac_pendulum --folder runs/results     # from the runs of tools/results.py
    python tools/zoo.py --page                                              # only rewrite the page

The seed with the highest return among the runs of the conf in the folder is taken. The agent is evaluated again from
its reduced checkpoint, and a video of it is recorded.
"""
import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pictures import film_of, write_agents
from results import mean_over_episodes
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import alfx
from alfx import gin_utils
from alfx.checkpoints.checkpointer import Checkpointer
from alfx.checkpoints.module_states import enable_checkpoint
from alfx.runs import playing, run_files, zoo
from alfx.runs.evaluator import evaluate

ROOT = Path(__file__).resolve().parent.parent
FILMS = ROOT / 'docs' / 'images' / 'agents'
MOST_BYTES = 300 * 1024
_EPISODES, _FRAMES = 20, 80
_NOT_NEEDED = ('git.txt', 'command_line.txt', 'operative.gin')
_HEAD = """# Trained agents

These agents are part of alfx. Play, evaluate or export one without training it first:

```
alfx play zoo:ppo_cart_pole
alfx evaluate zoo:ppo_cart_pole --num_episodes 5
```

In Python, `alfx.load('zoo:ppo_cart_pole')` returns its policy. An agent contains only what acting needs, so it
cannot be trained further; its conf trains a new one.

*return* is the mean and the standard deviation over {episodes} evaluation episodes. Each agent is the best of the seeds
that were trained for it, one to five, with the conf of the version in the last column; [the results](results.md) have
the mean over seeds of the latest conf, which may be higher. LunarLander needs the extra `box2d`, HalfCheetah `mujoco`,
and MiniGrid `minigrid`.
`python tools/zoo.py` creates the agents and this page.

"""


def pack(conf: str, run: Path, seed: int, row: dict[str, Any], environment: str) -> int:
    """Write the agent of a run to the package, and return its size in bytes.

    Args:
        conf: name of the conf.
        run: run folder.
        seed: seed of the run.
        row: its entry in docs/results.json.
        environment: name of the environment.

    Raises:
        RuntimeError: the agent is larger than :data:`MOST_BYTES`.
    """
    target = Path(zoo.FOLDER) / conf
    with tempfile.TemporaryDirectory() as folder:
        aside = Path(folder) / conf
        shutil.copytree(run / 'conf', aside / 'conf', ignore=shutil.ignore_patterns(*_NOT_NEEDED))
        with gin_utils.loaded(None, root_dir=str(run), same_run=False, allow_unused=True):
            env, algorithm = playing.make_policy(str(run), 1, seed, row['epsilon_greedy'], nonparallel=True,
                                                 renders=False)
            step = playing.load_for_play(str(run), algorithm)
            omitted = unused_modules(algorithm, lambda: evaluate(env, algorithm, 1))
            env.close()
            for name in omitted:
                enable_checkpoint(algorithm.get_submodule(name), False)
            for optimizer in algorithm.optimizers():
                optimizer.state.clear()
            Checkpointer(run_files.checkpoint_dir(str(aside)), alg=algorithm).save(step)
            left_out = tuple(f'{module}.' for module in omitted)
            parameters, buffers = (sum(tensor.numel() for name, tensor in found if not name.startswith(left_out))
                                   for found in (algorithm.named_parameters(), algorithm.named_buffers()))
        shutil.copy(run / 'train' / 'start.json', aside / 'train')
        (aside / zoo.CARD).write_text(json.dumps({'omitted': omitted}))
        result, original = (alfx.evaluate(folder, num_episodes=_EPISODES, epsilon_greedy=row['epsilon_greedy'],
                                          random_seed=1) for folder in (aside, run))
        if not np.array_equal(result.returns, original.returns):
            raise RuntimeError(f'the agent of {conf} does not act like its run {run}')
        card = {'conf': conf, 'environment': environment, 'seed': seed, 'steps': row['env_steps'],
                'returns': [float(f'{value:.6g}') for value in np.reshape(result.returns, len(result.returns))],
                'epsilon_greedy': row['epsilon_greedy'], 'parameters': parameters or buffers, 'omitted': omitted,
                'date': row['date'], 'versions': row['versions']}
        (aside / zoo.CARD).write_text(json.dumps(card, indent=1) + '\n')
        size = sum(file.stat().st_size for file in aside.rglob('*') if file.is_file())
        if size > MOST_BYTES:
            raise RuntimeError(f'the agent of {conf} has {size:,} bytes; at most {MOST_BYTES:,} are allowed')
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(aside, target)
    return size


def unused_modules(algorithm: nn.Module, act: Callable[[], Any]) -> list[str]:
    """Return the outermost modules of an algorithm whose tensors ``act()`` does not read."""
    act()  # the first call also reads the other modules, to prepare later ones
    with _ReadTensors() as read:
        act()

    def unused(module: nn.Module) -> Iterator[str]:
        for name, part in module.named_children():
            tensors = [*part.parameters(), *part.buffers()]
            if tensors and not any(_address(tensor) in read.addresses for tensor in tensors):
                yield name
            else:
                yield from (f'{name}.{inner}' for inner in unused(part))

    return list(unused(algorithm))


class _ReadTensors(TorchDispatchMode):
    """Collects the addresses of the arguments of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.addresses.update(_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        return func(*args, **(kwargs or {}))


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()  # not of its storage, which parameters may share


def write_film(name: str) -> None:
    """Record a short `.gif` of an agent."""
    write_agents(FILMS / f'{name}.gif', [film_of(f'{zoo.PREFIX}{name}', episodes=1, max_frames=400)[:_FRAMES]])


def write_page() -> None:
    """Write docs/agents.md from the cards."""
    lines = [_HEAD.format(episodes=_EPISODES), '| agent | | environment | return | steps | parameters | alfx |\n'
             '| --- | --- | --- | ---: | ---: | ---: | --- |\n']
    for name, card in zoo.agents().items():
        film = FILMS / f'{name}.gif'
        shown = f'![{name} on {card["environment"]}](images/agents/{film.name})' if film.exists() else ''
        returns = np.array(card['returns'])
        cells = (f'`zoo:{name}`', shown, card['environment'], f'{returns.mean():,.4g} +- {returns.std():,.3g}',
                 f"{card['steps']:,}", f"{card['parameters']:,}", card['versions']['alfx'])
        lines.append(f"| {' | '.join(cells)} |\n")
    (ROOT / 'docs' / 'agents.md').write_text(''.join(lines))


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('confs', nargs='*', help='names of confs')
    parser.add_argument('--folder', type=Path, default=ROOT / 'runs' / 'results', help='--folder of tools/results.py')
    parser.add_argument('--json', type=Path, default=ROOT / 'docs' / 'results.json', help='file with the results')
    parser.add_argument('--page', action='store_true', help='only rewrite the page')
    args = parser.parse_args()
    stored = json.loads(args.json.read_text())
    for conf in args.confs:
        entry = stored[conf]
        runs = {int(seed): args.folder / f"{conf}-{entry['fingerprint']}" / f'seed-{seed}' for seed in entry['runs']}
        found = [seed for seed, run in runs.items() if os.path.isdir(run)]
        if not found:
            parser.error(f'{args.folder} has no run of {conf} with the current bindings')
        seed = max(found, key=lambda seed: mean_over_episodes(entry['runs'][str(seed)], 'return'))
        size = pack(conf, runs[seed], seed, entry['runs'][str(seed)], entry['env_name'])
        write_film(conf)
        print(f'{conf}: seed {seed}, {size:,} bytes')
    write_page()
    return 0


if __name__ == '__main__':
    sys.exit(main())
