"""The replay buffer over random histories against plain loops over lists.

The loops compute valid samples and their probabilities, importance weights, episodes, returns and targets of sampled
sequences by definition. Results are compared after every operation on a buffer.
"""
import collections
import io

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from alfx import nest
from alfx.algorithms.td_loss import TDLoss
from alfx.data_structures import StepType, TimeStep
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.tensor_specs import TensorSpec

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
NUM_ENVS = 3
GAMMA, DEFAULT = 0.8, -77.0
SPEC = {
    'time_step': TimeStep(step_type=TensorSpec((), torch.int32), reward=TensorSpec(()), discount=TensorSpec(())),
    'value': TensorSpec((), torch.float64),
}
Info = collections.namedtuple('Info', ['reward', 'step_type', 'discount'])


class Step:
    """One stored step."""

    def __init__(self, position, step_type, reward, discount, value, priority):
        self.position, self.step_type, self.reward, self.discount = position, step_type, reward, discount
        self.value, self.priority = value, priority


class SlowBuffer:
    """A replay buffer as lists of steps, one for each environment."""

    def __init__(self, max_length, ignored):
        self.max_length, self.ignored = max_length, ignored
        self.envs = [[] for _ in range(NUM_ENVS)]
        self.positions = [0] * NUM_ENVS
        self.newest_priority, self.has_updates = 0.5, False

    def add(self, env, step_type, reward, discount, value):
        step = Step(self.positions[env], step_type, reward, discount, value, self.newest_priority)
        self.envs[env] = (self.envs[env] + [step])[-self.max_length:]
        self.positions[env] += 1

    def update_priority(self, cells, priorities):
        highest = max(priorities)
        self.newest_priority = max(highest, self.newest_priority) if self.has_updates else highest
        self.has_updates = True
        for (env, position), priority in zip(cells, priorities):
            for step in self.envs[env]:
                if step.position == position:
                    step.priority = priority

    def sequences(self, length):
        """Return ``{(env, position of the first step): steps}``."""
        found = {}
        for env, steps in enumerate(self.envs):
            steps = steps[self.ignored:]
            for i in range(len(steps) - length + 1):
                found[env, steps[i].position] = steps[i:i + length]
        return found

    def recent(self, length, count):
        """Return the keys of :meth:`sequences` that are among the last ``count`` of their environment."""
        keys = collections.defaultdict(list)
        for key in self.sequences(length):
            keys[key[0]].append(key)
        return [key for env_keys in keys.values() for key in env_keys[-count:]]


def slow_begin(steps, i):
    """Return the index of the first stored step of the episode of ``steps[i]``."""
    while i > 0 and steps[i].step_type != FIRST and steps[i - 1].step_type != LAST:
        i -= 1
    return i


def slow_end(steps, i):
    """Return the index of the last step so far of the episode of ``steps[i]``."""
    while i < len(steps) - 1 and steps[i].step_type != LAST and steps[i + 1].step_type != FIRST:
        i += 1
    return i


def slow_discount_0_begin(steps, i):
    """Return the index of the earliest step whose return includes the reward of ``steps[i]``."""
    begin = slow_begin(steps, i)
    while i > begin:
        i -= 1
        if steps[i].discount == 0:
            break
    return i


def slow_return(steps, i, after_truncation=None):
    """Return the discounted sum of rewards after ``steps[i]``.

    The sum ends at a discount of 0, if the episode has reached it, or at a truncation, if ``after_truncation`` is the
    estimate of the rest.
    """
    if steps[i].step_type == LAST:
        return 0.0 if steps[i].discount == 0 else DEFAULT if after_truncation is None else after_truncation
    total, factor = 0.0, 1.0
    for step in steps[i + 1:slow_end(steps, i) + 1]:
        total += factor * step.reward
        if step.discount == 0:
            return total
        factor *= GAMMA * step.discount
        if step.step_type == LAST and after_truncation is not None:
            return total + factor * after_truncation
    return DEFAULT


def slow_lambda_return(sequence, values, gamma, td_lambda):
    """Return the lambda targets of all steps of a sequence but the last.

    A target is (1 - lambda) times the sum of lambda^(n-1) times the n-step returns, with the remaining weight on the
    longest return. No return extends beyond the end of the episode.
    """
    targets = []
    for t in range(len(sequence) - 1):
        if sequence[t].step_type == LAST:
            targets.append(values[t])
            continue
        total, factor, n_step_returns = 0.0, 1.0, []
        for s in range(t + 1, len(sequence)):
            total += factor * sequence[s].reward
            factor *= gamma * sequence[s].discount
            n_step_returns.append(total + factor * values[s])
            if sequence[s].step_type == LAST:
                break
        n = len(n_step_returns)
        target = td_lambda**(n - 1) * n_step_returns[-1]
        for i in range(n - 1):
            target += (1 - td_lambda) * td_lambda**i * n_step_returns[i]
        targets.append(target)
    return targets


