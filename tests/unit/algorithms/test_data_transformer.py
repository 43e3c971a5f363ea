"""Data transformers: agreement of rollout and replay, statistics, order, errors, unchanged inputs."""
import copy
from functools import partial

import gin
import pytest
import torch
from helpers.agents import make_agent

from alfx import context, nest
from alfx.algorithms import data_transformer as dt
from alfx.algorithms.data_transformer import (FrameStacker, FunctionalRewardTransformer,
                                              HindsightExperienceTransformer, IdentityDataTransformer,
                                              ImageScaleTransformer, ObservationNormalizer, RandomShift,
                                              RewardClipping, RewardNormalizer, RewardScaling, RewardShifting,
                                              SequentialDataTransformer, UntransformedTimeStep,
                                              create_data_transformer)
from alfx.data_structures import Experience, StepType, TimeStep, add_batch_info
from alfx.experience_replayers.replay_buffer import ReplayBuffer
from alfx.gin_utils import ConfError
from alfx.tensor_specs import BoundedTensorSpec, SpecError, TensorSpec, check_consistent, extract_spec, zeros_from_spec
from alfx.utils.normalizers import AdaptiveNormalizer, EMNormalizer, WindowNormalizer

IMAGE = BoundedTensorSpec((2, 3), torch.uint8, 0, 255)
NESTED = {'camera': {'front': IMAGE, 'back': IMAGE}, 'speed': TensorSpec((2, ))}


def time_step(observation, step_type=None, reward=None):
    batch = nest.get_nest_shape(observation)[:1]
    return TimeStep(
        step_type=torch.full(batch, StepType.MID, dtype=torch.int32) if step_type is None else step_type,
        reward=torch.zeros(batch) if reward is None else reward, discount=torch.ones(batch), observation=observation)


def sample(spec, *outer):
    """Return random values of a nest of specs."""
    def draw(s):
        values = torch.rand(*outer, *s.shape) * 200
        return values.to(s.dtype)
    return nest.map_structure(draw, spec)


def history(num_steps, num_envs, spec, first_probability=0.25):
    """Return time steps [T, B, ...] with random episodes; all environments begin with FIRST."""
    first = torch.rand(num_steps, num_envs) < first_probability
    first[0] = True
    last = torch.cat([first[1:], torch.zeros(1, num_envs, dtype=torch.bool)])
    step_type = torch.where(first, 0, torch.where(last, 2, 1)).to(torch.int32)
    return TimeStep(step_type=step_type, reward=torch.rand(num_steps, num_envs),
                    discount=torch.ones(num_steps, num_envs), observation=sample(spec, num_steps, num_envs))


def rollout_of(transformer, steps):
    """Return the transformed time steps [T, B, ...] of a rollout."""
    num_steps, num_envs = steps.step_type.shape
    state = zeros_from_spec(transformer.state_spec, num_envs)
    results = []
    for t in range(num_steps):
        result, state = transformer.transform_timestep(nest.map_structure(lambda x, t=t: x[t], steps), state)
        check_consistent(state, transformer.state_spec)
        results.append(result)
    return nest.stack(results)


def stored(steps, **kwargs):
    num_steps, num_envs = steps.step_type.shape
    spec = extract_spec(Experience(time_step=steps), from_dim=2)
    buffer = ReplayBuffer(spec, num_envs, **kwargs)
    for t in range(num_steps):
        buffer.add_batch(Experience(time_step=nest.map_structure(lambda x, t=t: x[t], steps)))
    return buffer


