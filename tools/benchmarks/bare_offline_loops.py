"""Hand-written IQL and TD3+BC on an array of transitions, as baselines without a framework.

Each function is a carefully written loop: numpy storage, fused optimizers, foreach target updates, no logging. Only
``tools/benchmarks/benchmark.py`` uses them.
"""
import copy
import time
from collections.abc import Callable

import torch
from bare_off_policy_loops import Replay, _Critics, _follow, _mlp, td3_learner
from torch import Tensor, nn


def _timed(update: Callable[[Replay], None], replay: Replay, warm_up: int, updates: int) -> tuple[int, float]:
    """Run ``warm_up`` updates, then time ``updates`` further ones."""
    start = 0.0
    for i in range(warm_up + updates):
        if i == warm_up:
            start = time.perf_counter()
        update(replay)
    return updates, time.perf_counter() - start


def iql_learner(size: int, action_size: int, batch_size: int, layers: tuple[int, ...], lr: float
                ) -> tuple[nn.Module, Callable[[Replay], None]]:
    """Return the policy mean, in [-1, 1], and the update of IQL with expectile 0.7 and inverse temperature 3."""
    actor, log_std = nn.Sequential(_mlp(size, layers, action_size), nn.Tanh()), nn.Parameter(torch.zeros(action_size))
    values, critics = _mlp(size, layers, 1), _Critics(size + action_size, layers)
    targets = copy.deepcopy(critics)
    target_tensors, tensors = list(targets.parameters()), list(critics.parameters())
    actor_optimizer = torch.optim.Adam([*actor.parameters(), log_std], lr=lr, fused=True)
    value_optimizer = torch.optim.Adam(values.parameters(), lr=lr, fused=True)
    critic_optimizer = torch.optim.Adam(critics.parameters(), lr=lr, fused=True)

    def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def update(replay: Replay) -> None:
        observation, action, reward, discount, next_observation = replay.sample(batch_size)
        with torch.no_grad():
            target_value = torch.minimum(*targets(observation, action))
            target = reward + discount * values(next_observation)[:, 0]
        value = values(observation)[:, 0]
        advantage = target_value - value
        step(value_optimizer, (torch.where(advantage > 0, 0.7, 0.3) * advantage**2).mean())
        first, second = critics(observation, action)
        step(critic_optimizer, ((first - target)**2 + (second - target)**2).mean())
        scale = log_std.clamp(-5, 2).exp()
        log_prob = -(0.5 * ((action - actor(observation)) / scale)**2 + scale.log()).sum(-1)
        step(actor_optimizer, -((3 * advantage.detach()).exp().clamp(max=100) * log_prob).mean())
        _follow(target_tensors, tensors)

    return actor, update


def iql(replay: Replay, warm_up: int, updates: int, seed: int, batch_size: int, layers: tuple[int, ...]
        ) -> tuple[int, float]:
    """Run implicit Q-learning; return the timed updates and their seconds."""
    torch.manual_seed(seed)
    _, update = iql_learner(replay.observation.shape[1], replay.action.shape[1], batch_size, layers, 3e-4)
    return _timed(update, replay, warm_up, updates)


def td3_bc_learner(size: int, action_size: int, batch_size: int, layers: tuple[int, ...], lr: float,
                   alpha: float = 2.5) -> tuple[nn.Module, Callable[[Replay], None]]:
    """Return the actor and the update of TD3+BC, which trains the actor at every second call."""
    def actor_loss(value: Tensor, own_action: Tensor, action: Tensor) -> Tensor:
        return ((own_action - action)**2).mean() - alpha * value.mean() / value.abs().mean().detach()

    return td3_learner(size, action_size, 1.0, batch_size, layers, lr, actor_loss)


def td3_bc(replay: Replay, warm_up: int, updates: int, seed: int, batch_size: int, layers: tuple[int, ...]
           ) -> tuple[int, float]:
    """Run TD3+BC with alpha 2.5; return the timed updates and their seconds."""
    torch.manual_seed(seed)
    _, update = td3_bc_learner(replay.observation.shape[1], replay.action.shape[1], batch_size, layers, 3e-4)
    return _timed(update, replay, warm_up, updates)