some_envs = st.lists(st.integers(0, NUM_ENVS - 1), min_size=1, max_size=NUM_ENVS, unique=True)
operation = st.one_of(
    st.tuples(st.just('all'), st.booleans()),
    st.tuples(st.just('all'), st.booleans()),
    st.tuples(st.just('some'), some_envs),
    st.tuples(st.just('sequence'), st.integers(1, 17)),
    st.tuples(st.just('sequence'), st.integers(1, 4)),
    st.tuples(st.just('sample'), st.integers(1, 5)),
    st.tuples(st.just('sample'), st.integers(1, 5)),
    st.tuples(st.just('priorities'), st.integers(1, 6)),
    st.tuples(st.just('priorities'), st.integers(1, 6)),
    st.tuples(st.just('clear'), st.one_of(st.none(), some_envs)),
    st.tuples(st.just('drop_all_but'), st.integers(0, 4)),
    st.tuples(st.just('dequeue'), st.tuples(st.integers(1, 3), st.one_of(st.none(), some_envs))),
    st.tuples(st.just('cut off'), some_envs),
    st.tuples(st.just('drop_newest'), some_envs),
    st.tuples(st.just('reload'), st.none()),
)


class Player:
    """A driver that applies the same operations to a buffer and to the lists.

    Args:
        seed: seed of the stored numbers.
        wild: allow any step type to follow any other and discounts of 0 anywhere; otherwise, episodes are as
            environments return them.
    """

    def __init__(self, make_buffer, slow, seed, irregular):
        self.make_buffer, self.buffer, self.slow = make_buffer, make_buffer(), slow
        self.generator, self.wild = np.random.default_rng(seed), irregular
        self.next_is_first = [True] * NUM_ENVS

    def new_steps(self, num_steps, env_ids):
        """Return new steps ``[T, B]`` and add them to the lists."""
        g, shape = self.generator, (num_steps, len(env_ids))
        step_type, reward = g.choice([FIRST, MID, MID, LAST], shape), g.integers(-3, 4, shape).astype(np.float32)
        discount, value = g.choice([0.0, 0.5, 1.0, 1.0], shape), g.normal(size=shape)
        for t in range(num_steps):
            for i, env in enumerate(env_ids):
                if not self.wild:
                    step_type[t, i] = FIRST if self.next_is_first[env] else g.choice([MID, MID, MID, LAST])
                    self.next_is_first[env] = step_type[t, i] == LAST
                    discount[t, i] = g.choice([0.0, 1.0]) if step_type[t, i] == LAST else 1.0
                self.slow.add(env, *(x[t, i].item() for x in (step_type, reward, discount, value)))
        return {
            'time_step': TimeStep(step_type=torch.tensor(step_type, dtype=torch.int32), reward=torch.tensor(reward),
                                  discount=torch.tensor(discount, dtype=torch.float32)),
            'value': torch.tensor(value)
        }

    def play(self, history):
        for name, argument in history:
            getattr(self, name.replace(' ', '_'))(argument)

    def all(self, explicit):
        new = self.new_steps(1, range(NUM_ENVS))
        self.buffer.add_batch(nest.map_structure(lambda x: x[0], new), torch.arange(NUM_ENVS) if explicit else None)

    def some(self, envs):
        self.buffer.add_batch(nest.map_structure(lambda x: x[0], self.new_steps(1, envs)), torch.tensor(envs))

    def sequence(self, num_steps):
        self.buffer.add_sequence(self.new_steps(num_steps, range(NUM_ENVS)))

    def sample(self, length):
        sequences = self.slow.sequences(length)
        if any(steps[0].priority for steps in sequences.values()):
            _, info = self.buffer.get_batch(3, length)
            assert set(zip(info.env_ids.tolist(), info.positions.tolist())) <= set(sequences)

    def priorities(self, count):
        g = self.generator
        env_ids = g.integers(0, NUM_ENVS, count)
        positions = np.array([g.integers(max(self.slow.positions[e] - self.slow.max_length - 2, 0),
                                         self.slow.positions[e] + 2) for e in env_ids])
        values = g.choice([0.0, 0.25, 1.0, 2.0, 1000.0], count)
        if self.buffer.prioritized_sampling:
            self.buffer.update_priority(torch.from_numpy(env_ids), torch.from_numpy(positions),
                                        torch.tensor(values, dtype=torch.float32))
        self.slow.update_priority(list(zip(env_ids.tolist(), positions.tolist())), values.tolist())

    def clear(self, envs):
        self.buffer.clear(None if envs is None else torch.tensor(envs))
        for env in range(NUM_ENVS) if envs is None else envs:
            self.slow.envs[env] = []
        if envs is None:
            self.slow.positions = [max(self.slow.positions)] * NUM_ENVS

    def drop_all_but(self, keep):
        sizes = {len(steps) for steps in self.slow.envs}
        if len(sizes) > 1 or not max(sizes) or len(set(self.slow.positions)) > 1:
            with pytest.raises(ValueError, match='drop_all_but'):
                self.buffer.drop_all_but(keep)
            return
        remaining = self.buffer.drop_all_but(keep)
        self.slow.envs = [steps[:-1][max(len(steps) - 1 - keep, 0):] for steps in self.slow.envs]
        self.slow.positions = [position - 1 for position in self.slow.positions]
        assert {len(steps) for steps in self.slow.envs} == {remaining}

    def dequeue(self, arguments):
        count, envs = arguments
        env_ids = None if envs is None else torch.tensor(envs)
        chosen = range(NUM_ENVS) if envs is None else envs
        if any(len(self.slow.envs[env]) < count for env in chosen):
            with pytest.raises(ValueError, match=f'dequeue: expected at least {count}'):
                self.buffer.dequeue(count, env_ids)
            return
        batch, info = self.buffer.dequeue(count, env_ids)
        removed = [self.slow.envs[env][:count] for env in chosen]
        for env in chosen:
            self.slow.envs[env] = self.slow.envs[env][count:]
        assert info.env_ids.tolist() == list(chosen)
        assert info.positions.tolist() == [steps[0].position for steps in removed]
        assert batch['value'].tolist() == [[step.value for step in steps] for steps in removed]

    def cut_off(self, envs):
        envs = [env for env in envs if self.slow.envs[env]]
        if not envs:
            return
        positions = torch.tensor([self.slow.positions[env] - 1 for env in envs])
        self.buffer.set_field('time_step.step_type', torch.tensor(envs), positions,
                              torch.full((len(envs), ), LAST, dtype=torch.int32))
        for env in envs:
            self.slow.envs[env][-1].step_type = LAST

    def drop_newest(self, envs):
        if not all(self.slow.envs[env] for env in envs):
            with pytest.raises(ValueError, match='drop_newest: expected positions in the buffer'):
                self.buffer.drop_newest(torch.tensor(envs))
            return
        self.buffer.drop_newest(torch.tensor(envs))
        for env in envs:
            self.next_is_first[env] = self.slow.envs[env].pop().step_type == FIRST
            self.slow.positions[env] -= 1

    def reload(self, _):
        state = io.BytesIO()
        torch.save(self.buffer.state_dict(), state)
        state.seek(0)
        self.buffer = self.make_buffer()
        self.buffer.load_state_dict(torch.load(state, weights_only=True))