class TestFrameStacker:

    def test_a_rollout_by_hand(self):
        stacker = FrameStacker(TensorSpec((1, )), stack_size=3)
        step_type = torch.tensor([[0], [1], [1], [2], [0], [1]], dtype=torch.int32)
        steps = TimeStep(step_type=step_type, observation=torch.arange(1., 7.).reshape(6, 1, 1))
        found = rollout_of(stacker, steps).observation.squeeze(1).tolist()
        assert found == [[1, 1, 1], [1, 1, 2], [1, 2, 3], [2, 3, 4], [5, 5, 5], [5, 5, 6]]

    def test_a_rollout_within_an_episode_pads_stacks_with_its_first_step(self):
        stacker = FrameStacker(TensorSpec((1, )), stack_size=3)
        steps = TimeStep(step_type=torch.ones(2, 1, dtype=torch.int32), observation=torch.tensor([[[7.]], [[8.]]]))
        assert rollout_of(stacker, steps).observation.squeeze(1).tolist() == [[7, 7, 7], [7, 7, 8]]

    @pytest.mark.parametrize('stack_size', [1, 2, 4])
    @pytest.mark.parametrize('axis', [0, 1, -1])
    def test_replay_gives_the_frames_of_the_rollout(self, stack_size, axis):
        spec = {'image': IMAGE, 'other': TensorSpec((1, 2))}
        stacker = FrameStacker(spec, stack_size, axis, fields=['image', 'other'])
        steps = history(40, 3, spec)
        expected = rollout_of(stacker, steps).observation
        check_consistent(expected, stacker.transformed_observation_spec, from_dim=2)
        buffer = stored(steps, max_length=25, num_earliest_frames_ignored=stack_size - 1)
        for length in (1, 5):
            batch, info = buffer.get_batch(32, length)
            batch = add_batch_info(batch, info, buffer)
            before = copy.deepcopy(nest.flatten(batch.time_step))
            result = stacker.transform_experience(batch)
            times = info.positions.unsqueeze(-1) + torch.arange(length)
            for name in spec:
                assert torch.equal(result.observation[name], expected[name][times, info.env_ids.unsqueeze(-1)])
            assert all(torch.equal(a, b) for a, b in zip(before, nest.flatten(batch.time_step)))

    def test_the_whole_buffer_is_stacked_as_in_the_rollout(self):
        """Frame stacks of the whole buffer equal those of the rollout except for missing frames."""
        stacker = FrameStacker(IMAGE, 4)
        steps = history(30, 2, IMAGE, first_probability=0.1)
        expected = rollout_of(stacker, steps).observation.transpose(0, 1)
        buffer = stored(steps, max_length=20)
        batch, info = buffer.gather_all()
        result = stacker.transform_experience(add_batch_info(batch, info, buffer)).observation
        assert torch.equal(result[:, 3:], expected[:, 13:])
        # The oldest frame there stands in for those before it.
        oldest = steps.observation[10]
        assert torch.equal(result[:, 0], torch.cat([oldest] * 4, dim=1))

    def test_other_fields_do_not_change(self):
        stacker = FrameStacker(NESTED, 2, fields=['camera.front'])
        assert stacker.transformed_observation_spec == {
            'camera': {'front': BoundedTensorSpec((4, 3), torch.uint8, 0, 255), 'back': IMAGE},
            'speed': TensorSpec((2, ))}
        steps = history(5, 2, NESTED)
        found = rollout_of(stacker, steps).observation
        assert torch.equal(found['camera']['back'], steps.observation['camera']['back'])

    @pytest.mark.parametrize('stack_size', [2, 3])
    def test_scalars_become_a_vector(self, stack_size):
        spec = BoundedTensorSpec((), torch.float32, 0., 1.)
        stacker = FrameStacker(spec, stack_size)
        assert stacker.transformed_observation_spec == BoundedTensorSpec((stack_size, ), torch.float32, 0., 1.)
        assert FrameStacker(spec, 1).transformed_observation_spec == spec
        steps = history(5, 2, spec)
        as_vectors = steps._replace(observation=steps.observation.unsqueeze(-1))
        vectors = FrameStacker(TensorSpec((1, )), stack_size)
        assert torch.equal(rollout_of(stacker, steps).observation, rollout_of(vectors, as_vectors).observation)

    def test_scalars_from_replay_match_the_rollout(self):
        spec = BoundedTensorSpec((), torch.float32, 0., 1.)
        stacker, steps = FrameStacker(spec, 3), history(20, 2, spec)
        expected = rollout_of(stacker, steps).observation
        buffer = stored(steps, max_length=15, num_earliest_frames_ignored=2)
        batch, info = buffer.get_batch(16, 3)
        found = stacker.transform_experience(add_batch_info(batch, info, buffer)).observation
        assert torch.equal(found, expected[info.positions.unsqueeze(-1) + torch.arange(3), info.env_ids.unsqueeze(-1)])

    def test_bounds_are_stacked_too(self):
        spec = BoundedTensorSpec((2, ), torch.float32, [0., 1.], [2., 3.])
        stacked = FrameStacker(spec, 2).transformed_observation_spec
        assert stacked.minimum.tolist() == [0, 1, 0, 1] and stacked.maximum.tolist() == [2, 3, 2, 3]

    def test_wrong_arguments_are_rejected(self):
        with pytest.raises(SpecError, match=r"stack_axis: 2 is not a dimension of 'observation'"):
            FrameStacker(IMAGE, stack_axis=2)
        with pytest.raises(SpecError, match='stack_axis'):
            FrameStacker(TensorSpec(()), stack_axis=1)
        with pytest.raises(ValueError, match='stack_size must be an int >= 1, found int 0'):
            FrameStacker(IMAGE, 0)
        with pytest.raises(ValueError, match='batch_info'):
            FrameStacker(IMAGE).transform_experience(Experience(time_step=TimeStep()))


@pytest.mark.parametrize('cls', [FrameStacker, ImageScaleTransformer, ObservationNormalizer])
class TestFields:

    def test_a_field_that_does_not_exist_is_an_error_with_the_nearest_one(self, cls):
        with pytest.raises(SpecError, match=rf"{cls.__name__}.fields: .*did you mean 'front'"):
            cls(NESTED, fields=['camera.fron'])

    def test_a_nest_instead_of_a_field_raises_with_its_fields(self, cls):
        with pytest.raises(SpecError, match=r'camera.front'):
            cls(NESTED, fields=['camera'])

    def test_a_field_named_twice_is_an_error(self, cls):
        with pytest.raises(SpecError, match=rf'{cls.__name__}.fields: expected each field once'):
            cls(NESTED, fields=['camera.front', 'camera.front'])

    def test_one_string_is_an_error(self, cls):
        with pytest.raises(SpecError, match=r"write \['speed'\]"):
            cls(NESTED, fields='speed')


