"""Preprocessing of a nest of observations into the single tensor that an encoder takes."""
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from alfx import nest
from alfx.layers import Identity, OneHot, copy_module, make_parallel_input, make_parallel_net, out_of_place
from alfx.layers.steps import add_child
from alfx.nest.utils import NestCombiner
from alfx.networks.network import NaiveParallelNetwork, Network, example_batch, is_stacked
from alfx.tensor_specs import (Nested, NestedTensor, NestedTensorSpec, SpecError, TensorSpec, extract_spec,
                               torch_dtype_to_str)

_PREPROCESSORS = ('for integers set input_preprocessors to a dict with the same names: @Cast() for quantities, '
                  '@OneHot() or @EmbeddingPreprocessor() for categories, and None for other tensors')


class PreprocessorNetwork(Network):
    """Network that preprocesses the parts of a nested input and combines them.

    Args:
        input_tensor_spec: nest of specs of the input.
        input_preprocessors: nest of networks, layers or functions whose structure is a prefix of the structure of
            ``input_tensor_spec``; ``None`` at a leaf does not change that part. The preprocessors are copied, with new
            parameters, unless they are singletons, so one conf value can serve several networks. A class, such as
            ``@EmbeddingPreprocessor`` in a conf, is called with the spec of its part. ``@EmbeddingPreprocessor()`` and
            ``@OneHot()``, which were created without a spec, are created again with it.
        preprocessing_combiner: combines the preprocessed parts into one tensor, e.g.
            :class:`~alfx.nest.utils.NestConcat`.
        name: name of the network.

    Attributes:
        processed_input_tensor_spec: spec of the preprocessed and combined input.

    Raises:
        SpecError: the structures do not match, or several tensors are left and there is no combiner.
        ValueError: a preprocessor is recurrent.
    """

    def __init__(self, input_tensor_spec: NestedTensorSpec, input_preprocessors: Nested = None,
                 preprocessing_combiner: Callable[[NestedTensor], torch.Tensor] | None = None,
                 name: str = 'PreprocessorNetwork'):
        super().__init__(input_tensor_spec, (), name)
        self._preprocessors = None
        if input_preprocessors is not None:
            self._set_preprocessors(nest.map_structure(_own_copy, input_preprocessors))
        self._combiner = copy_module(preprocessing_combiner)
        self._set_processed_spec()

    def _set_preprocessors(self, preprocessors: Nested) -> None:
        try:
            nest.assert_same_structure_up_to(preprocessors, self._input_tensor_spec)
        except ValueError:
            found = nest.map_structure(lambda x: x if x is None else type(x).__name__, preprocessors)
            raise SpecError(f'{self._name}.input_preprocessors: expected the structure of the input '
                            f'{self._input_tensor_spec}, with None for parts that stay as they are, found {found}'
                            ) from None
        preprocessors = nest.map_structure_up_to(preprocessors, _for_input, preprocessors, self._input_tensor_spec)
        self._preprocessors = preprocessors
        for path, module in nest.flatten_with_path(preprocessors):
            if isinstance(module, nn.Module):
                add_child(self, f'preprocessor-{path}' if path else 'preprocessor', module)

    def _set_processed_spec(self) -> None:
        """Compute the spec of the preprocessed input, and choose the shortest code path for it."""
        self._preprocess: Any = None
        if self._preprocessors is not None:
            self._preprocess = self._apply_both
        elif self._combiner is not None:
            self._preprocess = self._combiner
        spec = self._input_tensor_spec
        if self._preprocess is not None:
            spec = self._probe_processed_spec()
        if not isinstance(spec, TensorSpec):
            raise SpecError(_several_tensors(self._name, spec))
        self.processed_input_tensor_spec = spec

    def _probe_processed_spec(self) -> NestedTensorSpec:
        """Compute the spec of the preprocessed input, without side effects as in :attr:`Network.output_spec`."""
        training = [m for m in self.modules() if m.training]
        try:
            for module in training:
                module.training = False
            with torch.no_grad(), torch.random.fork_rng([]):
                processed = self._apply_preprocessors(example_batch(self._input_tensor_spec, (2, )))
                if isinstance(self._combiner, NestCombiner):
                    _check_combinable(self._combiner, processed, self._name)
                return extract_spec(processed if self._combiner is None else self._combine(processed))
        except AttributeError as error:  # a preprocessor of one tensor got several
            raise SpecError(f'{self._name}: input_preprocessors: {error}; {_PREPROCESSORS}') from error
        finally:
            for module in training:
                module.training = True

    def _combine(self, processed: NestedTensor) -> NestedTensor:
        try:
            return self._combiner(processed)
        except RuntimeError as error:
            parts = [f"'{path}': {leaf}" for path, leaf in nest.flatten_with_path(extract_spec(processed))]
            raise SpecError(f'{self._name}: the preprocessing_combiner cannot combine {nest.listed(parts)}: {error}; '
                            'add input_preprocessors that turn them into vectors') from None

    def _apply_both(self, inputs: NestedTensor) -> NestedTensor:
        processed = self._apply_preprocessors(inputs)
        return processed if self._combiner is None else self._combiner(processed)

    def _apply_preprocessors(self, inputs: NestedTensor) -> NestedTensor:
        if self._preprocessors is None:
            return inputs
        return nest.map_structure_up_to(self._preprocessors, _apply, self._preprocessors, inputs)

    def forward(self, inputs: NestedTensor, state: NestedTensor = ()) -> tuple[Any, NestedTensor]:
        """Map a nest of ``[B, ...]`` to one tensor ``[B, ...]``."""
        return (inputs if self._preprocess is None else self._preprocess(inputs)), state

    def _stack_preprocessing(self, single: 'PreprocessorNetwork', n: int) -> None:
        """Set up the stack of ``n`` preprocessings like that in ``single``."""
        self._parallelism = n
        self._preprocess = self._preprocessors = self._combiner = None
        combiner: Any = single._combiner
        is_trained = isinstance(combiner, nn.Module) and any(True for _ in combiner.parameters())
        if single._preprocessors is not None:
            self._set_preprocessors(nest.map_structure(  # NaiveParallelNetwork contains a singleton itself, no copies
                lambda p: NaiveParallelNetwork(p, n) if getattr(p, '_singleton', False) else make_parallel_net(p, n),
                single._preprocessors))
        if single._preprocessors is not None or is_trained:
            self._combiner = None if combiner is None else make_parallel_net(combiner, n)
            self._preprocess = self._apply_stacked
        elif combiner is not None:
            self._combiner, self._stacked_combiner = copy_module(combiner), make_parallel_net(combiner, n)
            self._preprocess = self._combine_stacked
        self.processed_input_tensor_spec = single.processed_input_tensor_spec

    def _apply_stacked(self, inputs: NestedTensor) -> NestedTensor:
        if not is_stacked(inputs, self._input_tensor_spec):
            inputs = make_parallel_input(inputs, self._parallelism)
        return self._apply_both(inputs)

    def _combine_stacked(self, inputs: NestedTensor) -> NestedTensor:
        """Combine inputs; inputs shared by all networks are combined once and stay ``[B, ...]``."""
        stacked = is_stacked(inputs, self._input_tensor_spec)
        return self._stacked_combiner(inputs) if stacked else self._combiner(inputs)