def make_player(max_length, ignored, seed, irregular=True, **kwargs):
    ignored = min(ignored, max_length - 1)

    def make_buffer():
        return ReplayBuffer(SPEC, NUM_ENVS, max_length, ignored, enable_checkpoint=True, **kwargs)

    return Player(make_buffer, SlowBuffer(max_length, ignored), seed, irregular)


histories = st.lists(operation, max_size=14)
sizes = st.tuples(st.integers(1, 7), st.integers(0, 2))


@settings(max_examples=500)
@given(histories, sizes, st.integers(0, 2**32), st.integers(1, 4), st.booleans())
def test_sequences_are_sampled_in_proportion_to_their_priorities(history, size, seed, length, with_replacement):
    player = make_player(*size, seed, prioritized_sampling=True, initial_priority=0.5,
                         with_replacement=with_replacement)
    player.play(history)
    sequences = player.slow.sequences(length)
    total = sum(steps[0].priority for steps in sequences.values())
    if total == 0:
        with pytest.raises(ValueError, match='priorities of all' if sequences else 'at least'):
            player.buffer.get_batch(1, length)
        return
    count = 8 if with_replacement else 400
    batch, info = player.buffer.get_batch(count, length)
    found = collections.Counter()
    for key, values, weight in zip(zip(info.env_ids.tolist(), info.positions.tolist()), batch['value'].tolist(),
                                   info.importance_weights.tolist()):
        steps = sequences[key]
        assert values == [step.value for step in steps]
        assert steps[0].priority > 0
        assert weight == pytest.approx(len(sequences) * steps[0].priority / total, rel=1e-6)
        found[key] += 1
    if not with_replacement:  # stratified: one draw from each stratum that overlaps a sequence
        for key, steps in sequences.items():
            assert abs(found[key] - count * steps[0].priority / total) < 2


