"""Hand-written SAC, TD3 and DQN, as baselines without a framework.

Each function is a carefully written loop for one task: one environment, preallocated numpy storage, updates from
(s, a, r, s') minibatches, fused optimizers, foreach target updates, no logging. Only the benchmarks use them.
"""
import copy
import time
from collections.abc import Callable

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

_GAMMA = 0.99
_TAU = 0.005


class Replay:
    """Replay buffer of the latest transitions of one environment.

    Args:
        capacity: maximum number of transitions.
        observation_size: size of the observation vector.
        action_size: size of the action vector; 0 for one discrete action.
        seed: random seed of the sampling.
    """

    def __init__(self, capacity: int, observation_size: int, action_size: int, seed: int):
        self.observation = np.empty((capacity, observation_size), np.float32)
        self.next_observation = np.empty((capacity, observation_size), np.float32)
        self.action = np.empty((capacity, action_size or 1), np.float32 if action_size else np.int64)
        self.reward, self.discount = np.empty(capacity, np.float32), np.empty(capacity, np.float32)
        self.random, self.size, self.capacity = np.random.default_rng(seed), 0, capacity

    def add(self, *values) -> None:
        """Store observation, action, reward, discount and next observation."""
        i = self.size % self.capacity
        storage = (self.observation, self.action, self.reward, self.discount, self.next_observation)
        for array, value in zip(storage, values):
            array[i] = value
        self.size += 1

    def sample(self, batch_size: int) -> list[Tensor]:
        """Sample a uniform minibatch of the five arrays, ``[B, ...]``."""
        index = self.random.integers(min(self.size, self.capacity), size=batch_size)
        storage = (self.observation, self.action, self.reward, self.discount, self.next_observation)
        return [torch.from_numpy(array[index]) for array in storage]


def _mlp(inputs: int, layers: tuple[int, ...], outputs: int) -> nn.Sequential:
    modules: list[nn.Module] = []
    for size in layers:
        modules += [nn.Linear(inputs, size), nn.ReLU()]
        inputs = size
    return nn.Sequential(*modules, nn.Linear(inputs, outputs))


@torch.no_grad()
def _follow(targets: list[Tensor], sources: list[Tensor]) -> None:
    torch._foreach_lerp_(targets, sources, _TAU)


def _loop(env_name: str, replay_of: Callable[[gymnasium.Env], Replay], act: Callable[[np.ndarray], np.ndarray],
          update: Callable[[Replay], None], warm_up: int, steps: int, every: int, count: int,
          seed: int) -> tuple[int, float]:
    """Train for ``warm_up`` and then ``steps`` timed steps, with ``count`` updates after ``every`` steps."""
    env = gymnasium.make(env_name)
    env.action_space.seed(seed)
    observation, _ = env.reset(seed=seed)
    replay, updates, start = replay_of(env), 0, 0.0
    for step in range(warm_up + steps):
        if step == warm_up:
            updates, start = 0, time.perf_counter()
        action = env.action_space.sample() if step < 100 else act(observation)
        next_observation, reward, terminated, truncated, _ = env.step(action)
        replay.add(observation, action, reward, _GAMMA * (1.0 - terminated), next_observation)
        observation = env.reset()[0] if terminated or truncated else next_observation
        if step >= 100 and (step + 1) % every == 0:
            for _ in range(count):
                update(replay)
            updates += count
    return updates, time.perf_counter() - start


