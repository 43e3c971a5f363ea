"""Input preprocessors that are configured by the input spec."""
import gin
import pytest
import torch

from alfx import BoundedTensorSpec, TensorSpec, gin_utils
from alfx.layers import OneHot
from alfx.nest.utils import NestConcat, NestOuterProduct, NestSum
from alfx.networks.encoding_networks import EncodingNetwork
from alfx.networks.preprocessors import CosineEmbeddingPreprocessor, EmbeddingPreprocessor
from alfx.tensor_specs import SpecError

FOUR = BoundedTensorSpec((), torch.int64, 0, 3)


@pytest.fixture
def conf(tmp_path):
    path = tmp_path / 'c.gin'
    path.write_text("""
        EncodingNetwork.fc_layer_params = (8, )
        one_hot/EncodingNetwork.input_preprocessors = @OneHot()
        embedded/EncodingNetwork.input_preprocessors = @EmbeddingPreprocessor
        made/EncodingNetwork.input_preprocessors = @EmbeddingPreprocessor()
        made_wide/EncodingNetwork.input_preprocessors = @wide/EmbeddingPreprocessor()
        scoped/EncodingNetwork.input_preprocessors = @wide/EmbeddingPreprocessor
        EmbeddingPreprocessor.embedding_dim = 5
        wide/EmbeddingPreprocessor.embedding_dim = 6
    """)
    gin_utils.load(str(path))
    yield
    gin_utils.clear()


@pytest.mark.parametrize('scope, size', [('one_hot', 4), ('embedded', 5), ('made', 5), ('made_wide', 6),
                                         ('scoped', 6)])
@pytest.mark.usefixtures('conf')
def test_suggested_code_for_integers_works_as_written(scope, size):
    with gin.config_scope(scope):
        network = EncodingNetwork(FOUR)
    assert network.processed_input_tensor_spec == TensorSpec((size, ))
    assert network(torch.tensor([0, 3]))[0].shape == (2, 8)
    assert network.make_parallel(2)(torch.tensor([0, 3]))[0].shape == (2, 2, 8)


def test_integers_without_a_preprocessor_are_rejected_with_that_proposal():
    with gin_utils.loaded('ppo_cart_pole', ['prepare_inputs.enabled = False']):
        with pytest.raises(SpecError, match=r'@EmbeddingPreprocessor\(\)'):
            EncodingNetwork(FOUR, fc_layer_params=(8, ))


def test_large_integer_ranges_need_a_preprocessor_which_is_proposed():
    with pytest.raises(SpecError, match=r'@EmbeddingPreprocessor\(\)'):
        EncodingNetwork(BoundedTensorSpec((), torch.int64, 0, 5000), fc_layer_params=(8, ))


@pytest.mark.parametrize('spec', [TensorSpec((), torch.int64), TensorSpec((3, )),
                                  BoundedTensorSpec((), torch.int64, -1, 3)])
def test_one_hot_vectors_need_integers_from_0_to_a_bound(spec):
    with pytest.raises(SpecError, match='OneHot: expected integers from 0 to an upper bound'):
        EncodingNetwork(spec, input_preprocessors=OneHot(), fc_layer_params=(8, ))


def test_a_preprocessor_without_a_spec_is_recreated_for_each_part():
    embedding = EmbeddingPreprocessor(embedding_dim=3)
    network = EncodingNetwork({'a': FOUR, 'b': BoundedTensorSpec((2, ), torch.int64, 0, 6), 'c': TensorSpec((5, ))},
                              input_preprocessors={'a': embedding, 'b': embedding, 'c': embedding},
                              preprocessing_combiner=NestConcat())
    assert network.processed_input_tensor_spec == TensorSpec((9, ))
    sizes = [m.num_embeddings for m in network.modules() if isinstance(m, torch.nn.Embedding)]
    assert sizes == [4, 14]
    cosines = EncodingNetwork(TensorSpec(()), input_preprocessors=CosineEmbeddingPreprocessor(embedding_dim=7))
    assert cosines.processed_input_tensor_spec == TensorSpec((7, ))


def test_a_preprocessor_with_unknown_input_raises_when_called():
    with pytest.raises(SpecError, match='EmbeddingPreproc: it was constructed without input_tensor_spec'):
        EmbeddingPreprocessor()(torch.tensor([1]))


def test_otherwise_a_length_is_required():
    with pytest.raises(ValueError, match='num_classes is unknown'):
        OneHot()(torch.tensor([1]))


@pytest.mark.parametrize('combiner, expected', [
    (NestConcat(), (5, )), (NestConcat(nest_mask={'a': True, 'b': False}), (2, )), (NestOuterProduct(), (6, ))])
def test_a_combiner_of_specs_gives_the_spec_of_what_it_combines(combiner, expected):
    specs = {'a': TensorSpec((2, )), 'b': TensorSpec((3, ))}
    assert combiner(specs) == TensorSpec(expected)
    assert NestSum()([specs['a'], specs['a']]) == specs['a']
