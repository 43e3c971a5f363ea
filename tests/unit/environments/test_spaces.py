"""Specs of gymnasium spaces, and conversion between numpy and tensors."""
import enum

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from alfx import nest
from alfx.environments.environment_errors import UnsupportedSpaceError
from alfx.environments.spaces import (ActionCodec, ObservationCodec, action_spec_from_gym_space, flatten_sample,
                                      tensor_spec_from_gym_space, unflatten_sample)
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec

INF = np.inf


@pytest.mark.parametrize('space, spec', [
    (spaces.Discrete(4), BoundedTensorSpec((), torch.int64, 0, 3)),
    (spaces.Discrete(4, start=-2), BoundedTensorSpec((), torch.int64, -2, 1)),
    (spaces.MultiDiscrete([3, 3]), BoundedTensorSpec((2, ), torch.int64, 0, 2)),
    (spaces.MultiDiscrete([2, 5], start=[1, 3]), BoundedTensorSpec((2, ), torch.int64, [1, 3], [2, 7])),
    (spaces.MultiDiscrete(np.full((2, 3), 4)), BoundedTensorSpec((2, 3), torch.int64, 0, 3)),
    (spaces.MultiBinary(5), BoundedTensorSpec((5, ), torch.int8, 0, 1)),
    (spaces.MultiBinary((2, 2)), BoundedTensorSpec((2, 2), torch.int8, 0, 1)),
    (spaces.Box(0, 255, (2, 2, 3), np.uint8), BoundedTensorSpec((2, 2, 3), torch.uint8, 0, 255)),
    (spaces.Box(-1, 2, (3, ), np.float32), BoundedTensorSpec((3, ), torch.float32, -1, 2)),
    (spaces.Box(-1, 2, (), np.float64), BoundedTensorSpec((), torch.float32, -1, 2)),
    (spaces.Box(np.array([0., -1.]), np.array([1., 1.]), dtype=np.float64),
     BoundedTensorSpec((2, ), torch.float32, [0, -1], [1, 1])),
    (spaces.Box(-INF, INF, (3, ), np.float64), TensorSpec((3, ))),
    (spaces.Box(np.array([-INF, 0.]), np.array([INF, 1.]), dtype=np.float64), TensorSpec((2, ))),
    (spaces.Box(-1e308, 1e308, (2, ), np.float64), TensorSpec((2, ))),
    (spaces.Box(-3.5e38, 0, (2, ), np.float64), TensorSpec((2, ))),
    (spaces.Box(0, 1, (0, ), np.float32), BoundedTensorSpec((0, ), torch.float32, 0, 1)),
    (spaces.Box(0, 255, (3, 0), np.uint8), BoundedTensorSpec((3, 0), torch.uint8, 0, 1)),
    (spaces.Box(0, 60000, (2, ), np.uint16), BoundedTensorSpec((2, ), torch.int32, 0, 60000)),
    (spaces.Box(0, 4_000_000_000, (2, ), np.uint32), BoundedTensorSpec((2, ), torch.int64, 0, 4_000_000_000)),
    (spaces.Box(0, 7, (2, ), np.uint64), BoundedTensorSpec((2, ), torch.int64, 0, 7)),
    (spaces.Box(0, 1, (2, ), np.bool_), BoundedTensorSpec((2, ), torch.uint8, 0, 1)),
    (spaces.Box(-5, 5, (2, ), np.int16), BoundedTensorSpec((2, ), torch.int16, -5, 5)),
    (spaces.Dict({}), {}),
    (spaces.Tuple([spaces.Discrete(2), spaces.Dict({'b': spaces.Discrete(3), 'a': spaces.MultiBinary(1)})]),
     (BoundedTensorSpec((), torch.int64, 0, 1), {'a': BoundedTensorSpec((1, ), torch.int8, 0, 1),
                                                'b': BoundedTensorSpec((), torch.int64, 0, 2)})),
])
def test_each_kind_of_space_has_its_spec(space, spec):
    assert tensor_spec_from_gym_space(space) == spec


def test_bounds_stay_arrays_and_floats_can_keep_their_size():
    spec = tensor_spec_from_gym_space(spaces.Box(-1, 1, (2, ), np.float64), simplify_box_bounds=False,
                                      float_dtype=np.float64)
    assert spec.dtype == torch.float64 and spec.minimum.shape == (2, )


