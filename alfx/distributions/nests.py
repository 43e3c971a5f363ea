"""Registration of distributions as nodes of a nest: how each class is flattened and rebuilt.

Every class is registered once with :func:`register`. The classes of this package are registered where they are defined,
those of torch at the end of this module. Read next: :mod:`alfx.utils.dist_utils`.
"""
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributions as td

from alfx import nest

_MISSING = object()
_SCRATCH = frozenset(('_cached_x_y', '_cache_size', '_inv', '_log_det'))


class _Entry(NamedTuple):
    names: Callable[[Any], tuple[str, ...]]
    get_params: Callable[[Any], tuple[tuple[Any, ...], Any]]


_registry: dict[type, _Entry] = {}


def register(cls: type[td.Distribution], names: tuple[str, ...] | Callable[[Any], tuple[str, ...]],
             get_params: Callable[[Any], tuple[tuple[Any, ...], Any]],
             rebuild: Callable[[tuple[Any, ...], Any], Any]) -> None:
    """Register distributions of the exact class ``cls`` as nodes of a nest with named parameters.

    Args:
        cls: the class; its subclasses have to be registered separately.
        names: the names of the parameters, or a function of the distribution that returns them.
        get_params: see :func:`alfx.nest.register_distribution`.
        rebuild: see :func:`alfx.nest.register_distribution`.
    """
    _registry[cls] = _Entry(names if callable(names) else lambda dist: names, get_params)
    nest.register_distribution(cls, get_params, rebuild)


