"""MERLIN against its formulas, written with loops over samples, slots and time."""
import math
from functools import partial

import pytest
import torch

from alfx import nest
from alfx.algorithms.agent import Agent
from alfx.algorithms.config import TrainerConfig
from alfx.algorithms.merlin_algorithm import MBPState, MerlinAlgorithm
from alfx.environments import suite_memory
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.memory import UsageMemoryState
from alfx.tensor_specs import BoundedTensorSpec, TensorSpec, zeros_from_spec
from alfx.utils.math_ops import identity

LATENT, LSTM, SLOTS, KEYS, ACTIONS = 2, 3, 4, 3, 3
VECTOR, ACTION = TensorSpec((5, )), BoundedTensorSpec((), torch.int64, 0, ACTIONS - 1)


def decoder(input_tensor_spec, output_tensor_spec):
    return EncodingNetwork(input_tensor_spec, output_tensor_spec, last_layer_size=output_tensor_spec.numel,
                           last_activation=identity)


merlin_of = partial(MerlinAlgorithm, encoders=partial(EncodingNetwork, fc_layer_params=(4, )), decoders=decoder,
                    latent_dim=LATENT, lstm_size=LSTM, memory_size=SLOTS)


def dense(network, x):
    """Hidden layers of tanh and a last layer, if it has no activation, of a chain of fully connected layers."""
    *hidden, last = network._chain
    for layer in hidden:
        x = torch.tanh(layer.weight @ x + layer.bias)
    return last.weight @ x + last.bias


def lstm(cell, x, state):
    """Compute an LSTM for one sample; gates are in torch's order: input, forget, candidate, output."""
    h, c = state
    gates = cell.weight_ih @ x + cell.bias_ih + cell.weight_hh @ h + cell.bias_hh
    i, f, g, o = gates.view(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, (h, c)


def read(key_net, query, slots, usage):
    """Readout of one sample by all keys, and the usage after it."""
    out = (key_net.weight @ query + key_net.bias).view(-1, LATENT + 1)
    found, used = [], list(usage)
    for row in out:
        key, strength = row[:-1], math.log(1 + math.exp(float(row[-1])))
        scores = []
        for slot, u in zip(slots, usage):
            cosine = float(key @ slot) / max(float(key.norm() * slot.norm()), 1e-12)
            scores.append(math.exp(strength * cosine) if u > 0 else 0.0)
        total = sum(scores)
        weights = [s / total if total else 0.0 for s in scores]
        found.append(sum(w * slot for w, slot in zip(weights, slots)))
        used = [u + w for u, w in zip(used, weights)]
    return torch.cat(found), used


def write(slots, usage, content):
    least = usage.index(min(usage))
    usage = [u * (1 - 1 / len(usage)) for u in usage]
    slots, usage[least] = [content if i == least else slot for i, slot in enumerate(slots)], 1.0
    return slots, usage


def slow_predictor(mbp, observation, action, state, noise):
    """Latent, loss, terms of the loss, and next state of one sample."""
    vae = mbp._vae
    one_hot = torch.eye(ACTIONS)[int(action)]
    slots, usage = list(state.memory.memory), state.memory.usage.tolist()
    x = torch.cat([state.latent_vector, one_hot, state.mem_readout])
    h, rnn_state = lstm(mbp._rnn._cell_list[0]._cell, x, state.rnn_state[0])
    readout, usage = read(mbp._key_net, h, slots, usage)
    prior = dense(vae._prior, torch.cat([h, readout]))
    layer, = mbp._encoder._chain
    encoded = torch.relu(layer.weight @ observation + layer.bias)
    hidden = torch.cat([h, readout, encoded, prior])
    for layer in vae._encoder._chain:
        hidden = torch.tanh(layer.weight @ hidden + layer.bias)
    posterior = vae._mean_and_log_var.weight @ hidden + vae._mean_and_log_var.bias + prior
    z, kld = [], 0.0
    for i in range(LATENT):
        mean, log_var = float(posterior[i]), float(posterior[LATENT + i])
        prior_mean, prior_log_var = float(prior[i]), float(prior[LATENT + i])
        kld += 0.5 * (math.exp(log_var - prior_log_var) + (mean - prior_mean)**2 / math.exp(prior_log_var) - 1
                      - (log_var - prior_log_var))
        z.append(mean + math.exp(0.5 * log_var) * float(noise[i]))
    z = torch.tensor(z)
    slots, usage = write(slots, usage, z)
    error = sum((float(d) - float(o))**2 for d, o in zip(dense(mbp._decoders[0]._decoder, z), observation))
    memory = UsageMemoryState(torch.stack(slots), torch.tensor(usage))
    return z, kld + error, (kld, error), MBPState(z, readout, (rnn_state, ), memory)


def slow_actor(mba, z, lstm_state, memory):
    """Logits, value and usage after the read, of one sample."""
    g, _ = lstm(mba._rnn._cell_list[0]._cell, z, lstm_state[0])
    found, usage = read(mba._key_net, g, list(memory.memory), memory.usage.tolist())
    seen = torch.cat([z, g, found])
    hidden, = mba._actor_network._encoding_net._chain
    head = mba._actor_network._projection_net._projection_layer
    logits = head.weight @ torch.tanh(hidden.weight @ seen + hidden.bias) + head.bias
    layers = [m for m in mba._value_network.modules() if type(m).__name__ == 'FC']
    value = layers[1].weight @ torch.tanh(layers[0].weight @ seen + layers[0].bias) + layers[1].bias
    return logits, value.view(()), torch.tensor(usage)


def sample_of(nested, b):
    return nest.map_structure(lambda x: x[b], nested)


def forgotten(b, x):
    return torch.cat([x[:b], torch.zeros_like(x[:1]), x[b + 1:]])


def randomized(merlin):
    """Draw parameters of about unit size, so that every term matters."""
    with torch.no_grad():
        for p in merlin.parameters():
            p.copy_(torch.randn_like(p) * 0.6)
    return merlin


@torch.no_grad()
def test_steps_match_loops_over_samples_slots_and_time():
    batch = 2
    merlin = randomized(merlin_of(VECTOR, ACTION))
    mbp, mba = merlin._mbp, merlin._mba
    state = zeros_from_spec(merlin.train_state_spec, batch)
    env = suite_memory.load('TMaze', batch_size=batch)
    step = env.reset()
    for t in range(SLOTS + 3):
        step = step._replace(observation=torch.randn(batch, 5), prev_action=torch.randint(ACTIONS, (batch, )))
        torch.manual_seed(t)
        noise = torch.randn(batch, LATENT)
        torch.manual_seed(t)
        result = merlin.rollout_step(step, state)
        for b in range(batch):
            own = sample_of(state, b)
            z, loss, (kld, error), after = slow_predictor(mbp, step.observation[b], step.prev_action[b], own.mbp_state,
                                                          noise[b])
            found = sample_of(result.info.mbp_info, b)
            assert found.loss.item() == pytest.approx(loss, rel=1e-4)
            assert found.extra.vae.kld.item() == pytest.approx(kld, rel=1e-4)
            assert found.extra.decoder.item() == pytest.approx(error, rel=1e-4)
            logits, value, usage = slow_actor(mba, z, own.mba_state, after.memory)
            after = after._replace(memory=after.memory._replace(usage=usage))
            close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)
            nest.map_structure(close, sample_of(result.state.mbp_state, b), after)
            actor = sample_of(result.info.mba_info, b)
            close(actor.action_distribution.logits.log_softmax(-1), logits.log_softmax(-1))
            close(actor.value, value)
        state = result.state


