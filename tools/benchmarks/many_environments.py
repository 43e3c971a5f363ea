"""Compare alfx with a bare torch loop and sbx: PPO on CartPole with many environments of EnvPool.

    python tools/benchmarks/many_environments.py --threads 1
    python tools/benchmarks/many_environments.py --environments 1024 --rounds 3

All have the same environments, unrolls of 32 steps, two networks with two layers of 64, 2 epochs and minibatches of
8,192. The rounds alternate, each in a separate process, and the timed iterations start after all graphs have been
created. Prints environment steps per second and the median ratio. sbx is left out if it is not installed.
"""
import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
from bare_loops import advantages_of, mlp
from device_speed import QUIET
from torch import nn

from alfx import gin_utils
from alfx.config import TrainerConfig
from alfx.trainers.policy_trainer import RLTrainer

_LENGTH, _EPOCHS, _MINI_BATCH = 32, 2, 8192


def bare_iteration(num_envs: int) -> Callable[[], None]:
    """Return a function that executes one iteration of a hand-written PPO."""
    import envpool
    envs = envpool.make('CartPole-v1', env_type='gymnasium', num_envs=num_envs, seed=0)
    actor, critic = mlp(4, 2, 0.01), mlp(4, 1, 1.0)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-4, eps=1e-5, fused=True)
    shape = (_LENGTH, num_envs)
    observations, actions = torch.empty(*shape, 4), torch.empty(shape, dtype=torch.int64)
    log_probs, values, rewards, discounts, valid = (torch.empty(shape) for _ in range(5))
    latest, starts = torch.from_numpy(envs.reset()[0]), np.zeros(num_envs, bool)

    @torch.no_grad()
    def collect() -> torch.Tensor:
        nonlocal latest, starts
        for t in range(_LENGTH):
            observations[t] = latest
            scores = torch.log_softmax(actor(latest), -1)
            action = torch.multinomial(scores.exp(), 1)
            actions[t], log_probs[t] = action[:, 0], scores.gather(1, action)[:, 0]
            values[t] = critic(latest)[:, 0]
            observation, reward, terminated, truncated, _ = envs.step(actions[t].to(torch.int32).numpy())
            valid[t] = torch.from_numpy(~starts)  # the step after an episode only resets the environment
            rewards[t] = torch.from_numpy(reward)
            discounts[t] = torch.from_numpy(np.where(terminated | starts, 0.0, 0.98))
            latest, starts = torch.from_numpy(observation), terminated | truncated
        return critic(latest)[:, 0]

    def iteration() -> None:
        advantage = advantages_of(rewards, discounts, values, collect(), 0.8)
        target = (advantage + values).flatten()
        advantage = advantage.flatten()
        flat_observations, flat_actions = observations.flatten(0, 1), actions.view(-1, 1)
        old, weights = log_probs.flatten(), valid.flatten()
        for _ in range(_EPOCHS):
            for index in torch.randperm(len(target)).split(_MINI_BATCH):
                weight = weights[index]
                chosen = advantage[index]
                chosen = (chosen - chosen.mean()) / (chosen.std() + 1e-8)
                observation = flat_observations[index]
                log_prob = torch.log_softmax(actor(observation), -1).gather(1, flat_actions[index])[:, 0]
                ratio = torch.exp(log_prob - old[index])
                policy_loss = -(torch.minimum(ratio * chosen, ratio.clamp(0.9, 1.1) * chosen) * weight).mean()
                value_loss = ((critic(observation)[:, 0] - target[index]).square() * weight).mean()
                optimizer.zero_grad()
                (policy_loss + 0.5 * value_loss).backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()

    return iteration


def alfx_iteration(num_envs: int, threads: int, compiles: bool, folder: str) -> Callable[[], object]:
    """Return a function that executes one iteration of alfx."""
    bindings = [*QUIET, f'create_environment.num_parallel_environments={num_envs}',
                f'TrainerConfig.unroll_length={_LENGTH}', f'TrainerConfig.mini_batch_size={_MINI_BATCH}',
                f'TrainerConfig.num_updates_per_train_iter={_EPOCHS}', f'TrainerConfig.num_threads={threads}',
                f'TrainerConfig.compile={compiles}', 'LinearScheduler.schedule=[(0.0, 3e-4), (1.0, 3e-4)]']
    gin_utils.write_conf(f'{folder}/run', gin_utils.load('ppo_envpool_cart_pole', bindings))
    return RLTrainer(TrainerConfig(root_dir=f'{folder}/run')).algorithm.learner.run_iteration


