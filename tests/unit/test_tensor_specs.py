"""Specs: what is written of them, and what they make of it."""
import pytest
import torch

from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec


@pytest.mark.parametrize('name', ['int64', 'torch.int64'])
def test_a_dtype_may_be_given_by_its_name(name):
    assert TensorSpec((3, ), name) == TensorSpec((3, ), torch.int64)
    assert BoundedTensorSpec((), name, 0, 4) == BoundedTensorSpec((), torch.int64, 0, 4)
    assert BoundedTensorSpec((), name, 0, 4).sample((2, )).dtype == torch.int64
    assert TensorSpec((3, )).replace(dtype=name).dtype == torch.int64


def test_a_name_of_no_dtype_is_refused_with_those_there_are():
    with pytest.raises(SpecError, match="unsupported dtype 'integer'; supported: .*'int64'"):
        TensorSpec((), 'integer')
