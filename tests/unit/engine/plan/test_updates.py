"""Replayed and compiled updates give the results of eager mode for any algorithm; otherwise they are not used."""
import copy
from functools import partial

import pytest
import torch
from helpers import agents
from helpers.dqn_agents import Fixed, assert_same_parameters, make_agent, sac, train
from helpers.plans import backends_of, num_graphs, warnings_in

from alfx import context, summary
from alfx.algorithms.actor_critic_algorithm import ActorCriticAlgorithm
from alfx.algorithms.categorical_td_loss import CategoricalTDLoss
from alfx.algorithms.dqn_algorithm import DqnAlgorithm
from alfx.algorithms.ppo_algorithm import PPOAlgorithm
from alfx.algorithms.ppo_loss import PPOLoss
from alfx.algorithms.sac_algorithm import SacAlgorithm
from alfx.data_structures import LossInfo
from alfx.engine.loss_reduction import NonFiniteLossError
from alfx.engine.plan import Batch, Objective, TracedPlan, compile, make_plan
from alfx.engine.plan.backends import Replayed
from alfx.engine.remote.data_parallel import Ranks
from alfx.environments.suite_unittest import ActionType
from alfx.gin_utils import ConfError
from alfx.networks.actor_distribution_networks import ActorDistributionNetwork
from alfx.networks.q_networks import QNetwork
from alfx.networks.value_networks import ValueNetwork
from alfx.optimizers import Adam, SGD
from alfx.utils.schedulers import LinearScheduler

EXACT = dict(atol=0.0, rtol=0.0)


class Changing(DqnAlgorithm):
    """A subclass that does not declare its update traceable."""


class Peeking(Fixed):
    """A subclass that declares its update traceable, although its operations depend on the sign of a loss."""

    own_capabilities = Fixed.own_capabilities

    def calc_loss(self, info):
        loss_info = super().calc_loss(info)
        return loss_info if loss_info.loss.sum() > 0 else loss_info._replace(loss=2 * loss_info.loss)


def rainbow(**config):
    """Return an agent with noisy networks, distributions of values and three-step returns."""
    network = partial(QNetwork, fc_layer_params=(8, ), noisy=True, dueling=True)
    rl = partial(DqnAlgorithm, q_network_cls=network, num_critic_replicas=1, num_atoms=5, v_min=0.0, v_max=5.0,
                 critic_loss_ctor=partial(CategoricalTDLoss, td_lambda=1.0), train_first_step_only=True,
                 rollout_epsilon_greedy=0.0, target_net_target_action=False, calculate_priority=True)
    return make_agent(rl=rl, mini_batch_length=4, **config)


def both(warm_up, make, iterations=6, between=lambda agent: None):
    """Return the same agent trained with replayed and with eager updates."""
    trained = []
    for count in (1, 10**9):
        warm_up(count)
        trained.append(make())
        train(trained[-1:], iterations, between)
    return trained


# The same numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('make', [
    make_agent, rainbow, lambda: make_agent(optimizer=SGD(lr=0.1, momentum=0.9)),
    lambda: make_agent(priority_replay=False), lambda: make_agent(rl=sac(), action_type=ActionType.Continuous),
    lambda: agents.make_agent('actor-critic', 'discrete')[0], lambda: agents.make_agent('ppo', 'continuous')[0],
    lambda: agents.make_agent('ppo', 'continuous', rl_algorithm_cls=partial(
        _of('ppo', PPOAlgorithm), loss_class=partial(
            PPOLoss, importance_ratio_clipping=LinearScheduler('iterations', [(0, 0.5), (6, 0.01)]))))[0]],
    ids=['dqn', 'rainbow', 'sgd with momentum', 'reused sample memory', 'nested gradient', 'on-policy', 'epochs',
         'scheduled clipping'])
