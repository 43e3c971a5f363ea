"""Ornstein-Uhlenbeck noise."""
import pytest
import torch

from alfx import nest
from alfx.networks.ou_process import OUProcess
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec

NESTED = {'a': BoundedTensorSpec((2, ), torch.float32, -1.0, 1.0), 'b': BoundedTensorSpec(())}


def test_the_noise_is_the_next_state_and_has_the_structure_of_the_spec():
    process = OUProcess(NESTED)
    assert process.state_spec == {'a': TensorSpec((2, )), 'b': TensorSpec(())}
    state = {'a': torch.zeros(3, 2), 'b': torch.zeros(3)}
    noise, new_state = process(state)
    nest.assert_same_structure(noise, state)
    assert noise['a'].shape == (3, 2) and noise['b'].shape == (3, )
    assert all(x is y for x, y in zip(nest.flatten(noise), nest.flatten(new_state)))
    assert not state['a'].any()


def test_it_decays_by_the_damping_without_noise():
    process = OUProcess(TensorSpec(()), damping=0.25, stddev=0.0)
    state = torch.tensor([1.0, -2.0])
    for _ in range(2):
        _, state = process(state)
    torch.testing.assert_close(state, torch.tensor([0.5625, -1.125]))  # 0.75^2


def test_its_standard_deviation_and_correlation_are_those_in_closed_form():
    torch.manual_seed(0)
    process, state, history = OUProcess(TensorSpec(()), damping=0.15, stddev=0.2), torch.zeros(20000), []
    for _ in range(60):
        _, state = process(state)
        history.append(state)
    assert history[0].std().item() == pytest.approx(0.2, rel=0.03)
    # 0.2 / sqrt(1 - 0.85^2) = 0.3797
    assert history[-1].std().item() == pytest.approx(0.3797, rel=0.03)
    correlation = torch.corrcoef(torch.stack([history[-3], history[-1]]))[0, 1]
    assert correlation.item() == pytest.approx(0.85**2, abs=0.03)


def test_bad_arguments_are_rejected_by_name():
    with pytest.raises(ValueError, match=r'damping must be a number in \[0, 1\]'):
        OUProcess(TensorSpec(()), damping=1.5)
    with pytest.raises(ValueError, match='stddev must be a number >= 0'):
        OUProcess(TensorSpec(()), stddev=-0.1)
    with pytest.raises(SpecError, match='continuous actions.*int64'):
        OUProcess({'a': TensorSpec((), torch.int64)})
