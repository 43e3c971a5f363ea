"""Hand-written PPO, A2C and PQN for CartPole, as a baseline without a framework.

Each function is a carefully written loop for one task: a gymnasium vector environment, preallocated storage, one
forward pass per environment step, one conversion between numpy and torch in each direction, fused or foreach
optimizers, no logging. Only ``tools/benchmarks/benchmark.py`` uses them.
"""
import time
from typing import Callable, NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn


class Rollout(NamedTuple):
    """Rollout: time-major storage, ``[T, B, ...]``, and the value of the observation after it, ``[B]``."""

    observation: torch.Tensor
    action: torch.Tensor
    log_prob: torch.Tensor
    value: torch.Tensor
    reward: torch.Tensor
    discount: torch.Tensor
    next_value: torch.Tensor


def mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Return a network with two hidden layers of 64 tanh units and orthogonal initial weights."""
    layers = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    for layer, scale in zip(layers[::2], (2 ** 0.5, 2 ** 0.5, gain)):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Collector:
    """Collector of rollouts with the current policy.

    Args:
        env_name: gymnasium id of a task with a flat observation and discrete actions.
        num_envs: B, number of parallel environments.
        length: T, steps per rollout.
        gamma: discount.
        seed: random seed of the environments.
    """

    def __init__(self, env_name: str, num_envs: int, length: int, gamma: float, seed: int):
        self.envs = SyncVectorEnv([lambda: gymnasium.make(env_name)] * num_envs,
                                  autoreset_mode=AutoresetMode.SAME_STEP)
        self.gamma = gamma
        observation_size = self.envs.single_observation_space.shape[0]
        self.actor = mlp(observation_size, int(self.envs.single_action_space.n), 0.01)
        self.critic = mlp(observation_size, 1, 1.0)
        shape = (length, num_envs)
        self.observation = torch.empty(*shape, observation_size)
        self.action = torch.empty(shape, dtype=torch.int64)
        self.log_prob, self.value, self.reward, self.discount = (torch.empty(shape) for _ in range(4))
        self.reward_array, self.discount_array = self.reward.numpy(), self.discount.numpy()
        self.latest = torch.from_numpy(self.envs.reset(seed=seed)[0])

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters of the policy and the value network."""
        return [*self.actor.parameters(), *self.critic.parameters()]

    @torch.no_grad()
    def collect(self) -> Rollout:
        """Collect the next T steps of every environment."""
        for t in range(len(self.observation)):
            self.observation[t] = self.latest
            log_probs = torch.log_softmax(self.actor(self.latest), -1)
            action = torch.multinomial(log_probs.exp(), 1)
            self.action[t] = action[:, 0]
            self.log_prob[t] = log_probs.gather(1, action)[:, 0]
            self.value[t] = self.critic(self.latest)[:, 0]
            observation, reward, terminated, truncated, info = self.envs.step(self.action[t].numpy())
            self.reward_array[t] = reward
            self.discount_array[t] = np.where(terminated | truncated, 0.0, self.gamma)
            if truncated.any():  # bootstrap from the value at a time limit
                for i in np.flatnonzero(truncated & ~terminated):
                    final = torch.from_numpy(info['final_obs'][i])
                    self.reward[t, i] += self.gamma * self.critic(final)[0]
            self.latest = torch.from_numpy(observation)
        return Rollout(self.observation, self.action, self.log_prob, self.value, self.reward, self.discount,
                       self.critic(self.latest)[:, 0])


def advantages(rollout: Rollout, td_lambda: float) -> torch.Tensor:
    """Return the generalized advantage estimates of the rollout, ``[T, B]``."""
    return advantages_of(rollout.reward, rollout.discount, rollout.value, rollout.next_value, td_lambda)


def advantages_of(reward: torch.Tensor, discount: torch.Tensor, value: torch.Tensor, next_value: torch.Tensor,
                  td_lambda: float) -> torch.Tensor:
    """Return generalized advantage estimates ``[T, B]``, given ``[T, B]`` and the value after the last step ``[B]``."""
    delta = (reward + discount * torch.cat([value[1:], next_value[None]]) - value).numpy()
    decay = (td_lambda * discount).numpy()
    result = np.empty_like(delta)
    running = np.zeros_like(delta[0])
    for t in range(len(delta) - 1, -1, -1):
        running = delta[t] + decay[t] * running
        result[t] = running
    return torch.from_numpy(result)


def _apply(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 0.5)
    optimizer.step()


