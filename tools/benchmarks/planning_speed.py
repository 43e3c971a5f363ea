"""Compare the time of a cross-entropy plan with the time of its matrix products, and with other libraries.

    python tools/benchmarks/planning_speed.py [--population 400] [--horizon 25] [--iterations 5] \\
        [--hidden 200 200] [--rounds 5]
                                   [--compile] [--peers mbrl torchrl]

The plan is computed by ``predict_step`` of the agent of mbrl_pendulum with the given sizes, for one environment in one
thread. ``--compile`` sets ``TrainerConfig.compile``. 'products' computes only the layers of the same network, equally
often. Peers must be installed (``CEMOptimizer`` and ``ModelEnv`` of mbrl, ``CEMPlanner`` of torchrl); they use a
network of the same size, the same reward and the same number of samples. All variants run alternately. Times are
medians over the rounds; ratios are medians of the ratios to 'products' within a round. Prints a Markdown table.
"""
import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from alfx import context, gin_utils
from alfx.algorithms.base.known_tasks import pendulum_reward
from alfx.config import TrainerConfig
from alfx.trainers.policy_trainer import RLTrainer


def planner(root_dir: str, args: argparse.Namespace) -> Callable[[], object]:
    """Return a function that computes a plan with an untrained agent."""
    gin_utils.write_conf(root_dir, gin_utils.load('mbrl_pendulum', [
        f'CEMPlanAlgorithm.population_size = {args.population}', f'CEMPlanAlgorithm.planning_horizon = {args.horizon}',
        f'CEMPlanAlgorithm.max_iter_num = {args.iterations}',
        f'CEMPlanAlgorithm.elite_size = {max(1, args.population // 10)}',
        f'DeterministicDynamicsAlgorithm.hidden_size = {tuple(args.hidden)}', 'TrainerConfig.num_threads = 1',
        f'TrainerConfig.compile = {args.compile}']))
    algorithm = RLTrainer(TrainerConfig(root_dir=root_dir)).algorithm
    time_step = algorithm.environment.current_time_step()
    state = algorithm.get_initial_predict_state(1)

    def plan() -> object:
        with torch.no_grad(), context.eval_context():
            return algorithm.predict_step(algorithm.transform_timestep(
                time_step, algorithm.get_initial_transform_state(1))[0], state)

    return plan


def network(args: argparse.Namespace) -> nn.Sequential:
    """Return the network of the model, from 3 observations and 1 action to 3 observations."""
    sizes = [4, *args.hidden, 3]
    layers = [layer for shape in zip(sizes, sizes[1:]) for layer in (nn.Linear(*shape), nn.SiLU())]
    return nn.Sequential(*layers[:-1])


def products(args: argparse.Namespace) -> Callable[[], object]:
    """Return a function that computes only the layers of the model."""
    layers, rows = network(args), torch.randn(args.population, 4)

    def multiply() -> None:
        with torch.no_grad():
            for _ in range(args.horizon * args.iterations):
                layers(rows)

    return multiply


# Peers ----------------------------------------------------------------------------------------------------------


def reward_of(action: Tensor, observation: Tensor) -> Tensor:
    """Return the reward of the conf, ``[..., 1]``."""
    return pendulum_reward(observation, action)[..., None]


