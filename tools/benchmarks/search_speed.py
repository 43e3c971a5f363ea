"""Measure the time of a tree search simulation, without a model and with a small network.

    python tools/benchmarks/search_speed.py [--grid 1,4,25 8,4,25 64,18,50] [--rounds 5] [--tensors] \\
        [--peers mctx lightzero]

The grid lists B (trees), A (actions) and S (simulations). The untrained network has layers 64 + A -> 128 -> 64 for the
next latent state, and 64 -> 128 -> A + 2 for policy, value and reward. Times are microseconds per simulation step of
all B trees together, in one thread. All systems run alternately; times are medians over the rounds, ratios are medians
of the ratios within a round. 'tree' is the search without model calls, with the same random outputs each time; 'net' is
the network calls only. 'alfx' is the search of MuZero, with the model replayed from a traced graph; 'eager' runs the
model eagerly; 'compiled' is the search with ``TrainerConfig.compile``.

Peers must be installed (mctx with jax; the compiled trees of LightZero, ``lzero.mcts.ctree``); they use a network of
the same size, without noise: mctx.muzero_policy, mctx.gumbel_muzero_policy, and LightZero's trees with the network in
torch. Missing peers are skipped with a message. Compilation is not timed. Prints a Markdown table.
"""
import argparse
import importlib.machinery
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from alfx.engine.plan import TracedFunction
from alfx.engine.plan import backends
from alfx.tree_search import build
from alfx.tree_search.batched_search import BackendFactory, Prediction, TreeSearch
from alfx.tree_search.trees import SearchSettings

LATENT, HIDDEN = 64, 128
WARM_UP = 20  # searches before the model is traced, instead of hundreds
GRID = ('1,4,25', '8,4,25', '64,4,25', '8,18,50', '64,18,50')
Run = Callable[[], object]


class Network(nn.Module):
    """Model with fully connected layers.

    Args:
        num_actions: number of actions, A.
    """

    def __init__(self, num_actions: int):
        super().__init__()
        self.num_actions = num_actions
        self.dynamics = nn.Sequential(nn.Linear(LATENT + num_actions, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, LATENT))
        self.prediction = nn.Sequential(nn.Linear(LATENT, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, num_actions + 2))
        self.register_buffer('eye', torch.eye(num_actions))

    def predict(self, latent: torch.Tensor) -> Prediction:
        """Predict policy, value and reward of latent states ``[B, 64]``."""
        output = self.prediction(latent)
        return Prediction(output[:, 0], output[:, 1], action_probs=output[:, 2:].softmax(-1), state=latent)

    def forward(self, latent: torch.Tensor, action: torch.Tensor) -> Prediction:
        """Predict the result of actions ``[B]``."""
        return self.predict(self.dynamics(torch.cat((latent, self.eye[action]), -1)))


def alfx_runs(B: int, A: int, S: int, network: Network, tensors: bool) -> dict[str, Run]:
    """Return the variants of alfx by name, as functions that run S simulations."""
    latent, zeros = torch.randn(B, LATENT), torch.zeros(B, dtype=torch.int64)
    with torch.no_grad():
        root = network.predict(latent)
    prior = root.action_probs.double()

    def searched(rule: str, model: Callable, first: Prediction, native: bool = True,
                 make_backend: BackendFactory | None = None) -> Run:
        search = TreeSearch(SearchSettings(S, discount=0.997, rule=rule, gumbel_scale=0.0), native, make_backend)
        for _ in range(3 * WARM_UP if make_backend else 0):
            search.run(model, first, prior, zeros)
        return lambda: search.run(model, first, prior, zeros)

    def nothing(function: Callable, memory: nn.Module) -> Callable:
        memory.outputs.uniform_(0.1, 1.0)
        memory.outputs[:, 2] = 0.0
        return lambda places: ()

    def net_alone() -> None:
        with torch.no_grad():
            for _ in range(S):
                network(latent, zeros)

    runs = {'tree': searched('ucb', network, root, make_backend=nothing), 'net': net_alone}
    backends_of: dict[str, BackendFactory | None] = {
        'alfx eager': None, 'alfx': recorded(network, False), 'alfx compiled': recorded(network, True)}
    for name, make_backend in backends_of.items():
        runs |= {name: searched('ucb', network, root, make_backend=make_backend),
                 f'{name} gumbel': searched('gumbel', network, root, make_backend=make_backend)}
    if tensors or build.load() is None:
        runs['alfx tensors'] = searched('ucb', network, root, native=False)
    return runs


def recorded(network: Network, compiles: bool) -> BackendFactory:
    """Return the function that traces the model as in :class:`~alfx.algorithms.mcts_algorithm.MCTSAlgorithm`."""
    return lambda function, memory: TracedFunction(function, network, memory, compiles=compiles, name='the model')