@settings(max_examples=400)
@given(histories, sizes, st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 4))
def test_importance_weights_account_for_recent_steps(history, size, seed, length, recent_steps):
    player = make_player(*size, seed, prioritized_sampling=True, initial_priority=0.5, recent_data_ratio=0.25,
                         recent_data_steps=recent_steps)
    player.play([step for step in history if step[0] != 'sample'])
    sequences = player.slow.sequences(length)
    total = sum(steps[0].priority for steps in sequences.values())
    if total == 0:
        return
    recent = player.slow.recent(length, recent_steps)
    _, info = player.buffer.get_batch(16, length)
    keys = list(zip(info.env_ids.tolist(), info.positions.tolist()))
    assert set(keys[12:]) <= set(recent)
    for key, weight in zip(keys, info.importance_weights.tolist()):
        expected = 0.75 * sequences[key][0].priority / total + 0.25 * (key in recent) / len(recent)
        assert weight == pytest.approx(len(sequences) * expected, rel=1e-6)


@settings(max_examples=60)
@given(histories, sizes, st.integers(0, 2**32), st.integers(1, 4))
def test_a_buffer_in_shared_memory_does_the_same(history, size, seed, length):
    players = [make_player(*size, seed, prioritized_sampling=True, record_episodic_return=True, initial_priority=0.5,
                           allow_multiprocess=shared) for shared in (False, True)]
    batches = []
    for player in players:
        torch.manual_seed(0)
        player.play(history)
        if any(steps[0].priority for steps in player.slow.sequences(length).values()):
            batch, info = player.buffer.get_batch(16, length)
            batches.append((info.env_ids.tolist(), info.positions.tolist(), info.importance_weights.tolist(),
                            info.discounted_return.tolist(), batch['value'].tolist(),
                            player.buffer.steps_to_episode_end(info.positions, info.env_ids).tolist()))
    assert batches[:1] == batches[1:]


@settings(max_examples=600)
@given(histories, sizes, st.integers(0, 2**32), st.integers(1, 4))
def test_uniform_sampling_takes_each_sequence_once_before_any_comes_again(history, size, seed, length):
    player = make_player(*size, seed)
    player.play([step for step in history if step[0] not in ('sample', 'priorities')])
    sequences = player.slow.sequences(length)
    if not sequences:
        with pytest.raises(ValueError, match='at least'):
            player.buffer.get_batch(1, length)
        return
    batch, info = player.buffer.get_batch(len(sequences), length)
    assert info.importance_weights == ()
    found = dict(zip(zip(info.env_ids.tolist(), info.positions.tolist()), batch['value'].tolist()))
    assert found == {key: [step.value for step in steps] for key, steps in sequences.items()}


@settings(max_examples=500)
@example([('sequence', 3), ('all', True), ('drop_all_but', 4), ('all', True)], (7, 0), 0, True, None)
@given(histories, sizes, st.integers(0, 2**32), st.booleans(), st.sampled_from([None, 7.0]))
def test_episodes_and_returns_match_a_walk_along_the_steps(history, size, seed, irregular, after_truncation):
    player = make_player(*size, seed, irregular, record_episodic_return=True, gamma=GAMMA, default_return=DEFAULT,
                         return_after_truncation=after_truncation)
    player.play(history)
    buffer = player.buffer
    stored = [(env, i) for env, steps in enumerate(player.slow.envs) for i in range(len(steps))]
    if not stored:
        return
    env_steps = [player.slow.envs[env] for env, _ in stored]
    env_ids = torch.tensor([env for env, _ in stored])
    positions = torch.tensor([steps[i].position for steps, (_, i) in zip(env_steps, stored)])

    def expected(function):
        return [steps[function(steps, i)].position for steps, (_, i) in zip(env_steps, stored)]

    assert buffer.get_episode_begin_position(positions, env_ids).tolist() == expected(slow_begin)
    assert (positions + buffer.steps_to_episode_end(positions, env_ids)).tolist() == expected(slow_end)
    assert buffer.get_disc_0_begin_position(positions, env_ids).tolist() == expected(slow_discount_0_begin)
    sequences = player.slow.sequences(2)
    if sequences:
        _, info = buffer.get_batch(len(sequences), 2)
        for env, position, found in zip(info.env_ids.tolist(), info.positions.tolist(),
                                        info.discounted_return.tolist()):
            steps = player.slow.envs[env]
            i = position - steps[0].position
            assert found == pytest.approx([slow_return(steps, j, after_truncation) for j in (i, i + 1)], rel=1e-5,
                                          abs=1e-5)
    lengths = {len(steps) for steps in player.slow.envs}
    if len(lengths) == 1:
        batch, info = buffer.gather_all()
        assert batch['value'].tolist() == [[step.value for step in steps] for steps in player.slow.envs]
        returns = [[slow_return(steps, i, after_truncation) for i in range(len(steps))]
                   for steps in player.slow.envs]
        assert info.discounted_return.tolist() == [pytest.approx(x, rel=1e-5, abs=1e-5) for x in returns]


