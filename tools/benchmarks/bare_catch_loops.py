"""Hand-written DQN, Rainbow, PPO, discrete SAC and PQN for Catch, with the settings of tests/learning/test_catch.py.

Each function trains on the vectorised game below until a greedy policy has a mean return of 0.9, and returns the number
of environment steps. Only ``tools/benchmarks/catch_steps.py`` uses them.
"""
import copy
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

GOAL = 0.9
GAMMA = 0.99
EPISODE = 9  # steps


class VectorCatch:
    """Several games of Catch; see ``tests/helpers/catch.py``. A finished game is replaced at once.

    Args:
        num_envs: number B of games.
        seed: random seed.
    """

    def __init__(self, num_envs: int, seed: int):
        self._random = np.random.default_rng(seed)
        self.column, self.paddle = self._random.integers(0, 5, num_envs), np.full(num_envs, 2)
        self.row = 0

    def observe(self) -> Tensor:
        """Return the scaled observations ``[B, 1, 10, 5]``."""
        grid = np.full((len(self.column), 1, 10, 5), -1.0, np.float32)
        games = np.arange(len(grid))
        grid[games, 0, self.row, self.column] = grid[games, 0, 9, self.paddle] = 1.0
        return torch.from_numpy(grid)

    def step(self, action: Tensor) -> tuple[Tensor, bool, Tensor]:
        """Return the rewards, whether all games are over, and the observations; those of finished games are final."""
        self.row += 1
        self.paddle = np.clip(self.paddle + action.numpy() - 1, 0, 4)
        is_over, final = self.row == EPISODE, self.observe()
        reward = np.where(self.paddle == self.column, 1.0, -1.0) * is_over
        if is_over:
            self.row, self.column = 0, self._random.integers(0, 5, len(self.column))
            self.paddle = np.full(len(self.column), 2)
        return torch.from_numpy(reward.astype(np.float32)), is_over, final


def greedy_return(values: Callable[[Tensor], Tensor]) -> float:
    """Return the mean return over the five possible games, given the values of the actions."""
    games = VectorCatch(5, 0)
    games.column = np.arange(5)
    with torch.no_grad():
        for _ in range(EPISODE):
            reward, _, _ = games.step(values(games.observe()).argmax(-1))
    return float(reward.mean())


def network(outputs: int, norm: bool = False) -> nn.Sequential:
    """Return one convolution of 16 channels and a layer of 64 units."""
    normed = (lambda *shape: [nn.LayerNorm(shape)]) if norm else lambda *shape: []
    return nn.Sequential(initialized(nn.Conv2d(1, 16, 3)), *normed(16, 8, 3), nn.ReLU(), nn.Flatten(),
                         initialized(nn.Linear(384, 64)), *normed(64), nn.ReLU(), nn.Linear(64, outputs))


def initialized(layer: nn.Conv2d | nn.Linear) -> nn.Module:
    """Initialize a hidden layer as alfx does by default (He et al. 2015)."""
    nn.init.kaiming_normal_(layer.weight, nonlinearity='relu')
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


class Noisy(nn.Module):
    """Linear layer with factorized noise (Fortunato et al. 2018), drawn once for each call."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.mean = nn.Parameter(torch.empty(outputs, inputs + 1).uniform_(-bound, bound))
        self.scale = nn.Parameter(torch.full((outputs, inputs + 1), 0.5 * bound))
        self.noisy = True

    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.mean
        if self.noisy:
            inputs, outputs = (noise.sign() * noise.abs().sqrt() for noise in (
                torch.randn(weight.shape[1] - 1), torch.randn(weight.shape[0])))
            weight = weight + self.scale * torch.outer(outputs, torch.cat((inputs, torch.ones(1))))
        return functional.linear(x, weight[:, :-1], weight[:, -1])


class RainbowNetwork(nn.Module):
    """Dueling network of noisy layers with 51 atoms from -1 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(initialized(nn.Conv2d(1, 16, 3)), nn.ReLU(), nn.Flatten())
        self.value, self.advantage = (nn.Sequential(Noisy(384, 64), nn.ReLU(), Noisy(64, n)) for n in (51, 153))
        self.atoms = torch.linspace(-1.0, 1.0, 51)

    def forward(self, observation: Tensor) -> Tensor:
        """Return the log probabilities of the atoms ``[B, 3, 51]``."""
        x = self.body(observation)
        advantage = self.advantage(x).unflatten(-1, (3, 51))
        return torch.log_softmax(self.value(x)[:, None] + advantage - advantage.mean(1, keepdim=True), -1)

    def values(self, observation: Tensor) -> Tensor:
        """Return the expected values of the actions ``[B, 3]``."""
        return (self(observation).exp() * self.atoms).sum(-1)

    def greedy_values(self, observation: Tensor) -> Tensor:
        """Return the values without noise."""
        layers = [layer for layer in self.modules() if isinstance(layer, Noisy)]
        for layer in layers:
            layer.noisy = False
        values = self.values(observation)
        for layer in layers:
            layer.noisy = True
        return values