def test_replayed_updates_match_eager_ones(make, warm_up, caplog):
    trained = both(warm_up, make)
    assert num_graphs(trained[0]) and not num_graphs(trained[1]) and not warnings_in(caplog)
    assert_same_parameters(trained, **EXACT)


@pytest.mark.compiles
@pytest.mark.parametrize('make, atol', [
    (make_agent, 1e-5), (rainbow, 1e-5),
    (lambda compile: make_agent(compile, SGD(lr=0.1, momentum=0.9, gradient_clipping=0.1)), 1e-5),
    (lambda compile: make_agent(compile, priority_replay=False), 1e-5),
    (lambda compile: make_agent(compile, rl=sac(), action_type=ActionType.Continuous), 2e-5),
    (lambda compile: agents.make_agent('actor-critic', 'discrete', config_args=dict(compile=compile))[0], 1e-5)],
    ids=['dqn', 'rainbow', 'sgd with momentum', 'several static batches', 'nested gradient', 'on-policy'])
def test_compiled_updates_match_eager_ones_up_to_rounding(make, atol, never_replayed, caplog):
    trained = [make(compile=on) for on in (False, True)]
    train(trained, 4)
    _, compiled = backends_of(trained[1])
    assert compiled.num_graphs == 1 and not warnings_in(caplog)
    assert_same_parameters(trained, atol=atol, rtol=1e-3)


@pytest.mark.compiles
def test_a_compiled_agents_checkpoint_loads_into_an_eager_one(never_replayed):
    plain, compiled = make_agent(False), make_agent(True)
    train([plain, compiled], 2)
    plain.load_state_dict(compiled.state_dict())
    other = make_agent(False)
    other.train_iter()
    compiled.load_state_dict(other.state_dict())
    compiled.train_iter()
    assert [int(s['step']) for s in compiled.optimizers()[0].state.values()] == [6] * len(
        list(compiled.optimizers()[0].state))


@pytest.mark.compiles
def test_compiled_updates_use_several_static_batches_and_replay_uses_one(never_replayed):
    plain, compiled = [make_agent(on, priority_replay=False) for on in (False, True)]
    train([plain, compiled], 2)
    assert len(compiled.learner.batches.reader.slots) == 3 and len(plain.learner.batches.reader.slots) == 1


@pytest.mark.compiles
@pytest.mark.parametrize('when', ['between iterations', 'after each update'])
@pytest.mark.parametrize('how', ['data', 'object'])
def test_moved_or_replaced_tensors_are_detected(how, when, warm_up, caplog):
    class Exchanging(Fixed):
        own_capabilities = Fixed.own_capabilities

        def exchange(self):
            if how == 'object':
                self._buffers['factor'] = self.factor * 1.1
            else:
                for p in self.parameters():
                    p.data = p.data.clone()

        def after_update(self, root_inputs, info):
            super().after_update(root_inputs, info)
            if when == 'after each update':
                self.exchange()

    def between(agent):
        if when == 'between iterations':
            agent.policy.exchange()

    trained = both(warm_up, lambda: make_agent(algorithm_cls=Exchanging, priority_replay=False), between=between)
    assert num_graphs(trained[0]) and not warnings_in(caplog)
    assert_same_parameters(trained, **EXACT)


def test_updates_that_take_turns_only_later_have_a_graph_each(replayed_at_once):
    class Turning(Fixed):
        own_capabilities = Fixed.own_capabilities
        turn = None

        @property
        def graph_key(self):
            return self.turn

    agent = make_agent(algorithm_cls=Turning, priority_replay=False)
    train([agent], 3)
    assert num_graphs(agent) == 1
    agent.policy.turn = 'other'
    train([agent], 3)
    assert num_graphs(agent) == 2


def test_a_loaded_checkpoint_is_seen_by_the_graph(replayed_at_once):
    agent, other = make_agent(priority_replay=False), make_agent(priority_replay=False)
    train([agent], 3)
    state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in agent.state_dict().items()}
    for trained in (agent, other):
        trained.load_state_dict(state)
        trained._replay_buffer = agent.replay_buffer
        trained.learner.collector.next_request = lambda trained_before: None
        torch.manual_seed(2)
        trained.train_iter()
    assert num_graphs(agent)
    assert_same_parameters([agent, other], **EXACT)