def named_children(dist: td.Distribution) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Return the names and values of the parameters of ``dist``; a value may be a distribution.

    Raises:
        TypeError: the class of ``dist`` is not registered.
    """
    entry = _registry.get(type(dist))
    if entry is None:
        known = ', '.join(sorted(cls.__name__ for cls in _registry))
        raise TypeError(f'{type(dist).__name__} is not registered as a nest; register it with '
                        f'alfx.distributions.nests.register, or use one of {known}')
    return entry.names(dist), entry.get_params(dist)[0]


def shape_of(parameter: Any) -> torch.Size:
    """Return the shape of a tensor or spec; ``()`` for a placeholder without a shape."""
    return torch.Size(getattr(parameter, 'shape', ()))


def rebuilt(cls: type, /, **attributes: Any) -> Any:
    """Create a distribution from its attributes, without its constructor, which would check and broadcast them."""
    dist: Any = object.__new__(cls)
    dist.__dict__.update(attributes)
    return dist


class TransformChain:
    """A sequence of transforms that can be compared and hashed, unlike the transforms of torch.

    Two chains are equal if their transforms have pairwise the same class and settings; tensors among the settings (such
    as the bounds of an action) are compared by value.
    """

    __slots__ = ('transforms', )

    def __init__(self, transforms: list[td.Transform]):
        self.transforms = transforms

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TransformChain):
            return NotImplemented
        own, others = self.transforms, other.transforms
        return own is others or (len(own) == len(others) and all(map(_same_transform, own, others)))

    def __hash__(self) -> int:
        return hash(tuple(type(t) for t in self.transforms))

    def __repr__(self) -> str:
        return repr(self.transforms)


def _same_transform(a: td.Transform, b: td.Transform) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, td.transforms._InverseTransform):
        return _same_transform(a.inv, b.inv)
    settings_a, settings_b = ({k: v for k, v in vars(t).items() if k not in _SCRATCH} for t in (a, b))
    return (settings_a.keys() == settings_b.keys() and
            all(same_setting(value, settings_b[key]) for key, value in settings_a.items()))


def same_setting(a: Any, b: Any) -> bool:
    """Return whether two constants of a distribution are equal; tensors are compared by value."""
    if a is b:
        return True
    if isinstance(a, td.Transform):
        return isinstance(b, td.Transform) and _same_transform(a, b)
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.dtype == b.dtype
                and a.device == b.device and torch.equal(a, b))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same_setting, a, b))
    return bool(a == b)


# Distributions of torch -------------------------------------------------------------------------------------------


def _of_torch(cls: type[td.Distribution], batch_shape: torch.Size, event_shape: torch.Size = torch.Size(), /,
              **attributes: Any) -> Any:
    return rebuilt(cls, _validate_args=False, _batch_shape=batch_shape, _event_shape=event_shape, **attributes)


def _register_elementwise(cls: type[td.Distribution], names: tuple[str, ...]) -> None:
    """Register a distribution over numbers whose parameters are attributes with the shape of its samples."""
    register(cls, names, lambda dist: (tuple(getattr(dist, name) for name in names), None),
             lambda params, _: _of_torch(cls, shape_of(params[0]), **dict(zip(names, params))))


def _parametrization(dist: Any) -> tuple[str]:
    # torch stores the given parameter as _param, and caches the other one once it is used
    return ('probs', ) if dist.__dict__.get('probs', _MISSING) is dist._param else ('logits', )


def _rebuild_categorical(cls: type[td.Distribution], params: tuple[Any, ...], name: str) -> Any:
    shape = shape_of(params[0])
    return _of_torch(cls, shape[:-1], _param=params[0], _num_events=shape[-1] if shape else 0, **{name: params[0]})


def _rebuild_one_hot(cls: type[td.Distribution], params: tuple[Any, ...], name: str) -> Any:
    shape = shape_of(params[0])
    return _of_torch(cls, shape[:-1], shape[-1:], _categorical=_rebuild_categorical(td.Categorical, params, name))


def _rebuild_bernoulli(params: tuple[Any, ...], name: str) -> Any:
    return _of_torch(td.Bernoulli, shape_of(params[0]), _param=params[0], **{name: params[0]})


def _rebuild_beta(params: tuple[Any, ...], static: Any) -> Any:
    shape = shape_of(params[0])
    dirichlet = _of_torch(td.Dirichlet, shape[:-1], shape[-1:], concentration=params[0])
    return _of_torch(td.Beta, shape[:-1], _dirichlet=dirichlet)


def _rebuild_independent(params: tuple[Any, ...], ndims: int) -> Any:
    base = params[0]
    batch_shape = getattr(base, 'batch_shape', torch.Size())
    cut = len(batch_shape) - ndims
    return _of_torch(td.Independent, batch_shape[:cut], batch_shape[cut:] + getattr(base, 'event_shape', torch.Size()),
                     base_dist=base, reinterpreted_batch_ndims=ndims)


def _rebuild_transformed(params: tuple[Any, ...], static: tuple[TransformChain, torch.Size]) -> Any:
    base, (chain, event_shape) = params[0], static
    shape = getattr(base, 'batch_shape', torch.Size()) + getattr(base, 'event_shape', torch.Size())
    for transform in chain.transforms:
        shape = transform.forward_shape(shape) if len(shape) >= transform.domain.event_dim else shape
    return _of_torch(td.TransformedDistribution, shape[:len(shape) - len(event_shape)], event_shape, base_dist=base,
                     transforms=chain.transforms)


def _rebuild_mixture(params: tuple[Any, ...], static: tuple[int, int, torch.Size]) -> Any:
    mixture, component = params
    num_component, event_ndims, event_shape = static
    return _of_torch(td.MixtureSameFamily, getattr(mixture, 'batch_shape', torch.Size()), event_shape,
                     _mixture_distribution=mixture, _component_distribution=component, _num_component=num_component,
                     _event_ndims=event_ndims)


def _register_torch() -> None:
    for cls in (td.Normal, td.Cauchy, td.Laplace, td.Gumbel):
        _register_elementwise(cls, ('loc', 'scale'))
    _register_elementwise(td.Uniform, ('low', 'high'))
    _register_elementwise(td.Gamma, ('concentration', 'rate'))
    _register_elementwise(td.Exponential, ('rate', ))
    register(td.Categorical, _parametrization, lambda d: ((d._param, ), _parametrization(d)[0]),
             functools.partial(_rebuild_categorical, td.Categorical))
    for one_hot in (td.OneHotCategorical, td.OneHotCategoricalStraightThrough):
        register(one_hot, lambda d: _parametrization(d._categorical),
                 lambda d: ((d._categorical._param, ), _parametrization(d._categorical)[0]),
                 functools.partial(_rebuild_one_hot, one_hot))
    register(td.Bernoulli, _parametrization, lambda d: ((d._param, ), _parametrization(d)[0]), _rebuild_bernoulli)
    register(td.Beta, ('concentration', ), lambda d: ((d._dirichlet.concentration, ), None), _rebuild_beta)
    register(td.Independent, ('base', ), lambda d: ((d.base_dist, ), d.reinterpreted_batch_ndims), _rebuild_independent)
    register(td.TransformedDistribution, ('base', ),
             lambda d: ((d.base_dist, ), (TransformChain(d.transforms), d.event_shape)), _rebuild_transformed)
    register(td.MixtureSameFamily, ('mixture', 'components'),
             lambda d: ((d._mixture_distribution, d._component_distribution),
                        (d._num_component, d._event_ndims, d._event_shape)), _rebuild_mixture)


_register_torch()