def test_without_fields_all_images_of_a_nest_are_scaled():
    spec = {'camera': BoundedTensorSpec((3, 4, 4), torch.uint8, 0, 255), 'joints': TensorSpec((2, )),
            'kind': BoundedTensorSpec((), torch.int64, 0, 5)}
    scaled = ImageScaleTransformer(spec, min=0.0).transformed_observation_spec
    assert scaled['camera'] == BoundedTensorSpec((3, 4, 4), torch.float32, 0, 1)
    assert scaled['kind'] == spec['kind'] and scaled['joints'] == spec['joints']


@pytest.mark.parametrize('cls, spec', [(FrameStacker, NESTED),
                                       (ImageScaleTransformer, {'a': {'back': TensorSpec((2, ))}})])
def test_a_nested_observation_needs_fields(cls, spec):
    with pytest.raises(SpecError, match=r'\.back'):
        cls(spec)


class TestImageScaleTransformer:

    def test_bytes_are_mapped_linearly(self):
        scaler = ImageScaleTransformer(TensorSpec((3, ), torch.uint8), min=-1., max=3.)
        assert scaler.transformed_observation_spec == BoundedTensorSpec((3, ), torch.float32, -1., 3.)
        observation = torch.tensor([[0, 51, 255]], dtype=torch.uint8)
        result, _ = scaler.transform_timestep(time_step(observation), ())
        assert result.observation.tolist()[0] == pytest.approx([-1.0, -0.2, 3.0])
        assert observation.tolist() == [[0, 51, 255]]

    @pytest.mark.parametrize('spec, values, expected', [
        (BoundedTensorSpec((3, ), torch.uint8, 0, 10), [0, 5, 10], [-1, 0, 1]),
        (BoundedTensorSpec((3, ), torch.int32, -4, 4), [-4, 0, 2], [-1, 0, 0.5]),
        (BoundedTensorSpec((3, ), torch.int64, [0, 0, 0], [9, 10, 8]), [0, 5, 10], [-1, 0, 1]),
        (TensorSpec((3, ), torch.int8), [-128, 127, 127], [-1, 1, 1]),
        (BoundedTensorSpec((3, ), torch.uint8, 7, 7), [7, 7, 7], [-1, -1, -1]),
        (BoundedTensorSpec((3, ), torch.uint8, 0, 1), [0, 1, 0], [0, 1, 0]),  # booleans
        (TensorSpec((3, ), torch.bool), [0, 1, 0], [0, 1, 0])])
    def test_the_scale_comes_from_the_bounds(self, spec, values, expected):
        scaler = ImageScaleTransformer(spec)
        result, _ = scaler.transform_timestep(time_step(torch.tensor([values], dtype=spec.dtype)), ())
        assert result.observation.dtype == torch.float32
        assert result.observation.tolist()[0] == pytest.approx(expected)
        bounds = scaler.transformed_observation_spec
        assert (bounds.minimum <= min(expected)).all() and (bounds.maximum >= max(expected)).all()

    def test_zeros_and_ones_are_kept_whatever_min_and_max_are(self, caplog):
        caplog.set_level('INFO')
        ImageScaleTransformer(BoundedTensorSpec((2, ), torch.uint8, 0, 1))
        assert not caplog.messages
        scaler = ImageScaleTransformer(BoundedTensorSpec((2, ), torch.uint8, 0, 1), min=0., max=255.)
        result, _ = scaler.transform_timestep(time_step(torch.tensor([[0, 1]], dtype=torch.uint8)), ())
        assert result.observation.tolist() == [[0, 1]]
        assert 'ImageScaleTransformer.max is not used' in caplog.text

    def test_grey_images_of_a_nest_are_found(self):
        spec = {'grey': BoundedTensorSpec((4, 4), torch.uint8, 0, 255), 'counts': TensorSpec((2, 2), torch.int64),
                'speed': TensorSpec((2, ))}
        scaled = ImageScaleTransformer(spec).transformed_observation_spec
        assert scaled['grey'] == BoundedTensorSpec((4, 4), torch.float32, -1., 1.)
        assert scaled['counts'] is spec['counts']

    def test_a_scale_that_enlarges_the_values_is_logged(self, caplog):
        ImageScaleTransformer(BoundedTensorSpec((2, ), torch.uint8, 0, 10), min=0., max=255.)
        assert 'the bounds 0 and 10 of the space become 0 and 255' in caplog.text

    def test_only_integer_images_with_a_limited_range_are_accepted(self):
        with pytest.raises(SpecError, match=r"'speed': expected an image of integers .*, found TensorSpec"):
            ImageScaleTransformer(NESTED, fields=['camera.front', 'speed'])
        with pytest.raises(SpecError, match=r"'observation': expected an image .* at most 65,535 apart"):
            ImageScaleTransformer(TensorSpec((3, ), torch.int64))
        with pytest.raises(ValueError, match='min < max'):
            ImageScaleTransformer(IMAGE, min=1., max=1.)


