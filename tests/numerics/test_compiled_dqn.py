"""Every compiled update of DQN against the same update from the formulas, in float64 and from the same state."""
from functools import partial

import pytest
import torch

from alfx import context
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.dqn_algorithm import DqnAlgorithm
from alfx.algorithms.one_step_loss import OneStepTDLoss
from alfx.data_structures import StepType
from alfx.engine.plan import TracedPlan
from alfx.environments.suite_unittest import ActionType, PolicyUnittestEnv
from alfx.networks.q_networks import QNetwork
from alfx.optimizers import Adam
from alfx.utils.losses import element_wise_huber_loss

pytestmark = pytest.mark.compiles

GAMMA, BETAS, EPS, MAX_NORM = 0.9, (0.9, 0.999), 1e-8, 0.05


def _q_values(params, x):
    for weight, bias in zip(params[:-2:2], params[1:-2:2]):
        x = torch.relu(x @ weight.T + bias)
    return x @ params[-2].T + params[-1]


def _loss(params, target_params, experience):
    """Return the Huber loss of double DQN's one-step errors, as a mean over both steps (van Hasselt et al. 2016)."""
    time_step, action = experience.time_step, experience.rollout_info.rl.action
    observation = time_step.observation.double()
    value = _q_values(params, observation[0]).gather(-1, action[0][:, None])[:, 0]
    with torch.no_grad():
        best = _q_values(params, observation[1]).argmax(-1, keepdim=True)
        following = _q_values(target_params, observation[1]).gather(-1, best)[:, 0]
        target = time_step.reward[1].double() + GAMMA * time_step.discount[1].double() * following
    error = (target - value).abs()
    loss = torch.where(error < 1, 0.5 * error**2, error - 0.5)
    return (loss * (time_step.step_type[0] != StepType.LAST)).sum() / (2 * len(loss))


def _stepped(params, grads, state, lr):
    """Adam (Kingma and Ba 2015, algorithm 1) after clipping by the global norm."""
    norm = torch.cat([g.flatten() for g in grads]).norm()
    grads = [g / max(1.0, norm.item() / MAX_NORM) for g in grads]
    for p, g, s in zip(params, grads, state):
        first, second = (beta * m + (1 - beta) * x for beta, m, x in zip(BETAS, s[1:], (g, g * g)))
        step = s[0] + 1
        yield p - lr * first / (1 - BETAS[0]**step) / ((second / (1 - BETAS[1]**step)).sqrt() + EPS)


def test_compiled_updates_match_the_formulas(monkeypatch):
    errors, counts = [], []

    def compared(plan, batch):
        dqn, (optimizer, ) = agent.policy, agent.optimizers()
        params = list(dqn.critics.parameters())
        before = [p.detach().double().requires_grad_() for p in params]
        targets = [p.double() for p in dqn.target_critics.parameters()]
        state = [[optimizer.state[p][key].double().clone() for key in ('step', 'exp_avg', 'exp_avg_sq')]
                 if p in optimizer.state else [0, 0, 0] for p in params]
        loss = _loss(before, targets, batch.experience)
        expected = _stepped(before, torch.autograd.grad(loss, before), state, 1e-2)
        computed = optimize(plan, batch)
        assert abs(computed.loss_info.loss.item() - loss.item()) < 1e-6
        errors.append(max((p.detach() - e).abs().max().item() for p, e in zip(params, expected)))
        assert isinstance(plan, TracedPlan)
        counts.append(plan.compiled.num_graphs)
        return computed

    torch.manual_seed(0)
    context.reset()
    env = PolicyUnittestEnv(batch_size=4, episode_length=5, action_type=ActionType.Discrete)
    env.seed(0)
    env.reset()
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=4, mini_batch_size=16, mini_batch_length=2,
                           num_updates_per_train_iter=16, whole_replay_buffer_training=False,
                           clear_replay_buffer=False, replay_buffer_length=100, compile=True)
    loss_ctor = partial(OneStepTDLoss, gamma=GAMMA, td_error_loss_fn=element_wise_huber_loss)
    rl = partial(DqnAlgorithm, q_network_cls=partial(QNetwork, fc_layer_params=(32, 32)), num_critic_replicas=1,
                 critic_loss_ctor=loss_ctor, target_net_target_action=False, target_update_tau=0.1)
    agent = Agent(env.observation_spec(), env.action_spec(), env=env, config=config, rl_algorithm_cls=rl,
                  optimizer=Adam(lr=1e-2, betas=BETAS, eps=EPS, gradient_clipping=MAX_NORM, clip_by_global_norm=True))
    agent.finalize()
    optimize = agent.updater.optimize
    monkeypatch.setattr(agent.updater, 'optimize', compared)
    for _ in range(8):
        agent.train_iter()
    assert counts == [1] * 128
    assert max(errors) < 1e-2 * 1e-3  # a thousandth of the longest step