@settings(max_examples=300)
@given(histories, sizes, st.integers(0, 2**32), st.integers(2, 5), st.sampled_from([0.0, 0.7, 1.0]), st.booleans())
def test_targets_of_sampled_sequences_stop_at_the_ends_of_episodes(history, size, seed, length, td_lambda, irregular):
    player = make_player(*size, seed, irregular, prioritized_sampling=True, initial_priority=0.5)
    player.play(history)
    sequences = player.slow.sequences(length)
    if not any(steps[0].priority for steps in sequences.values()):
        return
    batch, info = player.buffer.get_batch(4, length)
    time_step = nest.map_structure(lambda x: x.T, batch['time_step'])
    info_of_loss = Info(time_step.reward.double(), time_step.step_type, time_step.discount.double())
    targets = TDLoss(gamma=0.9, td_lambda=td_lambda).compute_td_target(info_of_loss, batch['value'].T)
    for i, key in enumerate(zip(info.env_ids.tolist(), info.positions.tolist())):
        values = [step.value for step in sequences[key]]
        assert targets[:, i].tolist() == pytest.approx(slow_lambda_return(sequences[key], values, 0.9, td_lambda))


def example_buffer(last_discount):
    """Store an episode with rewards 1, 2, 4 that ends at the third, and the first steps of another episode."""
    buffer = ReplayBuffer(SPEC, 1, 8, record_episodic_return=True, gamma=0.5, default_return=-9.0)
    columns = ([FIRST, MID, MID, LAST, FIRST, MID], [0.0, 1.0, 2.0, 4.0, 0.0, 32.0],
               [1.0, 1.0, 1.0, last_discount, 1.0, 1.0], [10.0, 20.0, 30.0, 40.0, 50.0, 60.0])
    step_type, reward, discount, value = (torch.tensor(column).unsqueeze(-1) for column in columns)
    buffer.add_sequence({
        'time_step': TimeStep(step_type=step_type.int(), reward=reward, discount=discount),
        'value': value.double()
    })
    return buffer


def test_returns_and_targets_worked_out_by_hand():
    # Terminated: 1 + 2/2 + 4/4 = 3, 2 + 4/2 = 4, 4, and nothing after the end. The second episode has not ended.
    batch, info = example_buffer(0.0).gather_all()
    assert info.discounted_return.tolist() == [[3.0, 4.0, 4.0, 0.0, -9.0, -9.0]]
    loss = TDLoss(gamma=0.5, td_lambda=1.0)
    time_step = nest.map_structure(lambda x: x.T, batch['time_step'])
    targets = loss.compute_td_target(time_step, batch['value'].T.float())
    # The next episode: 32 + 60 / 2 = 62. The target of a LAST step is its value.
    assert targets[:, 0].tolist() == [3.0, 4.0, 4.0, 40.0, 62.0]
    # Truncated: returns are unknown, targets bootstrap: 4 + 40 / 2 = 24, 2 + 24 / 2 = 14, 1 + 14 / 2 = 8.
    batch, info = example_buffer(1.0).gather_all()
    assert info.discounted_return.tolist() == [[-9.0] * 6]
    time_step = nest.map_structure(lambda x: x.T, batch['time_step'])
    targets = loss.compute_td_target(time_step, batch['value'].T.float())
    assert targets[:, 0].tolist() == [8.0, 14.0, 24.0, 40.0, 62.0]
