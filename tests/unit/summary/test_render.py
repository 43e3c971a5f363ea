"""Pictures of tensors."""

import numpy as np
import pytest
import torch
from torch import distributions as td

import alfx.distributions.nests  # noqa: F401 (makes distributions nests)
from alfx import BoundedTensorSpec, TensorSpec
from alfx.summary import render
from alfx.summary.render import Image


@pytest.fixture(autouse=True)
def rendering():
    render.enable_rendering()
    yield
    render.enable_rendering(False)


def plain(height, width, value=0):
    return Image(np.full((height, width, 3), value, dtype=np.uint8))


SPEC = {'d': BoundedTensorSpec((), torch.int64, 0, 2), 'c': BoundedTensorSpec((2, ), torch.float32, -1, 1)}
PICTURES = {
    'heatmap': lambda **size: render.render_heatmap('n', torch.rand(1, 3, 4), row_labels=list('abc'), **size),
    'contour': lambda **size: render.render_contour('n', torch.rand(5, 6).numpy(), y_ticks=range(5), **size),
    'curve': lambda **size: render.render_curve('n', torch.rand(2, 9), legends=['a', 'b'], y_range=(0, 1), **size),
    '3d curve': lambda **size: render.render_3d_curve('n', torch.rand(9, 3), z_range=(0, 1), **size),
    'bar': lambda **size: render.render_bar('n', torch.rand(2, 3), legends=['a', 'b'], **size),
    'text': lambda **size: render.render_text('speed', '3.5', **size),
}


@pytest.mark.parametrize('name', PICTURES)
def test_pictures_have_the_requested_size_and_are_not_blank(name):
    picture = PICTURES[name](img_height=60, img_width=80)
    assert picture.shape == (60, 80, 3) and picture.data.dtype == np.uint8
    assert len(np.unique(picture.data)) > 2


def test_nothing_is_made_unless_rendering_is_enabled():
    render.enable_rendering(False)
    assert not render.is_rendering_enabled()
    assert render.render_curve('n', object()) is None


def test_data_of_the_wrong_dimensions_is_rejected():
    with pytest.raises(ValueError, match=r'2 dimensions.*\[2, 3, 4\]'):
        render.render_heatmap('n', torch.rand(2, 3, 4))


def test_actions_and_distributions_are_shown_in_the_spec_structure():
    actions = {'d': torch.tensor([1]), 'c': torch.tensor([[0.5, -0.5]])}
    distributions = {'d': td.Categorical(logits=torch.zeros(1, 3)),
                     'c': td.Independent(td.Normal(torch.zeros(1, 2), torch.ones(1, 2)), 1)}
    bars, curves = render.render_action('a', actions, SPEC), render.render_action_distribution('p', distributions, SPEC)
    for pictures in (bars, curves):
        assert set(pictures) == {'d', 'c'} and all(isinstance(p, Image) for p in pictures.values())


def test_an_action_without_bounds_is_shown():
    assert isinstance(render.render_action('a', torch.tensor([[0.5, -0.5]]), TensorSpec((2, ))), Image)


def test_fast_heatmap_by_hand():
    picture = render.render_heatmap_fast(np.array([[0.0, 1.0], [0.5, 2.0]]), 0, 1, pixel_size=2, bar_size=3)
    assert picture.shape == (4, 7, 3)
    assert picture.data[:, :, 0].tolist() == [[0, 0, 255, 255, 255, 255, 255], [0, 0, 255, 255, 170, 170, 170],
                                              [127, 127, 255, 255, 85, 85, 85], [127, 127, 255, 255, 0, 0, 0]]


def test_images_of_different_sizes_are_concatenated():
    both = Image.stack_images([plain(4, 3, 10), plain(2, 5, 20)])
    assert both.shape == (4, 8, 3) and both.data[1, 4, 0] == 20 and both.data[3, 4, 0] == 0
    assert Image.stack_images([plain(4, 3), plain(2, 5)], horizontal=False).shape == (6, 5, 3)
    assert Image.pack_image_nest({'a': plain(4, 3), 'b': (plain(2, 5), 3)}).shape == (4, 8, 3)
    assert Image.pack_image_nest({'a': 1}) is None


def test_resizing_keeps_the_ratio_of_the_sides():
    assert plain(10, 20).resize(height=5).shape == (5, 10, 3)
    assert plain(10, 20).resize(width=40).shape == (20, 40, 3)


def test_gray_pictures_become_color_and_floats_are_rejected():
    assert Image(np.zeros((2, 3), dtype=np.uint8)).shape == (2, 3, 3)
    with pytest.raises(ValueError, match='float64'):
        Image(np.zeros((2, 3)))