class _Critics(nn.Module):
    def __init__(self, inputs: int, layers: tuple[int, ...]):
        super().__init__()
        self.first, self.second = _mlp(inputs, layers, 1), _mlp(inputs, layers, 1)

    def forward(self, observation: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat((observation, action), -1)
        return self.first(x)[:, 0], self.second(x)[:, 0]


def _spaces(env_name: str) -> tuple[int, int, float]:
    """Return the sizes of observation and action, and the largest action."""
    env = gymnasium.make(env_name)
    return env.observation_space.shape[0], env.action_space.shape[0], float(env.action_space.high[0])


def sac(env_name: str, warm_up: int, steps: int, seed: int, batch_size: int, layers: tuple[int, ...]
        ) -> tuple[int, float]:
    """Run SAC with one update per step; return the updates after ``warm_up`` steps and their seconds."""
    torch.manual_seed(seed)
    size, action_size, scale = _spaces(env_name)
    actor, critics = _mlp(size, layers, 2 * action_size), _Critics(size + action_size, layers)
    targets = copy.deepcopy(critics)
    target_tensors, tensors = list(targets.parameters()), list(critics.parameters())
    log_alpha = nn.Parameter(torch.zeros(()))
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4, fused=True)
    critic_optimizer = torch.optim.Adam(critics.parameters(), lr=3e-4, fused=True)
    alpha_optimizer = torch.optim.Adam([log_alpha], lr=3e-4)

    def sample(observation: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = actor(observation).chunk(2, -1)
        log_std = log_std.clamp(-20, 2)
        noise = torch.randn_like(mean)
        raw = mean + noise * log_std.exp()
        log_prob = (-0.5 * noise**2 - log_std - 0.9189385
                    - 2 * (0.6931472 - raw - nn.functional.softplus(-2 * raw))).sum(-1)
        return torch.tanh(raw), log_prob

    def act(observation: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return scale * sample(torch.from_numpy(np.asarray(observation, np.float32))[None])[0][0].numpy()

    def update(replay: Replay) -> None:
        observation, action, reward, discount, next_observation = replay.sample(batch_size)
        action = action / scale
        alpha = log_alpha.detach().exp()
        with torch.no_grad():
            next_action, next_log_prob = sample(next_observation)
            value = torch.minimum(*targets(next_observation, next_action)) - alpha * next_log_prob
            target = reward + discount * value
        first, second = critics(observation, action)
        critic_loss = ((first - target)**2 + (second - target)**2).mean()
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()
        new_action, log_prob = sample(observation)
        for tensor in tensors:
            tensor.requires_grad_(False)
        actor_loss = (alpha * log_prob - torch.minimum(*critics(observation, new_action))).mean()
        actor_optimizer.zero_grad()
        actor_loss.backward()
        actor_optimizer.step()
        for tensor in tensors:
            tensor.requires_grad_(True)
        alpha_loss = -(log_alpha * (log_prob.detach() - action_size)).mean()
        alpha_optimizer.zero_grad()
        alpha_loss.backward()
        alpha_optimizer.step()
        _follow(target_tensors, tensors)

    return _loop(env_name, lambda env: Replay(1_000_000, size, action_size, seed), act, update, warm_up, steps, 1, 1,
                 seed)


def td3_learner(size: int, action_size: int, scale: float, batch_size: int, layers: tuple[int, ...], lr: float,
                actor_loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[nn.Module, Callable[[Replay], None]]:
    """Return the actor, with actions in [-1, 1], and the update of TD3, which trains the actor at every second call.

    ``actor_loss`` takes the values of its actions, its actions, and the stored actions in units of ``scale``.
    """
    actor, critics = nn.Sequential(_mlp(size, layers, action_size), nn.Tanh()), _Critics(size + action_size, layers)
    target_actor, target_critics = copy.deepcopy(actor), copy.deepcopy(critics)
    tensors = [*actor.parameters(), *critics.parameters()]
    target_tensors = [*target_actor.parameters(), *target_critics.parameters()]
    actor_optimizer = torch.optim.Adam(actor.parameters(), lr=lr, fused=True)
    critic_optimizer = torch.optim.Adam(critics.parameters(), lr=lr, fused=True)
    count = 0

    def update(replay: Replay) -> None:
        nonlocal count
        count += 1
        observation, action, reward, discount, next_observation = replay.sample(batch_size)
        action = action / scale
        with torch.no_grad():
            noise = (0.2 * torch.randn_like(action)).clamp_(-0.5, 0.5)
            next_action = (target_actor(next_observation) + noise).clamp_(-1, 1)
            target = reward + discount * torch.minimum(*target_critics(next_observation, next_action))
        first, second = critics(observation, action)
        critic_loss = ((first - target)**2 + (second - target)**2).mean()
        critic_optimizer.zero_grad()
        critic_loss.backward()
        critic_optimizer.step()
        if count % 2:
            return
        parameters = list(critics.first.parameters())
        for parameter in parameters:
            parameter.requires_grad_(False)
        own_action = actor(observation)
        loss = actor_loss(critics.first(torch.cat((observation, own_action), -1)), own_action, action)
        actor_optimizer.zero_grad()
        loss.backward()
        actor_optimizer.step()
        for parameter in parameters:
            parameter.requires_grad_(True)
        _follow(target_tensors, tensors)

    return actor, update


def td3(env_name: str, warm_up: int, steps: int, seed: int, batch_size: int, layers: tuple[int, ...]
        ) -> tuple[int, float]:
    """Run TD3 with one update per step; return the updates after ``warm_up`` steps and their seconds."""
    torch.manual_seed(seed)
    size, action_size, scale = _spaces(env_name)
    actor, update = td3_learner(size, action_size, scale, batch_size, layers, 1e-3, lambda value, *_: -value.mean())

    def act(observation: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            action = actor(torch.from_numpy(np.asarray(observation, np.float32))[None])[0]
            return scale * (action + 0.1 * torch.randn_like(action)).clamp_(-1, 1).numpy()

    return _loop(env_name, lambda env: Replay(1_000_000, size, action_size, seed), act, update, warm_up, steps, 1, 1,
                 seed)


def dqn(env_name: str, warm_up: int, steps: int, seed: int, batch_size: int, layers: tuple[int, ...]
        ) -> tuple[int, float]:
    """Run DQN with 128 updates every 256 steps; return the updates after ``warm_up`` steps and their seconds."""
    torch.manual_seed(seed)
    env = gymnasium.make(env_name)
    size, num_actions = env.observation_space.shape[0], int(env.action_space.n)
    network = _mlp(size, layers, num_actions)
    target_network = copy.deepcopy(network)
    tensors, target_tensors = list(network.parameters()), list(target_network.parameters())
    optimizer = torch.optim.Adam(tensors, lr=2.3e-3, fused=True)
    random, count = np.random.default_rng(seed), 0

    def act(observation: np.ndarray) -> int:
        if random.random() < 0.04:
            return int(random.integers(num_actions))
        with torch.no_grad():
            return int(network(torch.from_numpy(np.asarray(observation, np.float32))).argmax())

    def update(replay: Replay) -> None:
        nonlocal count
        if count % 128 == 0:
            with torch.no_grad():
                torch._foreach_copy_(target_tensors, tensors)
        count += 1
        observation, action, reward, discount, next_observation = replay.sample(batch_size)
        with torch.no_grad():
            target = reward + discount * target_network(next_observation).amax(-1)
        value = network(observation).gather(-1, action)[:, 0]
        loss = nn.functional.smooth_l1_loss(value, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(tensors, 10.0)
        optimizer.step()

    return _loop(env_name, lambda env: Replay(100_000, size, 0, seed), act, update, warm_up, steps, 256, 128, seed)