def sbx_iteration(num_envs: int) -> Callable[[], object]:
    """Return a function that executes one iteration of sbx."""
    import envpool
    from gymnasium import spaces
    from sbx import PPO
    from stable_baselines3.common.vec_env import VecEnv

    class Environments(VecEnv):
        """EnvPool behind the interface of Stable-Baselines3."""

        def __init__(self) -> None:
            self._envs = envpool.make('CartPole-v1', env_type='gymnasium', num_envs=num_envs, seed=0)
            self._infos: list[dict] = [{} for _ in range(num_envs)]
            super().__init__(num_envs, spaces.Box(-np.inf, np.inf, (4, ), np.float32), spaces.Discrete(2))

        def reset(self) -> np.ndarray:
            return self._envs.reset()[0]

        def step_async(self, actions: np.ndarray) -> None:
            self._actions = np.asarray(actions, np.int32)

        def step_wait(self) -> tuple:
            observation, reward, terminated, truncated, _ = self._envs.step(self._actions)
            return observation, reward, terminated | truncated, self._infos

        def close(self) -> None:
            self._envs.close()

        def get_attr(self, attr_name: str, indices: object = None) -> list:
            return [None] * num_envs

        def set_attr(self, attr_name: str, value: object, indices: object = None) -> None:
            raise NotImplementedError(attr_name)

        def env_method(self, method_name: str, *args: object, indices: object = None, **kwargs: object) -> list:
            raise NotImplementedError(method_name)

        def env_is_wrapped(self, wrapper_class: type, indices: object = None) -> list[bool]:
            return [False] * num_envs

    model = PPO('MlpPolicy', Environments(), n_steps=_LENGTH, batch_size=_MINI_BATCH, n_epochs=_EPOCHS, gamma=0.98,
                gae_lambda=0.8, clip_range=0.1, learning_rate=3e-4, policy_kwargs={'net_arch': [64, 64]}, seed=0)
    return lambda: model.learn(_LENGTH * num_envs, reset_num_timesteps=False)


def measure(name: str, num_envs: int, threads: int, warm_up: float, seconds: float) -> float:
    """Return the environment steps per second of 'bare', 'alfx', 'alfx compiled' or 'sbx'."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        iteration = (bare_iteration(num_envs) if name == 'bare' else sbx_iteration(num_envs) if name == 'sbx' else
                     alfx_iteration(num_envs, threads, name == 'alfx compiled', folder))
        rate = 0.0
        for duration in (warm_up, seconds):
            start, count = time.perf_counter(), 0
            while time.perf_counter() - start < duration:
                iteration()
                count += 1
            rate = count * _LENGTH * num_envs / (time.perf_counter() - start)
        return rate


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--environments', type=int, default=1024)
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--warm_up', type=float, default=15.0, help='seconds before the timed part')
    parser.add_argument('--seconds', type=float, default=5.0, help='seconds of the timed part')
    parser.add_argument('--one', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args.environments, args.threads, args.warm_up, args.seconds)))
        return
    names = ['bare', 'alfx', 'alfx compiled', *(['sbx'] if importlib.util.find_spec('sbx') else [])]
    rates: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in names:
            command = [sys.executable, __file__, '--one', name, *(f'--{key}={getattr(args, key)}' for key in (
                'environments', 'threads', 'warm_up', 'seconds'))]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rates[name].append(json.loads(done.stdout.splitlines()[-1]))
    print('| | steps/s | ratio to the bare loop |\n| --- | ---: | ---: |')
    for name in names:
        ratios = [rate / bare for rate, bare in zip(rates[name], rates['bare'])]
        print(f'| {name} | {np.median(rates[name]):,.0f} | {np.median(ratios):.2f} |')


if __name__ == '__main__':
    main()