def _for_input(preprocessor: Any, spec: NestedTensorSpec) -> Any:
    """Return the preprocessor for inputs of this spec."""
    if isinstance(preprocessor, OneHot):
        return preprocessor.for_input(spec)
    if isinstance(preprocessor, Network) and preprocessor.input_tensor_spec is None:
        return preprocessor.copy(input_tensor_spec=spec)
    return preprocessor(spec) if inspect.isclass(preprocessor) else preprocessor  # type: ignore[call-arg]


def _own_copy(preprocessor: Any) -> Any:
    if preprocessor is None:
        return Identity()
    if isinstance(preprocessor, Network) and preprocessor.is_rnn:
        raise ValueError(f'{preprocessor.name}: a preprocessor cannot be recurrent')
    if not callable(preprocessor):
        raise ValueError(f'input_preprocessors: expected networks, layers or functions, found {preprocessor!r}')
    return out_of_place(copy_module(preprocessor))


def _apply(preprocessor: Any, inputs: NestedTensor) -> NestedTensor:
    return preprocessor(inputs)[0] if isinstance(preprocessor, Network) else preprocessor(inputs)


def _check_combinable(combiner: NestCombiner, nested: NestedTensor, where: str) -> None:
    """Raise ``SpecError`` for integers, which would be combined with floats as quantities."""
    for path, tensor in combiner.combined_leaves(nested):
        if not tensor.dtype.is_floating_point:
            raise SpecError(f"{where}: '{path}' is {torch_dtype_to_str(tensor.dtype)} {tuple(tensor.shape[1:])} and "
                            f'would be combined by {combiner.name} as if it were a quantity; {_PREPROCESSORS}; for '
                            'images add @ImageScaleTransformer to TrainerConfig.data_transformer_ctor')


def _several_tensors(name: str, spec: NestedTensorSpec) -> str:
    parts = [f"'{path}': {leaf}" for path, leaf in nest.flatten_with_path(spec)]
    if any(leaf.dtype == torch.uint8 and leaf.ndim == 3 for leaf in nest.flatten(spec)):
        return (f'{name}: expected one tensor, found a nest of {len(parts)}: {nest.listed(parts)}. Images are not '
                'converted silently: add @ImageScaleTransformer to TrainerConfig.data_transformer_ctor, which scales '
                'them to floats; then each image passes through convolutions')
    return (f'{name}: expected one tensor, found a nest of {len(parts)}: {nest.listed(parts)}. Choose how to combine '
            'them: preprocessing_combiner = @NestConcat() concatenates their last dimensions, which is not automatic '
            f'here; {_PREPROCESSORS}')
