"""Updates played from a record; tests/contract/test_off_policy_confs.py holds them equal to the plain ones."""
import agents
import pytest
import torch
from test_compiled_update import _Changing, _Dqn, make_agent

from alfx import context
from alfx.algorithms.dqn_algorithm import DqnAlgorithm
from alfx.engine import compiled_update, recorded_update
from alfx.engine.errors import NonFiniteLossError
from alfx.engine.remote.data_parallel import GradientAverager, Ranks
from alfx.optimizers import SGD


@pytest.fixture(autouse=True)
def record_at_once(monkeypatch):
    monkeypatch.setattr(recorded_update, '_UPDATES_BEFORE', 2)


def records(agent):
    return agent._fast_update._records if agent._fast_update else {}


@pytest.mark.parametrize('optimizer', [None, SGD(lr=0.1, momentum=0.9)])
def test_a_played_update_is_the_plain_one_with_any_optimizer(optimizer, monkeypatch):
    results = []
    for played in (True, False):
        monkeypatch.setattr(recorded_update, '_UPDATES_BEFORE', 2 if played else 10**6)
        agent = make_agent(False, None if optimizer is None else SGD(lr=0.1, momentum=0.9))
        torch.manual_seed(1)
        for _ in range(4):
            agent.train_iter()
        assert bool(records(agent)) == played
        results.append([p.detach().clone() for p in agent.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_few_updates_are_not_worth_a_record(monkeypatch):
    monkeypatch.setattr(recorded_update, '_UPDATES_BEFORE', 50)
    agent = make_agent(False)
    agent.train_iter()
    assert not records(agent)


def test_a_subclass_has_to_say_again_that_its_update_is_fixed():
    agent = make_agent(False, algorithm_cls=_Changing)
    assert not agent._rl_algorithm.traits.fixed_update
    for _ in range(3):
        agent.train_iter()
    assert not records(agent)


def test_a_loss_that_is_not_finite_stops_the_run_with_its_name_and_changes_no_parameter():
    agent = make_agent(False, algorithm_cls=_Dqn)
    for _ in range(2):
        agent.train_iter()
    assert records(agent)
    before = [p.detach().clone() for p in agent.parameters()]
    agent._rl_algorithm.factor.fill_(float('nan'))
    with pytest.raises(NonFiniteLossError, match='critic'):
        agent.train_iter()
    assert all(torch.equal(a, b) for a, b in zip(before, agent.parameters()))


class CountingRanks(Ranks):
    """One rank, which notes the size of each exchange."""

    def __init__(self):
        super().__init__(0, 1, None, torch.device('cpu'))
        self.sizes = []

    def add_up(self, tensor):
        self.sizes.append(tensor.numel())


class AskingDqn(_Dqn):
    """Its loss asks the other ranks."""

    own_traits = _Dqn.own_traits

    def calc_loss(self, info):
        loss_info = super().calc_loss(info)
        return loss_info._replace(loss=loss_info.loss - context.mean_over_ranks(loss_info.loss.detach().mean()))


def test_a_rank_whose_loss_is_not_finite_asks_the_others_no_more_often_than_they_ask_it():
    """Otherwise its question meets another one of theirs: they hang, or average numbers of different meaning."""
    agent = make_agent(False, algorithm_cls=AskingDqn)
    ranks = CountingRanks()
    context.set_ranks(ranks)
    agent._gradient_averager = GradientAverager(ranks, [p for _, p in agent.what_is_updated()[1]])
    agent.train_iter()
    assert records(agent)
    ranks.sizes.clear()
    agent.train_iter()
    of_an_update = ranks.sizes[:len(ranks.sizes) // 3]
    assert ranks.sizes == 3 * of_an_update and 1 in of_an_update
    ranks.sizes.clear()
    agent._rl_algorithm.factor.fill_(float('nan'))
    with pytest.raises(NonFiniteLossError, match='critic'):
        agent.train_iter()
    assert ranks.sizes == of_an_update
    assert context.get_ranks() is ranks


@pytest.mark.parametrize('algorithm_cls, is_captured', [(AskingDqn, False), (_Dqn, True)])
def test_a_compiled_update_that_asks_other_ranks_is_no_cuda_graph(algorithm_cls, is_captured, monkeypatch):
    captured = []
    monkeypatch.setattr(compiled_update, 'captured', lambda update, *args: captured.append(update) or update)
    agent = make_agent(True, algorithm_cls=algorithm_cls)
    ranks = CountingRanks()
    context.set_ranks(ranks)
    agent._gradient_averager = GradientAverager(ranks, [p for _, p in agent.what_is_updated()[1]])
    agent.train_iter()
    assert records(agent) and bool(captured) == is_captured


def test_a_loaded_checkpoint_is_seen_by_the_record(monkeypatch):
    agent, other = make_agent(False, priority_replay=False), make_agent(False, priority_replay=False)
    for _ in range(3):
        agent.train_iter()
    state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in agent.state_dict().items()}
    results = []
    for trained in (agent, other):
        trained.load_state_dict(state)
        trained._replay_buffer = agent.replay_buffer
        trained._unroll_if_due = lambda: None
        torch.manual_seed(2)
        trained.train_iter()
        results.append([p.detach().clone() for p in trained.parameters()])
    assert records(agent) and all(torch.equal(a, b) for a, b in zip(*results))


def test_an_update_that_looks_at_values_is_made_step_by_step(monkeypatch, caplog):
    """One-hot vectors are made after a look at the integers, whether they are in range."""
    monkeypatch.setattr(recorded_update, '_UPDATES_BEFORE', 1)
    agent, _ = agents.make_agent('ppo', 'nested observation')
    with caplog.at_level('INFO'):
        agent.train_iter()
        agent.train_iter()
    assert not agent._fast_update._is_recordable
    told = [record.message for record in caplog.records if 'step by step' in record.message]
    assert told == ['the update of AgentAlgorithm looks at the values of a tensor, so that its operations cannot be '
                    'recorded; it is made step by step, which takes longer']


class _Keeping(_Dqn):
    """Keeps the rewards of each batch that its Python code sees."""

    own_traits = _Dqn.own_traits

    def calc_loss(self, info):
        if not torch.jit.is_tracing() and hasattr(self, 'kept'):
            self.kept.append((info.reward, info.reward.clone()))
        return super().calc_loss(info)


def test_a_batch_that_an_algorithm_keeps_is_not_overwritten(monkeypatch):
    monkeypatch.setattr(recorded_update, '_UPDATES_BEFORE', 10**6)
    agent = make_agent(False, algorithm_cls=_Keeping, priority_replay=False)
    kept = agent._rl_algorithm.kept = []
    for _ in range(4):
        agent.train_iter()
    assert agent._batch_reader.reader is not None and len(kept) == 12
    assert all(torch.equal(reward, at_that_time) for reward, at_that_time in kept)


class _Shifting(DqnAlgorithm):
    """Trains on other rewards than those that are stored."""

    own_traits = DqnAlgorithm.own_traits

    def preprocess_experience(self, root_inputs, rollout_info, batch_info):
        root_inputs, rollout_info = super().preprocess_experience(root_inputs, rollout_info, batch_info)
        return root_inputs._replace(reward=root_inputs.reward - 1), rollout_info


@pytest.mark.parametrize('priority_replay', [False, True])
@pytest.mark.parametrize('algorithm_cls', [DqnAlgorithm, _Shifting])
def test_samples_read_into_one_memory_give_the_parameters_of_others(algorithm_cls, priority_replay):
    results = []
    for reuses in (True, False):
        agent = make_agent(False, algorithm_cls=algorithm_cls, priority_replay=priority_replay)
        torch.manual_seed(1)
        agent.train_iter()
        if not reuses:
            agent.replay_buffer.reader = lambda *_: None
            agent._batch_reader = None
        for _ in range(4):
            agent.train_iter()
        assert records(agent) and (agent._batch_reader.reader is not None) == (reuses and algorithm_cls is DqnAlgorithm)
        results.append([p.detach().clone() for p in agent.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))