@pytest.mark.parametrize('space, location, remedy', [
    (spaces.Text(5), 'observation: Text', 'drop the field'),
    (spaces.Dict({'a': spaces.Tuple([spaces.Discrete(2), spaces.Text(5)])}), r"observation\['a'\]\[1\]: Text",
     'wrapper'),
    (spaces.Tuple([spaces.Sequence(spaces.Discrete(2))]), r'observation\[0\]: Sequence', 'pad it'),
    (spaces.Graph(spaces.Discrete(2), None), 'observation: Graph', 'fixed size'),
    (spaces.OneOf([spaces.Discrete(2)]), 'observation: OneOf', 'Dict of Discrete'),
    (spaces.Box(0, 2**64 - 1, (1, ), np.uint64), 'observation: the bounds', 'smaller'),
])
def test_other_spaces_are_rejected_with_their_place_and_a_remedy(space, location, remedy):
    with pytest.raises(UnsupportedSpaceError, match=location) as error:
        tensor_spec_from_gym_space(space, where='observation')
    assert remedy in str(error.value)


class TestActions:

    def test_integers_are_always_int64(self):
        space = spaces.Dict({'a': spaces.MultiBinary(2), 'b': spaces.Box(0, 9, (2, ), np.uint8)})
        assert action_spec_from_gym_space(space) == {'a': BoundedTensorSpec((2, ), torch.int64, 0, 1),
                                                     'b': BoundedTensorSpec((2, ), torch.int64, 0, 9)}

    def test_bounds_become_minus_one_and_one_on_request(self):
        space = spaces.Tuple([spaces.Box(0, 4, (2, )), spaces.Box(-INF, INF, (1, )), spaces.Discrete(2)])
        assert action_spec_from_gym_space(space, normalize=True) == (
            BoundedTensorSpec((2, ), torch.float32, -1, 1), TensorSpec((1, )), BoundedTensorSpec((), torch.int64, 0, 1))

    @pytest.mark.parametrize('space', [spaces.Dict({}), spaces.Tuple(()), spaces.Box(-1, 1, (0, )),
                                       spaces.Dict({'a': spaces.Box(-1, 1, (2, 0))})])
    def test_actions_without_components_are_rejected(self, space):
        with pytest.raises(UnsupportedSpaceError, match='action: .* has no components'):
            action_spec_from_gym_space(space)

    def test_partly_bounded_actions_are_rejected_with_the_wrapper_that_helps(self):
        space = spaces.Dict({'force': spaces.Box(np.array([-INF, 0.]), np.array([INF, 1.]), dtype=np.float64)})
        with pytest.raises(UnsupportedSpaceError, match=r"action\['force'\].*all finite or all infinite"
                                                        '[^;]*; add @ContinuousActionClip to gym_env_wrappers'):
            action_spec_from_gym_space(space)

    @pytest.mark.parametrize('normalize', [True, False])
    def test_a_box_without_dimensions_is_a_number(self, normalize):
        """Bounds -2 and 1: 0.5 -> -0.5 + 1.5 * 0.5 = 0.25, and 3 is clipped to 1."""
        codec = ActionCodec(spaces.Box(-2, 1, (), np.float32), 2, normalize, clip=True)
        encoded, _ = codec.encode(torch.tensor([0.5, 3.]))
        assert encoded.dtype == np.float32 and encoded.tolist() == [0.25 if normalize else 0.5, 1.]
        assert codec.spec == BoundedTensorSpec((), torch.float32, -1 if normalize else -2, 1)

    def test_each_element_of_an_action_is_clipped_to_its_own_bounds(self):
        """Bounds (-1, 1) and (0, 6): 2 -> 2, clipped to 1, and 0.5 -> 3 + 0.5 * 3 = 4.5; -3 -> -6, clipped to 0."""
        space = spaces.Box(np.float32([-1, 0]), np.float32([1, 6]))
        encoded, _ = ActionCodec(space, 2, normalize=True, clip=True).encode(torch.tensor([[2., 0.5], [0.25, -3.]]))
        assert encoded.dtype == np.float32 and encoded.tolist() == [[1., 4.5], [0.25, 0.]]

    @pytest.mark.parametrize('low, high, clipped', [([-1, 0, 0], [1, 1, 1], [-1, 0, 1]),
                                                    ([0, 0, 0], [1, 2, 3], [0, 0, 3])])
    def test_lower_bounds_may_differ_where_upper_ones_do_not_and_vice_versa(self, low, high, clipped):
        space = spaces.Box(np.float32(low), np.float32(high))
        encoded, _ = ActionCodec(space, 1, normalize=False, clip=True).encode(torch.tensor([[-2., -2., 9.]]))
        assert encoded.tolist() == [clipped]

    def test_normalized_actions_are_mapped_linearly_and_clipped(self):
        """Bounds 0 and 4: -1 -> 0, 0.5 -> 2 + 0.5 * 2 = 3, and 3 -> 8, clipped to 4."""
        space = spaces.Box(0, 4, (3, ), np.float64)
        encoded, arrays = ActionCodec(space, 1, normalize=True, clip=True).encode(torch.tensor([[-1., 0.5, 3.]]))
        assert encoded.dtype == np.float64
        np.testing.assert_allclose(encoded, [[0, 3, 4]])
        np.testing.assert_allclose(arrays[0], [[-1, 0.5, 3]])

    def test_actions_become_what_the_batched_space_contains(self):
        pair = spaces.Tuple([spaces.MultiBinary(2), spaces.Box(-1, 1, (2, ), np.float64)])
        space = spaces.Dict({'z': spaces.Discrete(3, start=4), 'a': pair})
        codec = ActionCodec(space, 3)
        action = {'a': (torch.ones(3, 2, dtype=torch.int64), torch.zeros(3, 2)), 'z': torch.tensor([4, 5, 6])}
        encoded, _ = codec.encode(action)
        assert gymnasium.vector.utils.batch_space(space, 3).contains(encoded)
        assert list(encoded) == list(space.spaces)

    def test_actions_with_gradients_and_other_dtypes_are_taken(self):
        codec = ActionCodec(spaces.Box(-1, 1, (1, )), 2)
        encoded, given = codec.encode(torch.zeros(2, 1, dtype=torch.float64, requires_grad=True))
        assert encoded.dtype == np.float32 and given[0].dtype == np.float32

    @pytest.mark.parametrize('space', [spaces.Discrete(3), spaces.Tuple([spaces.Discrete(3)]), spaces.Box(-1, 1, ())])
    def test_converted_actions_share_no_memory_with_the_original(self, space):
        codec = ActionCodec(space, 2)
        action = nest.map_structure(lambda spec: spec.zeros((2, )), codec.spec)
        encoded, given = codec.encode(action)
        arrays = [*nest.flatten(encoded), *given, *(x.numpy() for x in nest.flatten(action))]
        for array in arrays:
            array += 1
        assert len(arrays) == 3 and all(array.tolist() == [1, 1] for array in arrays)

    @pytest.mark.parametrize('action', [torch.zeros(3), torch.zeros(2, 2), (torch.zeros(2, 1), ),
                                        {'a': torch.zeros(2, 1)}, torch.distributions.Categorical(torch.ones(2, 1))])
    def test_wrong_shapes_and_structures_are_rejected_with_both(self, action):
        with pytest.raises(SpecError, match=r'action: expected tensors of shapes \(2, 1\).*found'):
            ActionCodec(spaces.Box(-1, 1, (1, )), 2).encode(action)