def _from_replay(act: Callable[[Tensor, float], Tensor], update: Callable[..., Tensor | None],
                 values: Callable[[Tensor], Tensor], total: int, seed: int, n_step: int = 1,
                 alpha: float = 0.0) -> int:
    """Train with 8 updates of 32 transitions after every 4 steps of 8 games.

    Args:
        act: called with observations and the finished fraction of the run; returns actions.
        update: called with the fraction, observation, action, n-step return, discount, next observation, and the
            importance weights; returns the new priorities.
        values: values of the greedy policy.
        total: length of the run in steps.
        seed: random seed.
        n_step: number of steps of a transition.
        alpha: exponent of the priorities; 0 samples uniformly.
    """
    torch.manual_seed(seed)
    games, random = VectorCatch(8, seed), np.random.default_rng(seed)
    steps: list[tuple] = []
    stored: list[tuple] = []
    priorities: list[float] = []
    for step in range(8, total + 8, 8):
        observation = games.observe()
        action = torch.from_numpy(random.integers(0, 3, 8)) if step <= 500 else act(observation, step / total)
        reward, is_over, final = games.step(action)
        steps.append((observation, action, reward))
        while len(steps) >= n_step or is_over and steps:
            discounted = sum(GAMMA ** i * later[2] for i, later in enumerate(steps[:n_step]))
            discount = 0.0 if is_over else GAMMA ** n_step
            for i in range(8):
                stored.append((steps[0][0][i], steps[0][1][i], discounted[i], torch.tensor(discount), final[i]))
                priorities.append(max(priorities, default=1.0))
            steps.pop(0)
        if step >= 500 and step % 32 == 0:
            for _ in range(8):
                chances = np.array(priorities) ** alpha
                chosen = random.choice(len(stored), 32, p=chances / chances.sum())
                weight = (chances[chosen] / chances.sum() * len(stored)) ** -(0.4 + 0.6 * step / total)
                weights = torch.from_numpy((weight / weight.max()).astype(np.float32))
                batch = [torch.stack(part) for part in zip(*(stored[i] for i in chosen))]
                errors = update(step / total, *batch, weights if alpha else torch.ones(32))
                if errors is not None:
                    for i, error in zip(chosen, errors.tolist()):
                        priorities[i] = error
            if step % 128 == 0 and greedy_return(values) >= GOAL:
                return step
    return total


def _minimize(optimizer: torch.optim.Optimizer, loss: Tensor, max_norm: float | None, lr: float | None = None) -> None:
    parameters = [p for group in optimizer.param_groups for p in group['params']]
    optimizer.zero_grad()
    loss.backward()
    if max_norm is not None:
        nn.utils.clip_grad_norm_(parameters, max_norm)
    if lr is not None:
        optimizer.param_groups[0]['lr'] = lr
    optimizer.step()