def test_a_copied_agent_trains_itself(replayed_at_once):
    agent = make_agent(rl=sac(), action_type=ActionType.Continuous)
    train([agent], 3)
    copied = copy.deepcopy(agent)
    before = [p.detach().clone() for p in agent.parameters() if p.requires_grad]
    copied.train_iter()
    assert num_graphs(agent) and num_graphs(copied)
    assert all(torch.equal(a, b) for a, b in zip(before, (p for p in agent.parameters() if p.requires_grad)))
    assert not any(torch.equal(a, b) for a, b in zip(before, (p for p in copied.parameters() if p.requires_grad)))


class Sums(torch.nn.Module):
    """Loss whose parameters have one gradient in common, or an expanded one."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.linear = kind, torch.nn.Linear(4, 4)
        self.first, self.second = torch.nn.Parameter(torch.randn(4)), torch.nn.Parameter(torch.randn(4))

    def losses(self, x):
        if self.kind == 'shared':
            return LossInfo(loss=10 * (self.linear(x) + (self.first + self.second)).square().sum(-1)[None]), None, ()
        scale = x.mean()
        return LossInfo(loss=self.linear(x).square().sum(-1)[None],
                        scalar_loss=scale * (self.first.mean() + self.second.sum())), None, ()


@pytest.mark.parametrize('clipping', [{}, dict(gradient_clipping=1.0),
                                      dict(gradient_clipping=1.0, clip_by_global_norm=True)])
@pytest.mark.parametrize('optimizer', [Adam, SGD])
@pytest.mark.parametrize('kind', ['shared', 'expanded', 'frozen'])
def test_shared_expanded_and_frozen_gradients_are_replayed(kind, optimizer, clipping, warm_up, caplog):
    modules, plans = [], []
    for count in (1, 10**9):
        warm_up(count)
        module = Sums('shared' if kind == 'frozen' else kind)
        plan = make_plan(Objective(module, module.losses, list(module.parameters()), 'sums'), True)
        updates, generator = optimizer(list(module.parameters()), lr=0.01, **clipping), torch.Generator().manual_seed(1)
        for i in range(30):
            module.first.requires_grad_(kind != 'frozen' or not 10 <= i < 20)
            plan.gradients(Batch(torch.randn(8, 4, generator=generator)))
            updates.step()
        modules.append(module)
        plans.append(plan)
    assert plans[0].replayed.num_graphs == (2 if kind == 'frozen' else 1) and not plans[1].replayed.num_graphs
    assert not warnings_in(caplog)
    assert all(map(torch.equal, modules[0].parameters(), modules[1].parameters()))


def test_a_copied_agent_trains_as_its_original():
    agent = make_agent(rl=sac(), action_type=ActionType.Continuous)
    train([agent], 3)
    agents = agent, copy.deepcopy(agent)
    for each in agents:
        each.learner.collector.next_request = lambda trained_before: None
        torch.manual_seed(5)
        each.train_iter()
    assert_same_parameters(agents, **EXACT)


def test_a_copied_agent_acts_with_its_own_networks(replayed_at_once):
    agent = make_agent(rl=sac(), action_type=ActionType.Continuous)
    train([agent], 3)
    copied = copy.deepcopy(agent)
    observation = torch.ones(4, 1)
    with torch.no_grad():
        for p in copied.policy.actor.parameters():
            p.fill_(float('nan'))
        for _ in range(4):
            assert torch.isfinite(agent.policy._sampled_action(observation)).all()
            assert torch.isnan(copied.policy._sampled_action(observation)).all()


def test_few_updates_are_not_worth_a_graph():
    agent = make_agent()
    agent.train_iter()
    assert not num_graphs(agent)


# Features of algorithms that graphs must support ---------------------------------------------------------------------


def test_a_subclass_must_declare_its_update_traceable_again(replayed_at_once, caplog):
    caplog.set_level('INFO', 'alfx')
    agent = make_agent(algorithm_cls=Changing)
    assert not agent.policy.capabilities.traceable_update
    message, = (text for text in caplog.messages if 'declare' in text)
    assert message.startswith('Changing does not declare that its updates can be traced, so they run eagerly')
    train([agent], 3)
    assert not isinstance(agent.updater.plan(agent.learner.losses.collected), TracedPlan)
    with pytest.raises(ConfError, match='does not execute the same operations'):
        make_agent(True, algorithm_cls=Changing)


def number(self):
    return self.number


def schedule(self):
    return self.schedule()


def tensor_in_place(self):
    return self.own[0]


def another_tensor(self):
    return self.others[-1]


class Reading:
    """A mixin whose training and acting depend on a number that changes after each update."""

    read = staticmethod(number)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.number, self.own, self.others = 1.0, [torch.ones(())], [torch.ones(())]
        self.schedule = LinearScheduler('iterations', [(0, 1.0), (20, 3.0)])

    def after_update(self, root_inputs, info):
        super().after_update(root_inputs, info)
        self.number *= 1.05
        self.own[0].mul_(1.05)
        self.others.append(self.others[-1] * 1.05)
        context.update_progress('iterations', len(self.others) % 20)

    def calc_loss(self, info):
        loss_info = super().calc_loss(info)
        return loss_info._replace(loss=loss_info.loss * self.read(self))


class ReadingDqn(Reading, DqnAlgorithm):
    own_capabilities = DqnAlgorithm.own_capabilities

    def _q_values(self, observation, state):
        values, state = super()._q_values(observation, state)
        return values * torch.as_tensor(self.read(self) % 0.1 - 0.05), state  # of any sign


class ReadingSac(Reading, SacAlgorithm):
    own_capabilities = SacAlgorithm.own_capabilities

    def _sampled_actions(self, observation):
        return super()._sampled_actions(observation) / self.read(self)


class ReadingPpo(Reading, PPOAlgorithm):
    own_capabilities = PPOAlgorithm.own_capabilities


class ReadingActorCritic(Reading, ActorCriticAlgorithm):
    own_capabilities = ActorCriticAlgorithm.own_capabilities


READING = {
    'dqn': lambda: make_agent(algorithm_cls=ReadingDqn),
    'sac': lambda: make_agent(rl=sac(ReadingSac), action_type=ActionType.Continuous),
    'ppo': lambda: agents.make_agent('ppo', 'discrete', rl_algorithm_cls=_of('ppo', ReadingPpo))[0],
    'actor-critic': lambda: agents.make_agent('actor-critic', 'discrete',
                                              rl_algorithm_cls=_of('actor-critic', ReadingActorCritic))[0]}


def _of(name, cls):
    return partial(cls, actor_network_ctor=partial(ActorDistributionNetwork, fc_layer_params=(16, )),
                   value_network_ctor=partial(ValueNetwork, fc_layer_params=(16, )),
                   **agents.ALGORITHMS[name].keywords)


@pytest.mark.parametrize('read', [number, schedule, tensor_in_place, another_tensor])
@pytest.mark.parametrize('name', READING)
def test_state_read_outside_of_modules_is_never_frozen(name, read, warm_up, monkeypatch, caplog):
    monkeypatch.setattr(Reading, 'read', staticmethod(read))
    trained = both(warm_up, READING[name])
    assert_same_parameters(trained, **EXACT)
    if read is tensor_in_place:  # a graph reads it in place
        assert num_graphs(trained[0]) and not warnings_in(caplog)
    elif read is not schedule:  # a graph depends on the value
        assert not warnings_in(caplog)
    else:
        messages = [x for x in warnings_in(caplog) if x.startswith('the update of ')]
        assert not num_graphs(trained[0]) and len(messages) == 1 and 'to eager mode, which is slower' in messages[0]


def test_a_rare_change_of_a_number_is_detected_at_once(warm_up, caplog):
    def between(agent):
        if len(agent.policy.others) > 20:
            agent.policy.number = 3.0

    class Constant(ReadingDqn):
        own_capabilities = ReadingDqn.own_capabilities

        def after_update(self, root_inputs, info):
            number = self.number
            super().after_update(root_inputs, info)
            self.number = number

    warm_up(1)
    agent = make_agent(algorithm_cls=Constant)
    train([agent], 7, between)
    warm_up(10**9)
    eager = make_agent(algorithm_cls=Constant)
    train([eager], 7, between)
    assert num_graphs(agent) and not num_graphs(eager) and not warnings_in(caplog)
    assert_same_parameters([agent, eager], **EXACT)


class Silent:
    """A summary writer that writes nothing."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class Counting(Fixed):
    """An algorithm whose loss sets a number in Python, draws random numbers and writes a buffer."""

    own_capabilities = Fixed.own_capabilities
    draws = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer('latest', torch.zeros(()))
        self.seen = []

    def calc_loss(self, info):
        self.count = 1
        loss_info = super().calc_loss(info)
        loss_info = loss_info._replace(loss=loss_info.loss * (1 + 0.1 * torch.rand_like(loss_info.loss)))
        self.latest.add_(loss_info.loss.detach().mean())
        return loss_info

    def after_update(self, root_inputs, info):
        super().after_update(root_inputs, info)
        self.seen.append((float(self.latest), getattr(self, 'count', 0), int(torch.get_rng_state().sum())))