def mbrl_planner(args: argparse.Namespace) -> Callable[[], object]:
    """Return a planner with the cross-entropy method of mbrl-lib, normalized inputs and one deterministic network."""
    from types import SimpleNamespace

    from mbrl.models import GaussianMLP, ModelEnv, OneDTransitionRewardModel
    from mbrl.planning.trajectory_opt import CEMOptimizer

    if len(set(args.hidden)) > 1:
        raise SystemExit('mbrl needs layers of equal size: see --hidden')
    layers = GaussianMLP(4, 3, 'cpu', num_layers=len(args.hidden), hid_size=args.hidden[0], deterministic=True,
                         activation_fn_cfg={'_target_': 'torch.nn.SiLU'})
    model = OneDTransitionRewardModel(layers, normalize=True, learned_rewards=False)
    spaces = SimpleNamespace(observation_space=None, action_space=None)
    env = ModelEnv(spaces, model, lambda action, following: torch.zeros(len(action), 1, dtype=torch.bool),
                   reward_of)
    optimizer = CEMOptimizer(args.iterations, max(1, args.population // 10) / args.population, args.population,
                             [[-1.0]] * args.horizon, [[1.0]] * args.horizon, 0.1, torch.device('cpu'))
    start, observation = torch.zeros(args.horizon, 1), np.array([1.0, 0.0, 0.0])
    return lambda: optimizer.optimize(lambda plans: env.evaluate_action_sequences(plans, observation, 1), start)


def torchrl_planner(args: argparse.Namespace) -> Callable[[], object]:
    """Return a planner with the cross-entropy method of TorchRL."""
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule
    from torchrl.data import Bounded, Composite, Unbounded
    from torchrl.envs.model_based import ModelBasedEnvBase
    from torchrl.modules import CEMPlanner, WorldModelWrapper

    class World(ModelBasedEnvBase):
        """Model as a TorchRL environment."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)
            self.observation_spec = Composite(observation=Unbounded((3, )))
            self.state_spec = Composite(observation=Unbounded((3, )))
            self.action_spec = Bounded(-1.0, 1.0, (1, ))
            self.reward_spec = Unbounded((1, ))

        def _reset(self, tensordict: TensorDict) -> TensorDict:
            return self.full_observation_spec.zero()

    layers = network(args)
    dynamics = TensorDictModule(lambda observation, action: observation + layers(torch.cat((observation, action), -1)),
                                ['observation', 'action'], ['observation'])
    reward = TensorDictModule(lambda observation, action: reward_of(action, observation),
                              ['observation', 'action'], ['reward'])
    planner = CEMPlanner(World(WorldModelWrapper(dynamics, reward)), args.horizon, args.iterations, args.population,
                         max(1, args.population // 10))
    start = TensorDict({'observation': torch.tensor([1.0, 0.0, 0.0])})

    def plan() -> object:
        with torch.no_grad():
            return planner(start.clone())

    return plan


PEERS = {'mbrl': mbrl_planner, 'torchrl': torchrl_planner}


# Measuring ------------------------------------------------------------------------------------------------------


def seconds(run: Callable[[], object], repetitions: int) -> float:
    """Return the mean seconds of ``repetitions`` calls."""
    start = time.perf_counter()
    for _ in range(repetitions):
        run()
    return (time.perf_counter() - start) / repetitions


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (('population', 400), ('horizon', 25), ('iterations', 5), ('rounds', 5), ('repetitions', 20)):
        parser.add_argument(f'--{name}', type=int, default=default)
    parser.add_argument('--hidden', type=int, nargs='+', default=[200, 200])
    parser.add_argument('--compile', action='store_true')
    parser.add_argument('--peers', nargs='*', choices=PEERS, default=())
    args = parser.parse_args()
    if missing := [name for name in args.peers if importlib.util.find_spec(name) is None]:
        parser.error(f'not installed: {", ".join(missing)}')
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root_dir:
        runs = {'alfx': planner(root_dir, args), 'products': products(args),
                **{name: PEERS[name](args) for name in args.peers}}
        for run in runs.values():
            seconds(run, 5)  # until the model is traced or compiled
        rounds = [{name: seconds(run, args.repetitions) for name, run in runs.items()} for _ in range(args.rounds)]
    print(f'Population {args.population}, {args.horizon} steps, {args.iterations} iterations, layers '
          f'{" x ".join(map(str, args.hidden))}:\n\n| planner | time | relative to products |\n| --- | ---: | ---: |')
    for name in runs:
        time_, ratio = (statistics.median(x) for x in zip(*((x[name], x[name] / x['products']) for x in rounds)))
        print(f'| {name} | {1e3 * time_:.1f} ms | {ratio:.2f} |')


if __name__ == '__main__':
    main()
