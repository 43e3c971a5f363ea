"""Compare the training speed of confs on devices: eager mode, traced graphs, compiled updates and CUDA graphs.

    python tools/benchmarks/device_speed.py --devices cpu cuda
    python tools/benchmarks/device_speed.py sac_half_cheetah --set "CriticNetwork.joint_fc_layer_params=(1024, 1024)"

Each measurement runs in a separate process, without summaries, checkpoints and evaluations. The timed iterations start
after all graphs have been created. On a GPU, ``TrainerConfig.compile`` also captures the update as a CUDA graph.
Prints a Markdown table of environment steps per second; ratios are to the first row of a conf.
"""
import argparse
import json
import subprocess
import sys
import tempfile
import time

import torch
from benchmark_peers import disable_graphs

from alfx import gin_utils
from alfx.config import TrainerConfig
from alfx.trainers.devices import find_device, use_device
from alfx.trainers.policy_trainer import RLTrainer

_CONFS = ('ppo_cart_pole', 'sac_half_cheetah', 'pqn_minatar_breakout', 'dqn_minatar_breakout')
_MODES = ('eager', 'traced', 'compiled')
QUIET = ('TrainerConfig.num_summaries=None', 'TrainerConfig.summary_interval=1000000000',
          'TrainerConfig.summarize_first_interval=False', 'TrainerConfig.num_checkpoints=1',
          'TrainerConfig.evaluate=False', 'TrainerConfig.num_env_steps=0', 'TrainerConfig.num_iterations=1000000000',
          'TrainerConfig.initial_collect_steps=1000', 'TrainerConfig.num_threads=1')


def synchronize(device: torch.device) -> None:
    """Wait until the device has executed all kernels."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def measure(conf: str, device_name: str, mode: str, bindings: list[str], warm_up: float, seconds: float) -> float:
    """Return the environment steps per second of training.

    Args:
        conf: name of a conf.
        device_name: value of ``--device``.
        mode: 'eager', 'traced' or 'compiled'.
        bindings: further bindings of the conf.
        warm_up: seconds of training before the timed part.
        seconds: length of the timed part.
    """
    if mode == 'eager':
        disable_graphs()
    device = find_device(device_name)
    use_device(device)
    with tempfile.TemporaryDirectory() as folder:
        quiet = [*QUIET, f"TrainerConfig.compile={mode == 'compiled'}", *bindings]
        gin_utils.write_conf(f'{folder}/run', gin_utils.load(conf, quiet))
        trainer = RLTrainer(TrainerConfig(root_dir=f'{folder}/run'))
        learner = trainer.algorithm.learner
        rates = []
        for duration in (warm_up, seconds):
            synchronize(device)
            start, before = time.perf_counter(), trainer.current_env_steps()
            while time.perf_counter() - start < duration:
                learner.run_iteration()
            synchronize(device)
            rates.append((trainer.current_env_steps() - before) / (time.perf_counter() - start))
        return rates[-1]


def _measure_in_a_process(args: argparse.Namespace, conf: str, device: str, mode: str) -> float | str:
    """Return the steps per second, or the last line of the error."""
    command = [sys.executable, __file__, conf, '--one', device, mode, '--warm_up', str(args.warm_up),
               '--seconds', str(args.seconds), '--set', *args.set]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1]
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('confs', nargs='*', default=_CONFS)
    parser.add_argument('--devices', nargs='+', default=['cpu', 'cuda'])
    parser.add_argument('--modes', nargs='+', default=_MODES, choices=_MODES)
    parser.add_argument('--warm_up', type=float, default=15.0, help='seconds before the timed part')
    parser.add_argument('--seconds', type=float, default=5.0, help='seconds of the timed part')
    parser.add_argument('--set', nargs='*', default=[], help='bindings, NAME=VALUE')
    parser.add_argument('--one', nargs=2, metavar=('DEVICE', 'MODE'), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.confs[0], *args.one, args.set, args.warm_up, args.seconds)))
        return
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU'
    print(f'torch {torch.__version__}, {name}\n')
    print('| conf | device | mode | steps/s | ratio |\n| --- | --- | --- | ---: | ---: |')
    for conf in args.confs:
        first = None
        for device in args.devices:
            for mode in args.modes:
                rate = _measure_in_a_process(args, conf, device, mode)
                if isinstance(rate, str):
                    print(f'| `{conf}` | {device} | {mode} | {rate} |  |', flush=True)
                    continue
                first = first or rate
                print(f'| `{conf}` | {device} | {mode} | {rate:,.0f} | {rate / first:.2f} |', flush=True)


if __name__ == '__main__':
    main()
