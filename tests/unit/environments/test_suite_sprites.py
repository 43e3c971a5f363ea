"""Images of sprites: contents, segmentation, and behavior of the environment."""
import numpy as np
import pytest
import torch
from test_suites import run, same_continuation

from alfx.environments import suite_sprites
from alfx.environments.environment_errors import EnvironmentLoadError
from alfx.environments.suite_sprites import SpritesEnv, draw_sprites


def draw(count=64, seed=0, **arguments):
    return draw_sprites(np.random.default_rng(seed), count, **arguments)


class TestDrawing:

    def test_pixels_share_a_color_within_a_part_and_differ_between_parts(self):
        images, masks = draw(image_size=24, hue_jitter=0.5)
        for image, mask in zip(images, masks):
            colours = {tuple(c): {int(m) for m in mask[(image == np.reshape(c, (3, 1, 1))).all(0)]}
                       for c in image.reshape(3, -1).T}
            assert all(len(parts) == 1 for parts in colours.values())
            assert len(colours) == len(np.unique(mask))

    def test_the_background_is_grey_and_sprites_are_bright_and_saturated(self):
        images, masks = draw(background=(0.2, 0.4))
        colours = images.transpose(0, 2, 3, 1)
        background = colours[masks == 0]
        assert (background == background[:, :1]).all()
        assert background.min() >= 0.2 * 255 - 0.5 and background.max() <= 0.4 * 255 + 0.5
        sprites = colours[masks > 0]
        assert (sprites.max(-1) == 255).all() and (sprites.min(-1) == 0).all()

    def test_number_of_sprites_is_within_its_bounds(self):
        _, masks = draw(count=300, num_sprites=(1, 4), diameter=(0.2, 0.3), image_size=32)
        num_sprites = masks.reshape(300, -1).max(1)  # the last one is never covered
        assert set(num_sprites.tolist()) == {1, 2, 3, 4}

    @pytest.mark.parametrize('shape, area', [('disc', np.pi), ('square', 2.0), ('triangle', 3 * np.sqrt(3) / 4)])
    def test_shapes_have_the_area_given_by_a_unit_circumscribed_circle(self, shape, area):
        size = 64
        _, masks = draw(count=50, image_size=size, num_sprites=(1, 1), shapes=(shape, ), diameter=(0.8, 0.8))
        found = (masks > 0).sum((1, 2)).mean() / (0.4 * size)**2
        assert found == pytest.approx(area, rel=0.01)

    def test_sprites_of_full_size_touch_the_borders_uncut(self):
        _, masks = draw(count=5, image_size=32, num_sprites=(1, 1), shapes=('disc', ), diameter=(1.0, 1.0))
        for mask in masks:
            assert mask[0].any() and mask[-1].any() and mask[:, 0].any() and mask[:, -1].any()
            assert (mask > 0).sum() == pytest.approx(np.pi * 16**2, rel=0.02)

    def test_hues_without_jitter_are_evenly_spaced(self):
        images, masks = draw(count=20, num_sprites=(3, 3), diameter=(0.2, 0.2), image_size=40, hue_jitter=0.0)
        for image, mask in zip(images, masks):
            if set(np.unique(mask)) == {0, 1, 2, 3}:
                # three hues 120 degrees apart mix to grey
                mixed = sum(image[:, mask == i][:, 0].astype(float) for i in (1, 2, 3))
                assert np.ptp(mixed) <= 3

    def test_same_generator_same_images(self):
        for a, b in zip(draw(seed=3), draw(seed=3)):
            assert np.array_equal(a, b)
        assert not np.array_equal(draw(seed=3)[0], draw(seed=4)[0])

    @pytest.mark.parametrize('arguments, name', [
        (dict(image_size=0), 'image_size'), (dict(num_sprites=(3, 2)), 'num_sprites'),
        (dict(num_sprites=(0, 2)), 'num_sprites'), (dict(shapes=('heart', )), 'shapes'), (dict(shapes=()), 'shapes'),
        (dict(diameter=(0.2, 1.2)), 'diameter'), (dict(background=(0.5, 0.2)), 'background'),
        (dict(hue_jitter=2.0), 'hue_jitter')])
    def test_arguments_out_of_range_are_rejected_by_name(self, arguments, name):
        with pytest.raises(ValueError, match=f'{name}: expected'):
            SpritesEnv(**arguments)


def load(batch_size=3, **env_args):
    return suite_sprites.load('Sprites', batch_size=batch_size, env_args=env_args)


class TestEnvironment:

    def test_every_step_has_a_new_image_and_episodes_are_truncated_unrewarded(self):
        env = load(num_steps=4)
        env.seed(0)
        steps = [env.reset()] + [env.step(torch.zeros(3, dtype=torch.int64)) for _ in range(5)]
        images = torch.stack([step.observation for step in steps]).flatten(0, 1)
        assert images.shape == (18, 3, 16, 16) and images.dtype == torch.uint8
        assert len(torch.unique(images.flatten(1), dim=0)) == 18
        assert [bool(step.is_last().all()) for step in steps] == [False] * 4 + [True, False]
        assert all(bool((step.discount == 1).all()) and bool((step.reward == 0).all()) for step in steps)
        assert bool(steps[-1].is_first().all())

    def test_actions_have_no_effect(self):
        def images(action):
            env = load()
            env.seed(5)
            env.reset()
            return [env.step(torch.full((3, ), action)).observation for _ in range(5)]

        assert all(torch.equal(a, b) for a, b in zip(images(0), images(1)))

    def test_the_mask_is_available_on_request_and_matches_the_image(self):
        plain, masked = load(), load(with_mask=True)
        assert masked.observation_spec()['mask'].maximum == 3
        for env in (plain, masked):
            env.seed(1)
        observation = masked.reset().observation
        assert torch.equal(plain.reset().observation, observation['image'])
        mask = observation['mask']
        assert mask.shape == (3, 16, 16) and mask.dtype == torch.uint8
        grey = (observation['image'] == observation['image'][:, :1]).all(1)
        assert torch.equal(grey, mask == 0)

    def test_a_restored_environment_shows_the_same_images(self):
        same_continuation(lambda: load(with_mask=True, num_steps=3), steps=10, before=5)

    def test_its_time_steps_keep_the_rules_of_environments(self):
        run(load(with_mask=True, num_steps=3), 10)

    def test_unknown_names_are_rejected_with_the_nearest(self):
        with pytest.raises(EnvironmentLoadError, match="did you mean 'Sprites'"):
            suite_sprites.load('Sprite')