def test_tracing_and_comparing_leave_no_trace(warm_up, caplog):
    trained = both(warm_up, lambda: make_agent(algorithm_cls=Counting))
    assert num_graphs(trained[0]) and not warnings_in(caplog)
    assert_same_parameters(trained, **EXACT)
    seen, expected = ([x for x in agent.policy.seen] for agent in trained)
    assert seen == expected


@pytest.mark.compiles
@pytest.mark.parametrize('compile', [False, True])
def test_an_update_that_branches_on_values_stays_eager_with_one_warning(compile, warm_up, caplog):
    trained = []
    for count, on in ((10**9, False), (1, compile)):
        warm_up(count)
        trained.append(make_agent(on, algorithm_cls=Peeking))
        train(trained[-1:], 3)
    assert_same_parameters(trained, **EXACT)
    (message, ) = [x for x in warnings_in(caplog) if 'update' in x]
    assert 'it cannot be traced' in message and ('compiled' in message) == compile


# A wrong plan is not used --------------------------------------------------------------------------------------------


def _corrupted(index, results):
    results = list(results)
    results[index] = results[index] * (1.1 if index == 2 else 1.01)  # a gradient may differ by 1/32 in one call
    return results


@pytest.mark.compiles
@pytest.mark.parametrize('index, part', [(0, 'the loss'), (1, 'the priority'), (2, 'the gradient of _rl_algorithm.')])
@pytest.mark.parametrize('backend', ['replayed', 'compiled'])
def test_a_backend_with_wrong_results_is_dropped_with_a_warning(backend, index, part, warm_up, monkeypatch, caplog):
    """Drop backends with different results, with a warning that names the part."""
    def corrupt(make):
        def corrupted(*args):
            cached = make(*args)
            run, cached.run = cached.run, lambda leaves: _corrupted(index, run(leaves))
            return cached
        return corrupted

    cls = Replayed if backend == 'replayed' else compile.Compiled
    monkeypatch.setattr(cls, '_make', corrupt(cls._make))
    warm_up(10**9)
    plain = make_agent()
    train([plain], 3)
    if backend == 'replayed':
        warm_up(1)
    agent = make_agent(backend == 'compiled')
    train([agent], 3)
    assert_same_parameters([plain, agent], **EXACT)
    assert num_graphs(agent) == 0
    (message, ) = [x for x in warnings_in(caplog) if x.startswith('the update')]
    assert part in message and message.startswith('the update of AgentAlgorithm falls back ')