KEYS = {'dots': ('arm.pos', 'arm.vel'), 'a prefix': ('a.b', 'a'), 'empty': ('', 'x'), 'integers': (0, 7)}


class TestRandomShift:

    IMAGE = BoundedTensorSpec((2, 3, 4), torch.uint8, 0, 255)

    def shifted(self, images, **arguments):
        transformer = RandomShift(self.IMAGE, **arguments)
        experience = Experience(time_step=time_step(images, torch.ones(images.shape[:2], dtype=torch.int32)))
        return transformer.transform_experience(experience).time_step.observation

    def test_each_image_is_a_crop_of_the_image_with_its_border_repeated(self):
        torch.manual_seed(0)
        images = torch.arange(40 * 5 * 24, dtype=torch.float32).reshape(40, 5, 2, 3, 4)
        seen = set()
        for image, result in zip(images.flatten(0, 1), self.shifted(images, max_shift=1).flatten(0, 1)):
            padded = torch.nn.functional.pad(image, (1, 1, 1, 1), mode='replicate')
            crops = {(i, j): padded[:, i:i + 3, j:j + 4] for i in range(3) for j in range(3)}
            found = [where for where, crop in crops.items() if torch.equal(crop, result)]
            assert len(found) == 1
            seen.update(found)
        assert len(seen) == 9  # all positions occur

    def test_acting_sees_the_image_itself_and_inputs_are_not_changed(self):
        image = sample(self.IMAGE, 6, 5)
        copy = image.clone()
        shifted = self.shifted(image, max_shift=2)
        assert torch.equal(image, copy) and shifted.dtype == torch.uint8 and not torch.equal(image, shifted)
        step = time_step(image[:, 0])
        assert RandomShift(self.IMAGE, 2).transform_timestep(step, ())[0] is step

    def test_a_field_is_shifted_alone_and_other_shapes_are_rejected(self):
        spec = {'camera': self.IMAGE, 'speed': TensorSpec((3, ))}
        observation = {'camera': sample(self.IMAGE, 2, 6), 'speed': torch.randn(2, 6, 3)}
        step = time_step(observation, torch.ones(2, 6, dtype=torch.int32))
        result = RandomShift(spec, 2, fields=['camera']).transform_experience(Experience(time_step=step))
        assert result.time_step.observation['speed'] is observation['speed']
        assert not torch.equal(result.time_step.observation['camera'], observation['camera'])
        with pytest.raises(SpecError, match=r"RandomShift: 'speed': expected an image \(C, H, W\)"):
            RandomShift(spec, 2, fields=['speed'])
        with pytest.raises(SpecError, match='RandomShift: .*an image .* of more than 3 x 3 pixels'):
            RandomShift(self.IMAGE, 3)

    def test_frames_are_stacked_before_they_are_shifted(self):
        with pytest.raises(ValueError, match='FrameStacker'):
            dt.create_data_transformer([partial(RandomShift, max_shift=2), FrameStacker], self.IMAGE)


@pytest.mark.parametrize('keys', KEYS.values(), ids=KEYS)
class TestUnusualKeys:

    def test_observations_are_normalized(self, keys):
        observation = {key: torch.full((2, 3), 5.0) for key in keys}
        for fields in (None, [str(keys[0])]):
            normalizer = ObservationNormalizer({key: TensorSpec((3, )) for key in keys}, fields=fields)
            with context.replay_context():
                result, _ = normalizer.transform_timestep(time_step(observation), ())
            changed = [key for key in keys if not torch.equal(result.observation[key], observation[key])]
            assert changed == list(keys if fields is None else keys[:1])

    def test_frames_are_stacked_and_images_scaled(self, keys):
        image = BoundedTensorSpec((2, ), torch.uint8, 0, 255)
        chain = SequentialDataTransformer(
            [lambda **kw: FrameStacker(stack_size=2, fields=[str(keys[0])], **kw),
             lambda **kw: ImageScaleTransformer(fields=[str(keys[1])], **kw)], {key: image for key in keys})
        buffer = ReplayBuffer(extract_spec(Experience(time_step=time_step(
            {key: torch.zeros(1, 2, dtype=torch.uint8) for key in keys})), 1), 1, 4)
        for t in range(3):
            observation = {key: torch.full((1, 2), t, dtype=torch.uint8) for key in keys}
            buffer.add_batch(Experience(time_step=time_step(observation)))
        batch, info = buffer.gather_all()
        result = chain.transform_experience(add_batch_info(batch, info, buffer)).observation
        assert result[keys[0]].tolist() == [[[0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 2, 2]]]
        assert result[keys[1]][0, 0].tolist() == [-1, -1]