def dqn(seed: int, total: int) -> int:
    """Double DQN with epsilon-greedy actions, and a target network copied every 50 updates."""
    torch.manual_seed(seed)
    q, count = network(3), 0
    target = copy.deepcopy(q)
    optimizer = torch.optim.Adam(q.parameters())

    def act(observation: Tensor, progress: float) -> Tensor:
        epsilon = max(0.04, 1 - 0.96 * progress / 0.16)
        with torch.no_grad():
            return torch.where(torch.rand(8) < epsilon, torch.randint(3, (8, )), q(observation).argmax(-1))

    def update(progress: float, observation: Tensor, action: Tensor, reward: Tensor, discount: Tensor,
               following: Tensor, weights: Tensor) -> None:
        nonlocal count
        with torch.no_grad():
            best = q(following).argmax(-1, keepdim=True)
            goal = reward + discount * target(following).gather(1, best)[:, 0]
        value = q(observation).gather(1, action[:, None])[:, 0]
        _minimize(optimizer, functional.smooth_l1_loss(value, goal), 10.0, 1e-3 - 9e-4 * progress)
        count += 1
        if count % 50 == 0:
            target.load_state_dict(q.state_dict())

    return _from_replay(act, update, q, total, seed)


def rainbow(seed: int, total: int) -> int:
    """Rainbow: noisy dueling double network with 51 atoms, 3-step returns and prioritized replay."""
    torch.manual_seed(seed)
    q, count = RainbowNetwork(), 0
    target = copy.deepcopy(q)
    optimizer = torch.optim.Adam(q.parameters())

    def act(observation: Tensor, progress: float) -> Tensor:
        with torch.no_grad():
            return q.values(observation).argmax(-1)

    def update(progress: float, observation: Tensor, action: Tensor, reward: Tensor, discount: Tensor,
               following: Tensor, weights: Tensor) -> Tensor:
        nonlocal count
        rows = torch.arange(len(action))
        with torch.no_grad():
            probabilities = target(following)[rows, q.values(following).argmax(-1)].exp()
            position = ((reward[:, None] + discount[:, None] * q.atoms).clamp(-1, 1) + 1) / 2 * 50
            low, high = position.floor().long(), position.ceil().long()
            projected = torch.zeros(len(action), 51)
            projected.scatter_add_(1, low, probabilities * (high - position + (low == high)))
            projected.scatter_add_(1, high, probabilities * (position - low))
        entropy = -(projected * q(observation)[rows, action]).sum(-1)
        _minimize(optimizer, (weights * entropy).mean(), 10.0, 1e-3 - 9e-4 * progress)
        count += 1
        if count % 50 == 0:
            target.load_state_dict(q.state_dict())
        divergence = entropy.detach() + (projected * projected.clamp(min=1e-9).log()).sum(-1)
        return divergence.clamp(min=0) + 1e-6

    return _from_replay(act, update, q.greedy_values, total, seed, n_step=3, alpha=0.5)


def sac(seed: int, total: int) -> int:
    """Discrete soft actor-critic with two critics and a learned temperature."""
    torch.manual_seed(seed)
    actor, critics = network(3), nn.ModuleList((network(3), network(3)))
    targets, log_alpha = copy.deepcopy(critics), torch.tensor(-2.0, requires_grad=True)
    optimizer = torch.optim.Adam([*actor.parameters(), *critics.parameters(), log_alpha], lr=1e-3)

    def act(observation: Tensor, progress: float) -> Tensor:
        with torch.no_grad():
            return torch.distributions.Categorical(logits=actor(observation)).sample()

    def update(progress: float, observation: Tensor, action: Tensor, reward: Tensor, discount: Tensor,
               following: Tensor, weights: Tensor) -> None:
        alpha = log_alpha.exp().detach()
        with torch.no_grad():
            log_next = torch.log_softmax(actor(following), -1)
            least = torch.minimum(*(critic(following) for critic in targets))
            goal = reward + discount * (log_next.exp() * (least - alpha * log_next)).sum(-1)
        values = [critic(observation) for critic in critics]
        critic_loss = sum(functional.mse_loss(value.gather(1, action[:, None])[:, 0], goal) for value in values)
        log_policy = torch.log_softmax(actor(observation), -1)
        least = torch.minimum(*values).detach()
        actor_loss = (log_policy.exp() * (alpha * log_policy - least)).sum(-1).mean()
        entropy = -(log_policy.exp() * log_policy).sum(-1).detach()
        _minimize(optimizer, critic_loss + actor_loss + log_alpha * (entropy - 0.1).mean(), None)
        with torch.no_grad():
            torch._foreach_lerp_(list(targets.parameters()), list(critics.parameters()), 0.02)

    return _from_replay(act, update, actor, total, seed)