def mctx_runs(B: int, A: int, S: int, network: Network) -> dict[str, Run]:
    """Return the variants of mctx, with the same weights."""
    import jax
    import jax.numpy as jnp
    import mctx
    weights = {name: jnp.asarray(x.detach().numpy()) for name, x in network.state_dict().items()}

    def layers(name, x):
        hidden = jax.nn.relu(x @ weights[f'{name}.0.weight'].T + weights[f'{name}.0.bias'])
        return hidden @ weights[f'{name}.2.weight'].T + weights[f'{name}.2.bias']

    def recurrent(params, key, action, latent):
        latent = layers('dynamics', jnp.concatenate((latent, jax.nn.one_hot(action, A)), -1))
        output = layers('prediction', latent)
        return mctx.RecurrentFnOutput(reward=output[:, 1], discount=jnp.full(B, 0.997), prior_logits=output[:, 2:],
                                      value=output[:, 0]), latent

    def policy(key, latent, **options):
        output = layers('prediction', latent)
        root = mctx.RootFnOutput(prior_logits=output[:, 2:], value=output[:, 0], embedding=latent)
        function = options.pop('function')
        return function((), key, root, recurrent, S, **options).action_weights

    latent, key = jnp.asarray(np.random.default_rng(0).normal(size=(B, LATENT)), jnp.float32), jax.random.PRNGKey(0)
    runs: dict[str, Run] = {}
    for name, options in {'mctx muzero': dict(function=mctx.muzero_policy, dirichlet_fraction=0.0),
                          'mctx gumbel': dict(function=mctx.gumbel_muzero_policy, gumbel_scale=0.0)}.items():
        compiled = jax.jit(lambda key, latent, options=options: policy(key, latent, **options))
        runs[name] = lambda compiled=compiled: compiled(key, latent).block_until_ready()
    return runs


def _lightzero_tree() -> Any:
    """Load only the compiled module, since the rest of the package needs older numpy and gymnasium versions."""
    spec = importlib.util.find_spec('lzero')
    assert spec is not None and spec.submodule_search_locations, 'main() checks that LightZero is installed'
    found = sorted(Path(spec.submodule_search_locations[0]).glob('mcts/ctree/ctree_muzero/mz_tree*.so'))
    if not found:
        raise SystemExit('LightZero is installed without its compiled trees')
    loader = importlib.machinery.ExtensionFileLoader('mz_tree', str(found[0]))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader('mz_tree', loader))
    loader.exec_module(module)
    return module


def lightzero_runs(B: int, A: int, S: int, network: Network) -> dict[str, Run]:
    """Return the variant of LightZero: its compiled trees with the network in torch."""
    mz_tree = _lightzero_tree()
    latent = torch.randn(B, LATENT)
    legal, noise = [list(range(A))] * B, [[0.0] * A] * B

    def run() -> None:
        with torch.no_grad():
            root = network.predict(latent)
            roots = mz_tree.Roots(B, legal)
            roots.prepare(0.0, noise, root.reward.tolist(), root.action_probs.log().tolist(), [-1] * B)
            bounds = mz_tree.MinMaxStatsList(B)
            bounds.set_delta(0.01)
            states = [latent.numpy()]
            for step in range(S):
                results = mz_tree.ResultsWrapper(B)
                x, y, actions, _ = mz_tree.batch_traverse(roots, 19652, 1.25, 0.997, bounds, results, [-1] * B)
                chosen = torch.from_numpy(np.stack([states[i][j] for i, j in zip(x, y)]))
                output = network(chosen, torch.as_tensor(actions))
                states.append(output.state.numpy())
                mz_tree.batch_backpropagate(step + 1, 0.997, output.reward.tolist(), output.value.tolist(),
                                            output.action_probs.log().tolist(), bounds, results, [-1] * B)

    return {'LightZero': run}


PEERS = {'mctx': ('mctx', mctx_runs), 'lightzero': ('lzero', lightzero_runs)}


def measure(runs: dict[str, Run], num_steps: int, rounds: int) -> dict[str, list[float]]:
    """Return the microseconds per simulation step of each variant in each round."""
    for run in runs.values():
        run()  # compilation and allocation
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            count, started = 0, time.perf_counter()
            while count < 3 or time.perf_counter() - started < 0.1:
                run()
                count += 1
            times[name].append((time.perf_counter() - started) / count / num_steps * 1e6)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--grid', nargs='+', default=GRID, help='B,A,S')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--tensors', action='store_true', help='also measure the search with tensors')
    parser.add_argument('--peers', nargs='*', default=(), choices=list(PEERS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    backends.WARM_UP = backends.WarmUp(calls=WARM_UP, compiled_calls=WARM_UP)
    print('| B, A, S | ' + 'microseconds per step (relative to alfx)' + ' |\n| --- | --- |')
    missing = [name for name in options.peers if importlib.util.find_spec(PEERS[name][0]) is None]
    for cell in options.grid:
        B, A, S = map(int, cell.split(','))
        network = Network(A).eval()
        runs = alfx_runs(B, A, S, network, options.tensors)
        for name in options.peers:
            if name not in missing:
                runs.update(PEERS[name][1](B, A, S, network))
        times = measure(runs, S, options.rounds)
        entries = []
        for name, found in times.items():
            ratio = statistics.median(x / y for x, y in zip(found, times['alfx']))
            entries.append(f'{name} {statistics.median(found):.0f} ({ratio:.2f})')
        print(f'| {B}, {A}, {S} | ' + ', '.join(entries) + ' |', flush=True)
    for name in missing:
        print(f'{name} is not installed')


if __name__ == '__main__':
    main()