def test_an_ambiguous_field_is_reported():
    spec = {'a.b': TensorSpec(()), 'a': {'b': TensorSpec(())}}
    ObservationNormalizer(spec)  # normalizes both
    with pytest.raises(SpecError, match=r"field 'a.b' is ambiguous: it can be \['a', 'b'\] or \['a.b'\]"):
        ObservationNormalizer(spec, fields=['a.b'])


def test_categories_are_normalized_only_if_they_are_named(caplog):
    category = BoundedTensorSpec((), torch.int64, 0, 4)
    spec, observation = {'door': category, 'speed': TensorSpec((1, ))}, {
        'door': torch.tensor([3, 3]), 'speed': torch.tensor([[5.0], [5.0]])}
    with context.replay_context(), caplog.at_level('INFO'):
        result, _ = ObservationNormalizer(spec).transform_timestep(time_step(observation), ())
        assert 'integers are not normalized: door; name them in ObservationNormalizer.fields' in caplog.text
        assert result.observation['door'].dtype == torch.int64 and (result.observation['speed'] != 5).all()
        named = ObservationNormalizer(spec, fields=['door'])
        result, _ = named.transform_timestep(time_step(observation), ())
        assert result.observation['door'].dtype == torch.float32 and (result.observation['speed'] == 5).all()
        normalizer = ObservationNormalizer(category)
        assert normalizer.transform_timestep(time_step(observation['door']), ())[0].observation.tolist() == [3, 3]
        assert normalizer.transformed_observation_spec == category
        normalizer = ObservationNormalizer(category, fields=[''])
        assert normalizer.transform_timestep(time_step(observation['door']), ())[0].observation.dtype == torch.float32


MODES = {'replay': context.replay_context, 'rollout': context.rollout_context, 'pretrain': context.pretrain_context,
         'eval': context.eval_context}


class TestObservationNormalizer:

    @pytest.mark.parametrize('update_mode', ['replay', 'rollout', 'pretrain'])
    def test_statistics_are_updated_in_their_mode_and_in_no_other(self, update_mode):
        normalizer = ObservationNormalizer(TensorSpec((2, )), update_mode=update_mode)
        for mode, enter in MODES.items():
            before = copy.deepcopy(normalizer.state_dict())
            with enter():
                normalizer.transform_timestep(time_step(torch.rand(8, 2) + 5), ())
            changed = any(not torch.equal(a, b) for a, b in zip(before.values(), normalizer.state_dict().values()))
            assert changed == (mode == update_mode), mode

    @pytest.mark.parametrize('mode', ['adaptive', 'window', 'em'])
    def test_the_first_batch_is_normalized_over_batch_and_time(self, mode):
        normalizer = ObservationNormalizer(TensorSpec((2, )), mode=mode)
        observation = torch.randn(16, 8, 2) * torch.tensor([3.0, 0.1]) + torch.tensor([10.0, -2.0])
        with context.replay_context():
            result = normalizer.transform_experience(Experience(time_step=TimeStep(observation=observation)))
        flat = result.observation.reshape(-1, 2)
        torch.testing.assert_close(flat.mean(0), torch.zeros(2), atol=1e-4, rtol=0)
        torch.testing.assert_close(flat.std(0, correction=0), torch.ones(2), atol=1e-3, rtol=0)

    def test_statistics_are_restored_from_a_checkpoint(self):
        first, second = ObservationNormalizer(NESTED), ObservationNormalizer(NESTED)
        with context.replay_context():
            first.transform_timestep(time_step(sample(NESTED, 8)), ())
        second.load_state_dict(first.state_dict())
        observation = time_step(sample(NESTED, 4))
        a, b = (n.transform_timestep(observation, ())[0].observation for n in (first, second))
        assert all(torch.equal(x, y) for x, y in zip(nest.flatten(a), nest.flatten(b)))
        check_consistent(a, first.transformed_observation_spec)

    def test_only_the_chosen_fields_change_and_are_clipped(self):
        normalizer = ObservationNormalizer(NESTED, fields=['speed'], clipping=0.5)
        assert normalizer.transformed_observation_spec['speed'] == BoundedTensorSpec((2, ), torch.float32, -0.5, 0.5)
        observation = sample(NESTED, 16)
        with context.replay_context():
            result, _ = normalizer.transform_timestep(time_step(observation), ())
        assert result.observation['speed'].abs().max().item() == 0.5
        assert result.observation['camera']['front'] is observation['camera']['front']

    def test_without_zero_mean_the_sign_is_kept(self):
        normalizer = ObservationNormalizer(TensorSpec((2, )), zero_mean=False)
        with context.replay_context():
            result, _ = normalizer.transform_timestep(time_step(torch.rand(16, 2) + 1.0), ())
        assert (result.observation > 0).all()

    def test_arguments_choose_the_normalizer(self):
        for mode, cls in (('adaptive', AdaptiveNormalizer), ('window', WindowNormalizer), ('em', EMNormalizer)):
            assert isinstance(ObservationNormalizer(TensorSpec(()), mode=mode)._normalizer, cls)
        with pytest.raises(ValueError, match=r"mode must be .* found str 'fixed'"):
            ObservationNormalizer(TensorSpec(()), mode='fixed')
        with pytest.raises(ValueError, match=r"update_mode must be .* found str 'eval'"):
            ObservationNormalizer(TensorSpec(()), update_mode='eval')

    def test_arguments_of_other_normalizers_are_logged(self, caplog):
        caplog.set_level('INFO', 'alfx')
        ObservationNormalizer(TensorSpec(()), mode='window', window_size=10)
        assert 'is not used' not in caplog.text
        ObservationNormalizer(TensorSpec(()), window_size=10, update_rate=0.1, speed=4.0)
        assert [record.getMessage() for record in caplog.records] == [
            f"ObservationNormalizer.{argument} is not used: mode is 'adaptive'"
            for argument in ('window_size', 'update_rate')]