def _from_unrolls(act: Callable[[Tensor, float], Tensor], prepare: Callable[[list[tuple]], list[Tensor]],
                  update: Callable[..., None], values: Callable[[Tensor], Tensor], total: int, seed: int) -> int:
    """Train for 4 epochs of minibatches of 128 on each unroll of 16 steps of 32 games."""
    torch.manual_seed(seed)
    games = VectorCatch(32, seed)
    for step in range(512, total + 512, 512):
        unroll = []
        for _ in range(16):
            observation = games.observe()
            action = act(observation, step / total)
            reward, is_over, final = games.step(action)
            unroll.append((observation, action, reward, 0.0 if is_over else GAMMA, final))
        with torch.no_grad():
            parts = [part.flatten(0, 1) for part in prepare(unroll)]
        for _ in range(4):
            for rows in torch.randperm(512).split(128):
                update(*(part[rows] for part in parts))
        if greedy_return(values) >= GOAL:
            return step
    return total


def ppo(seed: int, total: int) -> int:
    """Proximal policy optimization with normalized advantages."""
    torch.manual_seed(seed)
    actor, critic = network(3), network(1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=2e-3, eps=1e-5)

    def act(observation: Tensor, progress: float) -> Tensor:
        with torch.no_grad():
            return torch.distributions.Categorical(logits=actor(observation)).sample()

    def prepare(unroll: list[tuple]) -> list[Tensor]:
        advantage, rows = torch.zeros(32), []
        for observation, action, reward, discount, following in reversed(unroll):
            value = critic(observation)[:, 0]
            advantage = reward + discount * critic(following)[:, 0] - value + 0.95 * discount * advantage
            log_prob = torch.log_softmax(actor(observation), -1).gather(1, action[:, None])[:, 0]
            rows.append((observation, action, log_prob, advantage, advantage + value))
        return [torch.stack(part) for part in zip(*rows)]

    def update(observation: Tensor, action: Tensor, old_log_prob: Tensor, advantage: Tensor, goal: Tensor) -> None:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        log_policy = torch.log_softmax(actor(observation), -1)
        ratio = (log_policy.gather(1, action[:, None])[:, 0] - old_log_prob).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        loss = loss + 0.5 * functional.mse_loss(critic(observation)[:, 0], goal)
        _minimize(optimizer, loss + 0.01 * (log_policy.exp() * log_policy).sum(-1).mean(), 0.5)

    return _from_unrolls(act, prepare, update, actor, total, seed)


def pqn(seed: int, total: int) -> int:
    """Parallelized Q-network with layer normalization and Q(lambda) targets."""
    torch.manual_seed(seed)
    q = network(3, norm=True)
    optimizer = torch.optim.RAdam(q.parameters(), lr=1e-3)

    def act(observation: Tensor, progress: float) -> Tensor:
        with torch.no_grad():
            return torch.where(torch.rand(32) < 0.1, torch.randint(3, (32, )), q(observation).argmax(-1))

    def prepare(unroll: list[tuple]) -> list[Tensor]:
        goal, rows = None, []
        for observation, action, reward, discount, following in reversed(unroll):
            best = q(following).amax(-1)
            goal = reward + discount * (best if goal is None else 0.1 * best + 0.9 * goal)
            rows.append((observation, action, goal))
        return [torch.stack(part) for part in zip(*rows)]

    def update(observation: Tensor, action: Tensor, goal: Tensor) -> None:
        _minimize(optimizer, functional.mse_loss(q(observation).gather(1, action[:, None])[:, 0], goal), 10.0)

    return _from_unrolls(act, prepare, update, q, total, seed)


LOOPS = {'dqn': dqn, 'rainbow': rainbow, 'ppo': ppo, 'sac': sac, 'pqn': pqn}