def _timed(iteration: Callable[[], None], steps_each: int, steps: int) -> tuple[int, float]:
    count = max(1, steps // steps_each)
    start = time.perf_counter()
    for _ in range(count):
        iteration()
    return count * steps_each, time.perf_counter() - start


def ppo(env_name: str, steps: int, seed: int, epochs: int = 20) -> tuple[int, float]:
    """Proximal policy optimization: 8 environments, 32 steps, one minibatch of 256.

    Returns:
        environment steps taken and the seconds that they and the training took.
    """
    collector = Collector(env_name, num_envs=8, length=32, gamma=0.99, seed=seed)
    parameters = collector.parameters()
    optimizer = torch.optim.Adam(parameters, lr=3e-4, eps=1e-5, fused=True)

    def iteration() -> None:
        rollout = collector.collect()
        advantage = advantages(rollout, 0.95)
        target = (advantage + rollout.value).flatten()
        advantage = advantage.flatten()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        observation, action = rollout.observation.flatten(0, 1), rollout.action.view(-1, 1)
        old_log_prob = rollout.log_prob.flatten()
        for _ in range(epochs):
            log_prob = torch.log_softmax(collector.actor(observation), -1).gather(1, action)[:, 0]
            ratio = torch.exp(log_prob - old_log_prob)
            policy_loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            value_loss = nn.functional.mse_loss(collector.critic(observation)[:, 0], target)
            _apply(optimizer, parameters, policy_loss + 0.5 * value_loss)

    return _timed(iteration, 8 * 32, steps)


def a2c(env_name: str, steps: int, seed: int) -> tuple[int, float]:
    """Advantage actor-critic: 8 environments, 5 steps, one update each, RMSprop.

    Returns:
        environment steps taken and the seconds that they and the training took.
    """
    collector = Collector(env_name, num_envs=8, length=5, gamma=0.99, seed=seed)
    parameters = collector.parameters()
    optimizer = torch.optim.RMSprop(parameters, lr=7e-4, alpha=0.99, eps=1e-5, foreach=True)

    def iteration() -> None:
        rollout = collector.collect()
        advantage = advantages(rollout, 1.0)
        target = (advantage + rollout.value).flatten()
        observation, action = rollout.observation.flatten(0, 1), rollout.action.view(-1, 1)
        log_prob = torch.log_softmax(collector.actor(observation), -1).gather(1, action)[:, 0]
        policy_loss = -(log_prob * advantage.flatten()).mean()
        value_loss = nn.functional.mse_loss(collector.critic(observation)[:, 0], target)
        _apply(optimizer, parameters, policy_loss + 0.5 * value_loss)

    return _timed(iteration, 8 * 5, steps)


def pqn(env_name: str, steps: int, seed: int) -> tuple[int, float]:
    """Parallelized Q-network: 32 environments, 64 steps, 4 epochs of 16 minibatches, layer norm, RAdam.

    Returns:
        environment steps taken and the seconds that they and the training took.
    """
    length, num_envs = 64, 32
    envs = SyncVectorEnv([lambda: gymnasium.make(env_name)] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    size, num_actions = envs.single_observation_space.shape[0], int(envs.single_action_space.n)
    q_network = nn.Sequential(nn.Linear(size, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 256),
                              nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, num_actions))
    optimizer = torch.optim.RAdam(q_network.parameters(), lr=1e-4, foreach=True)
    shape = (length, num_envs)
    observations, actions = torch.empty(*shape, size), torch.empty(shape, dtype=torch.int64)
    best, targets = torch.empty(length + 1, num_envs), torch.empty(shape)
    best_array, target_array = best.numpy(), targets.numpy()
    rewards, discounts = np.empty(shape, np.float32), np.empty(shape, np.float32)
    latest = torch.from_numpy(envs.reset(seed=seed)[0])

    @torch.no_grad()
    def collect() -> None:
        nonlocal latest
        for t in range(length):
            observations[t] = latest
            best[t], greedy = q_network(latest).max(-1)
            random = torch.randint(num_actions, (num_envs, ))
            actions[t] = torch.where(torch.rand(num_envs) < 0.2, random, greedy)
            observation, reward, terminated, truncated, info = envs.step(actions[t].numpy())
            np.multiply(reward, 0.1, out=rewards[t], casting='same_kind')
            discounts[t] = np.where(terminated | truncated, 0.0, 0.99)
            for i in np.flatnonzero(truncated & ~terminated):  # bootstrap from the value at a time limit
                rewards[t, i] += 0.99 * float(q_network(torch.from_numpy(info['final_obs'][i])).max())
            latest = torch.from_numpy(observation)
        best[length] = q_network(latest).amax(-1)
        later = best_array[length]
        for t in range(length - 1, -1, -1):
            later = rewards[t] + discounts[t] * (0.05 * best_array[t + 1] + 0.95 * later)
            target_array[t] = later

    def iteration() -> None:
        collect()
        observation, action, target = observations.flatten(0, 1), actions.view(-1, 1), targets.flatten()
        for _ in range(4):
            for index in torch.randperm(len(target)).split(128):
                values = q_network(observation[index]).gather(1, action[index])[:, 0]
                optimizer.zero_grad()
                nn.functional.mse_loss(values, target[index]).backward()
                nn.utils.clip_grad_norm_(q_network.parameters(), 10.0)
                optimizer.step()

    return _timed(iteration, length * num_envs, steps)


LOOPS: dict[str, Callable[[str, int, int], tuple[int, float]]] = {
    'ppo_cart_pole': ppo, 'a2c_cart_pole': a2c, 'pqn_cart_pole': pqn}