REWARD_TRANSFORMERS = [
    (lambda **kw: RewardClipping(minmax=(-1, 2), **kw), [-1.0, 0.5, 2.0]),
    (lambda **kw: RewardScaling(0.1, **kw), [-0.3, 0.05, 0.4]),
    (lambda **kw: RewardShifting(1.5, **kw), [-1.5, 2.0, 5.5]),
    (lambda **kw: FunctionalRewardTransformer(torch.sign, **kw), [-1.0, 1.0, 1.0]),
]


@pytest.mark.parametrize('ctor,expected', REWARD_TRANSFORMERS)
def test_rewards_are_transformed_in_a_copy_with_the_same_observations(ctor, expected):
    transformer = ctor(observation_spec=NESTED)
    assert transformer.transformed_observation_spec is NESTED
    reward = torch.tensor([-3.0, 0.5, 4.0])
    step = time_step(sample(NESTED, 3), reward=reward)
    result, state = transformer.transform_timestep(step, ())
    assert result.reward.tolist() == pytest.approx(expected) and state == ()
    assert result.observation is step.observation
    sequence = Experience(time_step=TimeStep(reward=reward.reshape(1, 3), observation=()))
    assert transformer.transform_experience(sequence).reward[0].tolist() == pytest.approx(expected)
    many = torch.stack([reward, reward], dim=-1)
    assert transformer(many).shape == (3, 2)
    assert reward.tolist() == [-3.0, 0.5, 4.0]


class TestRewardNormalizer:

    def test_rewards_of_one_batch_get_zero_mean_and_unit_variance(self):
        normalizer = RewardNormalizer()
        reward = torch.randn(4, 50) * 7 + 3
        with context.replay_context():
            result = normalizer.transform_experience(Experience(time_step=TimeStep(reward=reward))).reward
        assert result.mean().item() == pytest.approx(0.0, abs=1e-4)
        assert result.std(correction=0).item() == pytest.approx(1.0, abs=1e-3)

    def test_each_dimension_of_a_reward_has_its_own_statistics(self):
        context.set_run_specs((), (), TensorSpec(()), TensorSpec((2, )))
        normalizer = RewardNormalizer()
        reward = torch.randn(64, 2) * torch.tensor([10.0, 0.1])
        with context.replay_context():
            result = normalizer(reward)
        torch.testing.assert_close(result.std(0, correction=0), torch.ones(2), atol=1e-3, rtol=0)

    def test_statistics_are_updated_so_many_times_also_after_a_checkpoint(self):
        normalizer = RewardNormalizer(update_max_calls=2, update_mode='rollout')
        with context.rollout_context():
            normalizer(torch.rand(8))
            other = RewardNormalizer(update_max_calls=2, update_mode='rollout')
            other.load_state_dict(normalizer.state_dict())
            other(torch.rand(8))
            before = copy.deepcopy(other.state_dict())
            other(torch.rand(8) * 100)
        assert all(torch.equal(a, b) for a, b in zip(before.values(), other.state_dict().values()))

    def test_statistics_stay_in_every_other_mode(self):
        normalizer = RewardNormalizer()
        for mode, enter in MODES.items():
            before = copy.deepcopy(normalizer.state_dict())
            with enter():
                normalizer(torch.rand(8))
            changed = any(not torch.equal(a, b) for a, b in zip(before.values(), normalizer.state_dict().values()))
            assert changed == (mode == 'replay'), mode

    def test_results_are_clipped(self):
        normalizer = RewardNormalizer(clip_value=0.1)
        with context.replay_context():
            assert normalizer(torch.randn(50)).abs().max().item() == pytest.approx(0.1)
        assert normalizer.clip_value == 0.1

    def test_a_custom_normalizer_is_used(self):
        own = EMNormalizer(TensorSpec(()), auto_update=False)
        assert RewardNormalizer(normalizer=own).normalizer is own
        with pytest.raises(ValueError, match='update_mode'):
            RewardNormalizer(update_mode='pretrain')