def test_a_buffer_written_only_by_python_code_is_detected(warm_up, caplog):
    class Sometimes(Fixed):
        own_capabilities = Fixed.own_capabilities

        def calc_loss(self, info):
            if not torch.compiler.is_compiling() and type(info.reward) is torch.Tensor and not _is_recording():
                self.factor.add_(0.1)
            return super().calc_loss(info)

    trained = both(warm_up, lambda: make_agent(algorithm_cls=Sometimes))
    assert_same_parameters(trained, **EXACT)
    assert not num_graphs(trained[0]) and '_rl_algorithm.factor is written to' in caplog.text


def _is_recording():
    from torch.utils._python_dispatch import _get_current_dispatch_mode
    return _get_current_dispatch_mode() is not None


def test_without_a_compiler_graphs_are_replayed_with_one_warning_each(warm_up, monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError('no C++ compiler')

    monkeypatch.setattr(compile, 'compiled', fail)
    warm_up(1)
    trained = [make_agent(True), make_agent(False)]
    train(trained, 3)
    assert_same_parameters(trained, **EXACT)
    replayed, compiled = backends_of(trained[0])
    assert replayed.num_graphs and not compiled.num_graphs
    messages = [x for x in warnings_in(caplog) if 'no C++ compiler' in x]
    assert sorted(x.partition(' falls back ')[0] for x in messages) == ['acting', 'the update of AgentAlgorithm']
    assert all('falls back from compiled code to a replayed graph' in x for x in messages)


def test_a_compiler_error_is_logged_in_one_line(warm_up, monkeypatch, caplog):
    def fail(*_):
        raise SyntaxError("'tmp5' was not declared\nmany lines")

    warm_up(1)
    monkeypatch.setattr(compile, 'compiled', fail)
    agent = make_agent(True)
    train([agent], 3)
    (message, ) = [x for x in warnings_in(caplog) if x.startswith('the update')]
    assert "SyntaxError: 'tmp5' was not declared" in message and 'many lines' not in message
    assert num_graphs(agent)


# Losses that are not finite, and other processes ---------------------------------------------------------------------


@pytest.mark.compiles
@pytest.mark.parametrize('compile', [False, True])
def test_a_non_finite_loss_stops_the_run_by_name_and_changes_nothing(compile, replayed_at_once):
    agent = make_agent(compile, algorithm_cls=Fixed)
    train([agent], 2)
    assert num_graphs(agent)
    before = [p.detach().clone() for p in agent.parameters()]
    agent.policy.factor.fill_(float('nan'))
    with pytest.raises(NonFiniteLossError, match='critic'):
        agent.train_iter()
    assert all(torch.equal(a, b) for a, b in zip(before, agent.parameters()))


class CountingRanks(Ranks):
    """A single rank that records the size of each collective call."""

    def __init__(self):
        super().__init__(0, 1, None, torch.device('cpu'))
        self.sizes = []

    def all_reduce(self, tensor):
        self.sizes.append(tensor.numel())


class Asking(Fixed):
    """An algorithm whose loss is averaged over all ranks."""

    own_capabilities = Fixed.own_capabilities

    def calc_loss(self, info):
        loss_info = super().calc_loss(info)
        return loss_info._replace(loss=loss_info.loss - context.mean_over_ranks(loss_info.loss.detach().mean()))


class Gathering(Fixed):
    """An algorithm whose loss gathers the losses of all ranks."""

    own_capabilities = Fixed.own_capabilities

    def calc_loss(self, info):
        loss_info = super().calc_loss(info)
        return loss_info._replace(loss=loss_info.loss - context.cat_over_ranks(loss_info.loss.detach()).mean())


def in_ranks(agent):
    ranks = CountingRanks()
    context.set_ranks(ranks)
    agent.updater.ranks = ranks
    return ranks


@pytest.mark.compiles
@pytest.mark.parametrize('algorithm_cls', [Asking, Gathering])
@pytest.mark.parametrize('compile', [False, True])
def test_every_update_makes_the_same_number_of_collective_calls(compile, algorithm_cls, replayed_at_once):
    """Compare the collective calls of updates; mismatched collectives hang or average unrelated numbers."""
    agent = make_agent(compile, algorithm_cls=algorithm_cls)
    ranks = in_ranks(agent)
    sizes = []
    for recording in (False, False, False, True, False):
        ranks.sizes.clear()
        with summary.push_summary_writer(Silent()), context.record_if(recording):
            agent.train_iter()
        sizes.append(list(ranks.sizes))
    update_sizes = sizes[0][:len(sizes[0]) // 3]
    assert sizes == [3 * update_sizes] * 5 and len(update_sizes) == 2
    assert bool(num_graphs(agent)) == (algorithm_cls is Asking)
    ranks.sizes.clear()
    agent.policy.factor.fill_(float('nan'))
    with pytest.raises(NonFiniteLossError, match='critic'):
        agent.train_iter()
    assert ranks.sizes == update_sizes and context.get_ranks() is ranks


def test_an_estimate_of_the_gradient_noise_keeps_the_graph(replayed_at_once):
    agent = make_agent(algorithm_cls=Fixed, summarize_gradient_noise_scale=True)
    graphs = []
    for recording in (False, False, True, False):
        with summary.push_summary_writer(Silent()), context.record_if(recording):
            agent.train_iter()
        graphs.append(num_graphs(agent))
    assert graphs[-1] == graphs[1] > 0 and float(agent.updater.noise_scale._calls) > 0


# Batches -------------------------------------------------------------------------------------------------------------


class Keeping(Fixed):
    """An algorithm that keeps the rewards of each batch that its Python code sees."""

    own_capabilities = Fixed.own_capabilities

    def calc_loss(self, info):
        if hasattr(self, 'kept'):
            self.kept.append((info.reward, info.reward.clone()))
        return super().calc_loss(info)


def test_a_batch_that_an_algorithm_keeps_is_not_overwritten(never_replayed):
    agent = make_agent(algorithm_cls=Keeping, priority_replay=False)
    stored = agent.policy.kept = []
    train([agent], 4)
    assert agent.learner.batches.reader is not None and len(stored) == 12
    assert all(torch.equal(reward, at_that_time) for reward, at_that_time in stored)


class Shifting(DqnAlgorithm):
    """An algorithm that trains on rewards different from the stored ones."""

    own_capabilities = DqnAlgorithm.own_capabilities

    def preprocess_experience(self, root_inputs, rollout_info, batch_info):
        root_inputs, rollout_info = super().preprocess_experience(root_inputs, rollout_info, batch_info)
        return root_inputs._replace(reward=root_inputs.reward - 1), rollout_info


@pytest.mark.parametrize('priority_replay', [False, True])
@pytest.mark.parametrize('algorithm_cls', [DqnAlgorithm, Shifting])
def test_batches_read_into_reused_memory_give_the_same_parameters(algorithm_cls, priority_replay, replayed_at_once):
    trained = []
    for reuses in (True, False):
        agent = make_agent(algorithm_cls=algorithm_cls, priority_replay=priority_replay)
        torch.manual_seed(1)
        agent.train_iter()
        if not reuses:
            agent.replay_buffer.reader = lambda *_: None
            agent.learner.invalidate_caches()
        for _ in range(4):
            agent.train_iter()
        assert num_graphs(agent)
        assert (agent.learner.batches.reader is not None) == (reuses and algorithm_cls is DqnAlgorithm)
        trained.append(agent)
    assert_same_parameters(trained, **EXACT)