class TestObservations:

    def test_unowned_arrays_are_copied_and_owned_ones_are_not(self):
        codec = ObservationCodec(spaces.Box(-INF, INF, (2, ), np.float32))
        array = np.ones((3, 2), np.float32)
        borrowed, owned = codec.decode(array, owned=False), codec.decode(array, owned=True)
        array[:] = 5
        assert (borrowed == 1).all() and (owned == 5).all()

    def test_float64_becomes_float32_and_strided_arrays_are_accepted(self):
        codec = ObservationCodec(spaces.Box(-INF, INF, (2, ), np.float64))
        array = np.arange(8.0).reshape(2, 4)[:, ::-2]
        decoded = codec.decode(array, owned=True)
        assert decoded.dtype == torch.float32
        assert decoded.tolist() == [[3, 1], [7, 5]]

    def test_tensors_of_torch_environments_are_accepted(self):
        codec = ObservationCodec(spaces.Box(-INF, INF, (2, ), np.float32))
        tensor = torch.ones(3, 2)
        decoded = codec.decode(tensor, owned=False)
        tensor.zero_()
        assert (decoded == 1).all()


def test_samples_are_flattened_in_the_order_of_nests_and_back():
    space = spaces.Dict({'b': spaces.Discrete(2), 'a': spaces.Tuple([spaces.Discrete(3), spaces.Discrete(4)])})
    sample = {'b': 1, 'a': (2, 3)}
    assert flatten_sample(space, sample) == [2, 3, 1]
    rebuilt = unflatten_sample(space, [2, 3, 1])
    assert rebuilt == sample and list(rebuilt) == list(space.spaces)


@pytest.mark.parametrize('keys', [['a', 0, 'b', 10, 2], list(range(12)), ['b', 'a'], [('a', 1), ('a', 0)],
                                  list(enum.Enum('Side', 'RIGHT LEFT FRONT'))])
def test_the_parts_of_a_dict_are_in_the_order_of_their_spec(keys):
    space = spaces.Dict({key: spaces.Box(-1, 1, (i + 1, ), np.float32) for i, key in enumerate(keys)})
    spec = tensor_spec_from_gym_space(space)
    sample = space.sample()
    leaves = flatten_sample(space, sample)
    assert [x.shape for x in leaves] == [leaf.shape for leaf in nest.flatten(spec)]
    restored = unflatten_sample(space, leaves)
    assert list(restored) == list(sample) and all((restored[key] == sample[key]).all() for key in keys)