class TestHindsight:
    """Its numbers are in tests/numerics/test_hindsight.py."""

    SPEC = {'observation': TensorSpec((4, )), 'achieved_goal': TensorSpec((2, )), 'desired_goal': TensorSpec((2, )),
            'camera': IMAGE, 'other': TensorSpec((3, ))}

    def test_specs_are_kept_and_the_replay_buffer_tracks_episodes(self):
        transformer = HindsightExperienceTransformer(self.SPEC)
        assert transformer.transformed_observation_spec is self.SPEC and transformer.state_spec == ()
        assert transformer.needs_episodic_info
        ctors = [lambda **kw: FrameStacker(fields=['camera'], **kw), HindsightExperienceTransformer,
                 lambda **kw: RewardScaling(2.0, **kw)]
        assert create_data_transformer(ctors, self.SPEC).needs_episodic_info
        assert not create_data_transformer(ctors[::2], self.SPEC).needs_episodic_info
        assert not create_data_transformer(None, self.SPEC).needs_episodic_info

    @pytest.mark.parametrize('arguments,message', [
        (dict(achieved_goal_field='time_step.observation.achieved'), "did you mean 'achieved_goal'"),
        (dict(desired_goal_field='time_step.observation.other'), r'goals of the same shape.*\(2,\).*\(3,\)'),
    ])
    def test_goals_that_do_not_exist_or_differ_are_rejected(self, arguments, message):
        with pytest.raises(SpecError, match=message):
            HindsightExperienceTransformer(self.SPEC, **arguments)

    @pytest.mark.parametrize('proportion', [-0.1, 1.1])
    def test_a_proportion_is_a_probability(self, proportion):
        with pytest.raises(ValueError, match=r'her_proportion must be a number in \[0, 1\]'):
            HindsightExperienceTransformer(self.SPEC, her_proportion=proportion)

    @pytest.mark.parametrize('ctors,message', [
        ([lambda **kw: RewardScaling(2.0, **kw), HindsightExperienceTransformer],
         'HindsightExperienceTransformer has to come before RewardScaling'),
        ([lambda **kw: ObservationNormalizer(fields=['observation'], **kw), HindsightExperienceTransformer],
         'HindsightExperienceTransformer has to come before ObservationNormalizer'),
        ([HindsightExperienceTransformer, UntransformedTimeStep], 'UntransformedTimeStep has to come first'),
        ([HindsightExperienceTransformer, HindsightExperienceTransformer], 'relabeled twice'),
        ([HindsightExperienceTransformer, lambda **kw: FrameStacker(fields=['desired_goal'], **kw)],
         "'desired_goal'.* cannot be stacked"),
        ([lambda **kw: FrameStacker(fields=['achieved_goal'], **kw), HindsightExperienceTransformer],
         "expected goals of the same shape"),
        ([lambda **kw: FrameStacker(fields=['achieved_goal', 'desired_goal'], **kw), HindsightExperienceTransformer],
         "'achieved_goal', 'desired_goal'.* cannot be stacked"),
    ])
    def test_a_wrong_order_is_rejected(self, ctors, message):
        with pytest.raises(SpecError, match=message):
            create_data_transformer(ctors, self.SPEC)

    def test_it_needs_to_know_where_a_batch_came_from(self):
        steps = history(3, 2, self.SPEC)
        with pytest.raises(ValueError, match='needs experience with batch_info'):
            HindsightExperienceTransformer(self.SPEC).transform_experience(Experience(time_step=steps))

    def test_it_needs_a_buffer_that_tracks_episodes(self):
        steps = history(6, 1, self.SPEC)
        close = steps.observation['achieved_goal'][..., 0] * 0
        steps = steps._replace(reward=close, observation={**steps.observation, 'desired_goal':
                                                          steps.observation['achieved_goal']})
        buffer = stored(steps, max_length=8)
        batch, info = buffer.gather_all()
        with pytest.raises(ValueError, match='keep_episodic_info'):
            HindsightExperienceTransformer(self.SPEC).transform_experience(add_batch_info(batch, info, buffer))

    def test_returns_of_stored_rewards_do_not_support_hindsight_goals(self):
        steps = history(6, 1, self.SPEC)
        buffer = stored(steps, max_length=8)
        batch, info = buffer.gather_all()
        info = info._replace(discounted_return=torch.zeros(1, 6))
        with pytest.raises(ValueError, match='record_episodic_return'):
            HindsightExperienceTransformer(self.SPEC).transform_experience(add_batch_info(batch, info, buffer))


