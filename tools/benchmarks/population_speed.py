"""Compare the speed of particles and populations with other libraries.

    python tools/benchmarks/population_speed.py [svgd] [es_cart_pole] [es_half_cheetah] \\
        [es_half_cheetah_envpool] [two_processes]
        [--rounds 7] [--seconds 2]

svgd: updates of 20 networks with one hidden layer of 50 by Stein variational gradient descent, with batches of 100 from
1,000 samples of size 10; the peer is Pyro, also with one kernel over all parameters. es_*: environment steps of
augmented random search with linear policies and 16 members, one episode per member and generation; the peer is ARS of
sb3-contrib. two_processes: environment steps of whole runs of ars_half_cheetah with gymnasium, 64 members in 64
environments, in two processes and in one. Peers that are not installed are skipped with a message; PYTHONPATH may point
to them.

Everything but two_processes uses one process and one thread. Variants run alternately. Rates are medians over the
rounds, ratios are medians of the ratios within a round. Prints a Markdown table.
"""
import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from alfx import gin_utils
from alfx.algorithms.functional_particle_vi_algorithm import FuncParVIAlgorithm
from alfx.config import TrainerConfig
from alfx.metrics.metrics import EnvironmentSteps
from alfx.optimizers import Adam
from alfx.runs.run_files import read_table
from alfx.trainers.policy_trainer import RLTrainer
from alfx.utils.tensor_loader import TensorLoader

Work = Callable[[], int]
_SAMPLES, _INPUTS, _HIDDEN, _BATCH, _PARTICLES = 1000, 10, 50, 100, 20
_MEMBERS = 16
_GYMNASIUM = ('create_environment.env_load_fn = @suite_gym.load', 'create_environment.nonparallel = True')


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs ``[N, 10]`` and noisy targets ``[N, 1]``."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_SAMPLES, _INPUTS, generator=generator)
    return x, x.sum(1, keepdim=True).sin() + 0.1 * torch.randn(_SAMPLES, 1, generator=generator)


def svgd_alfx() -> Work:
    """Return a function that trains the particles of alfx for an epoch."""
    x, y = samples()
    algorithm = FuncParVIAlgorithm(
        data_creator=lambda: (TensorLoader(x, y, _BATCH), TensorLoader(x, y, _BATCH)), loss_type='regression',
        fc_layer_params=(_HIDDEN, ), activation=torch.tanh, num_particles=_PARTICLES, par_vi='svgd', prior_stddev=1.0,
        entropy_regularization=None, optimizer=Adam(lr=1e-3))
    algorithm.set_path('')
    algorithm.finalize()
    return algorithm.train_iter


