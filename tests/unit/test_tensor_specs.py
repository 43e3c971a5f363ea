"""Specs: names of dtypes, specs in confs, and zeros within their bounds."""
import math

import gin
import pytest
import torch

from alfx import gin_utils
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec


@pytest.mark.parametrize('name', ['int64', 'torch.int64'])
def test_a_dtype_can_be_specified_by_its_name(name):
    assert TensorSpec((3, ), name) == TensorSpec((3, ), torch.int64)
    assert BoundedTensorSpec((), name, 0, 4) == BoundedTensorSpec((), torch.int64, 0, 4)
    assert BoundedTensorSpec((), name, 0, 4).sample((2, )).dtype == torch.int64
    assert TensorSpec((3, )).replace(dtype=name).dtype == torch.int64


def test_an_unknown_dtype_name_raises_with_the_known_ones():
    with pytest.raises(SpecError, match="unsupported dtype 'integer'; supported: .*'int64'"):
        TensorSpec((), 'integer')


def test_a_conf_makes_specs(tmp_path):
    conf = tmp_path / 'specs.gin'
    conf.write_text("""
        EncodingNetwork.input_tensor_spec = @TensorSpec()
        TensorSpec.shape = (3,)
        BoundedTensorSpec.shape = ()
        BoundedTensorSpec.dtype = 'int64'
        BoundedTensorSpec.maximum = 4
        ValueNetwork.input_tensor_spec = @alfx.tensor_specs.BoundedTensorSpec()
        DIAYNAlgorithm.skill_spec = @create_discrete_skill_spec()
        create_discrete_skill_spec.num_of_skills = 5
    """)
    from alfx.algorithms.diayn_algorithm import create_discrete_skill_spec
    from alfx.networks.encoding_networks import EncodingNetwork
    with gin_utils.loaded(str(conf)):
        assert EncodingNetwork().input_tensor_spec == TensorSpec((3, ))
        bounded = gin.query_parameter('ValueNetwork.input_tensor_spec').configurable.wrapper()
        assert bounded == create_discrete_skill_spec() == BoundedTensorSpec((), torch.int64, 0, 4)


@pytest.mark.parametrize('spec, nearest', [
    (TensorSpec((2, )), [0, 0]), (BoundedTensorSpec((2, ), torch.float32, -1, 1), [0, 0]),
    (BoundedTensorSpec((2, ), torch.int64, [3, -9], [4, -5]), [3, -5]),
    (BoundedTensorSpec((2, ), torch.uint8, 1, 255), [1, 1]), (BoundedTensorSpec((2, ), torch.bool, 0, 1), [0, 0])])
def test_nearest_zeros_lie_within_the_bounds(spec, nearest):
    found = spec.nearest_zeros((3, ))
    assert found.dtype == spec.dtype and found.tolist() == [nearest] * 3
    found[0] = found[1]  # it can be written to


@pytest.mark.parametrize('dtype, low, high, message', [
    ('float32', math.nan, 1.0, 'a bound is NaN'), ('float32', 0.0, math.nan, 'a bound is NaN'),
    ('int64', 0.5, 3, r'minimum: expected numbers of type .*int64, found 0.5'),
    ('uint8', -1, 3, r'minimum: expected numbers of type .*uint8, found -1'),
    ('int8', 0, [1, 200], r'maximum: expected numbers of type .*int8')])
def test_bounds_that_the_dtype_does_not_have_are_rejected(dtype, low, high, message):
    with pytest.raises(SpecError, match=message):
        BoundedTensorSpec((2, ), dtype, low, high)


def test_samples_between_wide_bounds_are_finite():
    sample = BoundedTensorSpec.from_spec(TensorSpec((100, ))).sample()
    assert sample.isfinite().all() and sample.max() > 1e38