class TestComposition:

    def test_transformers_are_applied_in_order_and_keep_their_own_states(self):
        spec = IMAGE
        transformer = create_data_transformer(
            [UntransformedTimeStep, FrameStacker, ImageScaleTransformer, lambda **kw: RewardScaling(2.0, **kw)], spec)
        assert isinstance(transformer, SequentialDataTransformer)
        assert transformer.stack_size == 4
        assert transformer.transformed_observation_spec == BoundedTensorSpec((8, 3), torch.float32, -1., 1.)
        steps = history(12, 2, spec)
        found = rollout_of(transformer, steps)
        stacked = rollout_of(FrameStacker(spec), steps).observation
        torch.testing.assert_close(found.observation, stacked.float() / 127.5 - 1)
        assert torch.equal(found.untransformed.observation, steps.observation)
        assert torch.equal(found.reward, steps.reward * 2)
        buffer = stored(steps, max_length=20)
        batch, info = buffer.gather_all()
        result = transformer.transform_experience(add_batch_info(batch, info, buffer)).time_step
        for (path, a), b in zip(nest.flatten_with_path(result), nest.flatten(found)):
            torch.testing.assert_close(a, b.transpose(0, 1), msg=path)

    @pytest.mark.parametrize('ctors,message', [
        ([ImageScaleTransformer, FrameStacker], 'FrameStacker has to come before ImageScaleTransformer'),
        ([lambda **kw: RewardScaling(2.0, **kw), FrameStacker], 'FrameStacker has to come before RewardScaling'),
        ([FrameStacker, UntransformedTimeStep], 'UntransformedTimeStep has to come first'),
        ([FrameStacker, FrameStacker], 'stacked twice'),
    ])
    def test_a_wrong_order_is_rejected(self, ctors, message):
        with pytest.raises(SpecError, match=message):
            create_data_transformer(ctors, IMAGE)

    @pytest.mark.parametrize('ctor', [None, [], IdentityDataTransformer, [IdentityDataTransformer]])
    def test_without_transformers_data_does_not_change(self, ctor):
        transformer = create_data_transformer(ctor, IMAGE)
        step = time_step(sample(IMAGE, 2))
        assert transformer.transform_timestep(step, ())[0] is step
        assert transformer.transformed_observation_spec is IMAGE and transformer.state_spec == ()
        assert transformer.stack_size == 1

    def test_the_engine_knows_which_transformers_change_experience(self):
        class Negated(IdentityDataTransformer):
            def _transform(self, time_step):
                return time_step._replace(reward=-time_step.reward)

        assert not create_data_transformer(None, IMAGE).changes_experience
        assert all(cls(IMAGE).changes_experience for cls in (Negated, UntransformedTimeStep, FrameStacker))

    def test_the_spec_of_the_result_needs_the_spec_of_the_observation(self):
        with pytest.raises(ValueError, match='observation_spec'):
            UntransformedTimeStep().transformed_observation_spec

    def test_a_conf_file_sets_arguments_of_listed_transformers(self):
        gin.parse_config("""
            RewardScaling.scale = 0.25
            FrameStacker.stack_size = 2
            data_transformer.RewardClipping.minmax = (0, 1)
            """)
        transformer = create_data_transformer([FrameStacker, RewardScaling, RewardClipping], IMAGE)
        assert transformer.stack_size == 2
        result, _ = transformer.transform_timestep(
            time_step(sample(IMAGE, 2), reward=torch.tensor([2.0, 8.0])), zeros_from_spec(transformer.state_spec, 2))
        assert result.reward.tolist() == [0.5, 1.0]


def test_a_goal_within_the_threshold_is_reached():
    goal = torch.zeros(1, 3, 2)
    achieved = torch.tensor([[[0.03, 0.03], [0.04, 0.04], [1.0, 0.0]]])
    assert dt.l2_dist_close_reward_fn(achieved, goal).tolist() == [[0.0, -1.0, -1.0]]
    assert dt.l2_dist_close_reward_fn(achieved, goal, threshold=0.06).tolist() == [[0.0, 0.0, -1.0]]
    assert dt.l2_dist_close_reward_fn(achieved[..., 0], goal[..., 0]).tolist() == [[0.0, 0.0, -1.0]]


# On-policy training --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('make, message', [
    (ObservationNormalizer, r"has ObservationNormalizer, which .* set ObservationNormalizer.update_mode = 'rollout'"),
    (RewardNormalizer, r"has RewardNormalizer, .* set RewardNormalizer.update_mode = 'rollout'"),
    (lambda spec: SequentialDataTransformer([IdentityDataTransformer, RewardNormalizer], spec), 'has RewardNormalizer'),
    (lambda spec: type('Late', (RewardScaling, ), {'update_mode': 'replay'})(2.0, spec), 'has Late, .* leave it out'),
    (partial(ObservationNormalizer, update_mode='rollout'), None), (lambda spec: RewardScaling(2.0, spec), None)])
def test_transformers_without_effect_on_policy_are_rejected(make, message):
    def agent_of(algorithm):
        return make_agent(algorithm, 'continuous', data_transformer=lambda env: make(env.observation_spec()))[0]

    assert agent_of('ppo').train_iter()
    if message is None:
        assert agent_of('actor-critic').train_iter()
    else:
        with pytest.raises(ConfError, match=message.replace(' .* ', '(?s: .* )')):
            agent_of('actor-critic')