def svgd_pyro() -> Work:
    """Return a function that trains the particles of Pyro for an epoch, with the same number of batches."""
    import pyro
    from pyro.distributions import Normal
    from pyro.infer import SVGD, RBFSteinKernel

    x, y = samples()
    shapes = {'w1': (_INPUTS, _HIDDEN), 'b1': (1, _HIDDEN), 'w2': (_HIDDEN, 1), 'b2': (1, 1)}

    def model(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        w1, b1, w2, b2 = (pyro.sample(name, Normal(torch.zeros(shape), 1.0).to_event(2)).squeeze(-3)
                          for name, shape in shapes.items())
        mean = (torch.tanh(inputs @ w1 + b1) @ w2 + b2).squeeze(-1)
        with pyro.plate('data', _SAMPLES, subsample_size=_BATCH, dim=-1):
            pyro.sample('targets', Normal(mean, 1.0), obs=targets[:, 0])

    pyro.clear_param_store()
    svgd = SVGD(model, RBFSteinKernel(), pyro.optim.Adam({'lr': 1e-3}), _PARTICLES, max_plate_nesting=1,
                mode='multivariate')

    def epoch() -> int:
        for rows in torch.randperm(_SAMPLES).split(_BATCH):
            svgd.step(x[rows], y[rows])
        return _SAMPLES // _BATCH

    return epoch


def es_alfx(environment: str, num_environments: int = _MEMBERS, *params: str) -> Work:
    """Return a function that runs a generation of alfx."""
    root_dir = tempfile.mkdtemp()
    gin_utils.write_conf(root_dir, gin_utils.load('ars_half_cheetah', [
        f"create_environment.env_name = '{environment}'", *_GYMNASIUM,
        f'create_environment.num_parallel_environments = {num_environments}',
        f'EvolutionStrategyAlgorithm.num_agents = {_MEMBERS}', *params]))
    algorithm = RLTrainer(TrainerConfig(root_dir=root_dir)).algorithm
    steps = next(metric for metric in algorithm.get_metrics() if isinstance(metric, EnvironmentSteps))

    def generation() -> int:
        before = int(steps.result())
        algorithm.train_iter()
        return int(steps.result()) - before

    return generation


def es_peer(environment: str) -> Work:
    """Return a function that runs a generation of sb3-contrib, which plays its members one after the other."""
    from sb3_contrib import ARS
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    environments = VecNormalize(make_vec_env(environment, n_envs=1, seed=1), norm_reward=False)
    learner = ARS('LinearPolicy', environments, n_delta=_MEMBERS // 2, n_top=4, delta_std=0.03, learning_rate=0.02,
                  device='cpu')

    def generation() -> int:
        before = learner.num_timesteps
        learner.learn(1, reset_num_timesteps=False)
        return learner.num_timesteps - before

    return generation


_CART_POLE = ('EvolutionStrategyAlgorithm.actor_network_ctor = @ActorDistributionNetwork', )
_ENVPOOL = ('create_environment.env_load_fn = @suite_envpool.load', 'create_environment.nonparallel = False')
WORKLOADS: dict[str, tuple[str, Callable[[], Work], Callable[[], Work]]] = {
    'svgd': ('updates', svgd_alfx, svgd_pyro),
    'es_cart_pole': ('environment steps', lambda: es_alfx('CartPole-v1', _MEMBERS, *_CART_POLE),
                     lambda: es_peer('CartPole-v1')),
    'es_half_cheetah': ('environment steps', lambda: es_alfx('HalfCheetah-v5'), lambda: es_peer('HalfCheetah-v5')),
    'es_half_cheetah_envpool': ('environment steps', lambda: es_alfx('HalfCheetah-v5', _MEMBERS, *_ENVPOOL),
                                lambda: es_peer('HalfCheetah-v5')),
}
PEERS = {'svgd': 'Pyro'}


def rate(work: Work, seconds: float) -> float:
    """Return the units of work per second, measured for at least ``seconds``."""
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        done += work()
    return done / (time.perf_counter() - start)


def steps_per_second(num_processes: int, num_steps: int) -> float:
    """Train a separate run; return its steps per second between the second and the last generation."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, '-m', 'alfx.bin.train', '--conf', 'ars_half_cheetah', '--root_dir', folder + '/run']
        for param in (f'TrainerConfig.num_env_steps = {num_steps}', 'TrainerConfig.num_threads = 1', *_GYMNASIUM):
            command += ['--conf_param', param]
        if num_processes > 1:
            command += ['--num_processes', str(num_processes)]
        subprocess.run(command, check=True, capture_output=True)
        rows = read_table(str(Path(folder, 'run', 'progress.csv')))
        steps, seconds = ([float(row[name]) for row in rows] for name in ('env_steps', 'seconds'))
        return (steps[-1] - steps[1]) / (seconds[-1] - seconds[1])


def compare(name: str, rounds: int, seconds: float) -> str:
    """Measure a workload; return its row of the table."""
    if name == 'two_processes':
        found = [(steps_per_second(2, 384_000), steps_per_second(1, 384_000)) for _ in range(rounds)]
        unit, peer = 'environment steps', 'one process'
    else:
        unit, make_alfx, make_peer = WORKLOADS[name]
        peer = PEERS.get(name, 'sb3-contrib')
        work = make_alfx(), make_peer()
        for one in work:
            rate(one, min(1.0, seconds))  # compilation, tracing and allocation
        found = [(rate(work[0], seconds), rate(work[1], seconds)) for _ in range(rounds)]
    alfx_rate, peer_rate = (statistics.median(column) for column in zip(*found))
    ratio = statistics.median(a / b for a, b in found)
    return f'| {name} | {unit} | {alfx_rate:,.0f} | {peer} | {peer_rate:,.0f} | {ratio:.1f} |'


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*WORKLOADS, 'two_processes']
    parser.add_argument('workloads', nargs='*', metavar='workload', help=f"some of {', '.join(names)}; default: all")
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--seconds', type=float, default=2.0, help='minimum duration of each measurement')
    args = parser.parse_args()
    unknown = set(args.workloads) - set(names)
    if unknown:
        parser.error(f"unknown workload {sorted(unknown)[0]!r}, expected some of {', '.join(names)}")
    torch.set_num_threads(1)
    print('| workload | unit per second | alfx | peer | peer rate | ratio |\n| --- | --- | ---: | --- | ---: | ---: |')
    for name in args.workloads or names:
        try:
            print(compare(name, args.rounds, args.seconds), flush=True)
        except ModuleNotFoundError as error:
            print(f'{name}: skipped, {error.name} is not installed', file=sys.stderr)


if __name__ == '__main__':
    main()