def test_with_weights_of_zero_the_loss_is_the_size_of_the_observation():
    # prior and posterior are standard normal: no divergence; what is decoded is 0: the error is 1 + 4 + 9
    merlin = merlin_of(TensorSpec((3, )), ACTION)
    for p in merlin.parameters():
        torch.nn.init.zeros_(p)
    mbp = merlin._mbp
    state = zeros_from_spec(mbp.train_state_spec, 1)
    observation = torch.tensor([[1.0, 2.0, 3.0]])
    torch.manual_seed(0)
    step = mbp.train_step((observation, torch.zeros(1, dtype=torch.int64)), state)
    torch.manual_seed(0)
    torch.testing.assert_close(step.output, torch.randn(1, LATENT))
    assert step.info.loss.tolist() == [14.0] and step.info.extra.vae.kld.tolist() == [0.0]
    # every key of zeros finds the mean of what was written: after two steps the mean of two latents
    second = mbp.train_step((observation, torch.zeros(1, dtype=torch.int64)), step.state)
    torch.testing.assert_close(second.state.mem_readout, step.output.repeat(1, KEYS))
    third = mbp.train_step((observation, torch.zeros(1, dtype=torch.int64)), second.state)
    torch.testing.assert_close(third.state.mem_readout, ((step.output + second.output) / 2).repeat(1, KEYS))


def test_an_unroll_is_a_loop_that_resets_at_first_steps():
    torch.manual_seed(0)
    env = suite_memory.load('TMaze', batch_size=3, env_args={'length': 1, 'num_steps': 3})
    env.seed(0)
    env.reset()
    config = TrainerConfig(root_dir='', algorithm_ctor=Agent, unroll_length=9)
    merlin = merlin_of(env.observation_spec(), env.action_spec(), env=env, config=config)
    randomized(merlin)
    torch.manual_seed(5)
    experience = merlin.unroll(9)
    steps = experience.time_step
    assert steps.is_last().sum() > 3 and steps.is_first()[1:].sum() > 3
    torch.manual_seed(5)
    state, losses, values = zeros_from_spec(merlin.train_state_spec, 3), [], []
    for t in range(10):
        now = sample_of(steps, t)
        for b in now.is_first().nonzero().flatten().tolist():
            state = nest.map_structure(partial(forgotten, b), state)
        result = merlin.rollout_step(now, state)
        assert torch.equal(result.output, experience.action[t])
        state = result.state
        losses.append(result.info.mbp_info.loss)
        values.append(result.info.mba_info.value)
    found = experience.rollout_info
    torch.testing.assert_close(found.mbp_info.loss, torch.stack(losses))
    torch.testing.assert_close(found.mba_info.value, torch.stack(values))
    # and so are the gradients through time
    names, parameters = zip(*merlin.named_parameters())
    expected, actual = (torch.autograd.grad(loss.sum() + value.sum(), parameters, allow_unused=True)
                        for loss, value in ((torch.stack(losses), torch.stack(values)),
                                            (found.mbp_info.loss, found.mba_info.value)))
    for name, a, b in zip(names, expected, actual):
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


