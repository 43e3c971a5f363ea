"""Adam's step as part of a compiled update on the CPU.

Called by itself after the update, the step of an optimizer finds the gradients, the moments and the parameters outside
of the nearest caches, and with small networks the way to its kernel takes as long as the kernel. Here it follows within
the compiled function. It changes no parameter and no moment where the loss is not finite.
"""
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor

from alfx.engine.recording import UpdateRecorder
from alfx.optimizers.fused import FusedAdamBase

if TYPE_CHECKING:
    from alfx.algorithms.algorithm import Algorithm


class _State:
    """What the step of one optimizer reads and changes besides the parameters and their moments.

    Args:
        places: of each bucket of the optimizer, where its parameters are among those of the recorder.

    Attributes:
        rates: the learning rate of each bucket, float64.
        norm: of all gradients before they were clipped; that of the latest step.
        clips: whether the recorded step computes it.
    """

    def __init__(self, places: list[list[int]]) -> None:
        self.places = places
        self.rates = torch.zeros(len(places), dtype=torch.float64)
        self.norm = torch.zeros(())
        self.clips = False
        array: Any = self.rates.numpy()
        self._numbers: Any = memoryview(array)

    def set_rates(self, buckets: Sequence[Any]) -> None:
        """Those of the next step."""
        for i, bucket in enumerate(buckets):
            self._numbers[i] = bucket.group['lr']


class AdamStep:
    """The steps of all optimizers of an algorithm. Make it with :meth:`of`."""

    @classmethod
    def of(cls, algorithm: 'Algorithm', recorder: UpdateRecorder) -> Optional['AdamStep']:
        """The steps of the optimizers of ``algorithm``; ``None`` if they have to make them themselves."""
        optimizers = algorithm.what_is_updated()[0]
        if _are_gradients_needed(algorithm) or not all(map(_is_plain_adam, optimizers)):
            return None
        step = cls(algorithm, optimizers, recorder)
        places = [place for state in step._states for of_bucket in state.places for place in of_bucket]
        return step if sorted(places) == list(range(len(recorder.params))) else None

    def __init__(self, algorithm: 'Algorithm', optimizers: Sequence[FusedAdamBase], recorder: UpdateRecorder) -> None:
        places = {id(p): i for i, p in enumerate(recorder.params)}
        self._algorithm = algorithm
        self._shows_gradients = algorithm._config is not None and algorithm._config.summarize_grads_and_vars
        self._optimizers = optimizers
        self._trained = recorder.trained
        self._states = [_State([[places.get(id(p), -1) for p in bucket.params] for bucket in optimizer.buckets()])
                        for optimizer in optimizers]
        self._settings = list(map(_settings, optimizers))
        self._buckets: list[Any] = []
        self._tensors: list[Tensor] = []

    def __deepcopy__(self, memo: Any) -> 'AdamStep':
        return self  # the record of a copied algorithm is made anew, since its tensors lie elsewhere

    @property
    def is_current(self) -> bool:
        """Whether the optimizers still have the settings that were recorded, and nobody has asked for hooks."""
        return (not _are_gradients_needed(self._algorithm) and not any('step' in vars(x) for x in self._optimizers)
                and list(map(_settings, self._optimizers)) == self._settings)

    def prepare(self) -> list[Tensor]:
        """Get ready for a step; returns the :meth:`tensors`."""
        for optimizer, state in zip(self._optimizers, self._states):
            optimizer.ask_schedules()
            state.set_rates(optimizer.buckets())
            if state.clips:
                optimizer._grad_norm = state.norm
        return self.tensors()

    def tensors(self) -> list[Tensor]:
        """What the recorded step reads and changes besides the parameters, as it is now.

        Raises:
            ValueError: a moment does not have the shape of its parameter.
        """
        buckets: list[Any] = [optimizer.buckets() for optimizer in self._optimizers]
        if len(buckets) != len(self._buckets) or any(a is not b for a, b in zip(buckets, self._buckets)):
            for bucket in (bucket for of_one in buckets for bucket in of_one):
                _check_moments(bucket)
            self._buckets = buckets
            self._tensors = []
            for of_one, state in zip(buckets, self._states):
                self._tensors += [state.rates, state.norm]
                for bucket in of_one:
                    self._tensors += [bucket.counts.block, *bucket.exp_avgs, *bucket.exp_avg_sqs]
        return self._tensors

    def record(self, tensors: Sequence[Tensor], state: Sequence[Tensor], loss: Tensor,
               grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Make the steps; for recording.

        Args:
            tensors: those of the recorder; the parameters among them are changed.
            state: in the place of :meth:`tensors`; they are changed.
            loss: scalar; where it is not finite, everything but the norms of gradients stays.
            grads: one for each parameter of the recorder; those without one stay.

        Returns:
            ``grads``, clipped; ``None`` for each if nobody looks at them
        """
        params, clipped, rest = [tensors[i] for i in self._trained], list(grads), list(state)
        is_finite = torch.isfinite(loss)
        for optimizer, own in zip(self._optimizers, self._states):
            rates, norm = rest[:2]
            del rest[:2]
            mine = [i for of_bucket in own.places for i in of_bucket if grads[i] is not None]
            max_norm = optimizer.gradient_clipping
            own.clips = max_norm is not None and bool(mine)
            if max_norm is not None and mine:
                _clip(clipped, mine, max_norm, norm)
            for places, bucket, rate in zip(own.places, optimizer.buckets(), rates.unbind()):
                number = len(places)
                counts, *moments = rest[:1 + 2 * number]
                del rest[:1 + 2 * number]
                found = [clipped[i] for i in places]
                scales = _scales(counts, rate, bucket.group)
                for i, grad in enumerate(found):
                    if grad is not None:
                        _adam(params[places[i]], grad, moments[i], moments[number + i], scales[:, i], bucket.group,
                              optimizer._decoupled_weight_decay, is_finite)
                _count(counts, [g is not None for g in found], is_finite)
        return clipped if self._shows_gradients else [None] * len(grads)


def _are_gradients_needed(algorithm: 'Algorithm') -> bool:
    """Whether something looks at the gradients between the update and the step."""
    return algorithm.gradient_averager is not None or algorithm.gradient_noise_scale is not None


_METHODS = ('step', 'buckets', 'ask_schedules', 'clip_gradients', '_before_step', '_clip', '_update', '_count_steps',
            '_eps')


def _check_moments(bucket: Any) -> None:
    """The compiled code takes them to be laid out as they were, and looks no more."""
    for param, *moments in zip(bucket.params, bucket.exp_avgs, bucket.exp_avg_sqs):
        for moment in moments:
            if moment.shape != param.shape or not moment.is_contiguous() or moment.dtype != param.dtype:
                raise ValueError(f'the state of an optimizer: expected a moment {tuple(param.shape)} without gaps, of '
                                 f'{param.dtype}, found {tuple(moment.shape)} with strides {moment.stride()}, of '
                                 f'{moment.dtype}; was it loaded from a checkpoint of other networks?')


def _is_plain_adam(optimizer: Any) -> bool:
    """Whether a step is what :class:`FusedAdamBase` does, on numbers that this module can handle."""
    cls = type(optimizer)
    return (isinstance(optimizer, FusedAdamBase) and 'step' not in vars(optimizer)
            and all(getattr(cls, name) is getattr(FusedAdamBase, name) for name in _METHODS)
            and (optimizer.gradient_clipping is None or optimizer.clip_by_global_norm)
            and all(not bucket.group['amsgrad'] and bucket.counts is not None and bucket.is_contiguous
                    and all(p.is_cpu and p.dtype == torch.float32 for p in bucket.params)
                    for bucket in optimizer.buckets()))


def _settings(optimizer: FusedAdamBase) -> list[Any]:
    """What is constant in a recorded step."""
    groups = [(bucket.group, len(bucket.params)) for bucket in optimizer.buckets()]
    return [(group['betas'], group['eps'], group['weight_decay'], group['amsgrad'], n) for group, n in groups]


def _clip(grads: list[Any], mine: list[int], max_norm: float, norm: Tensor) -> None:
    """Divide those of ``grads`` at ``mine`` by ``max(1, norm / max_norm)`` and keep their norm in ``norm``."""
    found = torch.stack([(grads[i] * grads[i]).sum() for i in mine]).sum().sqrt()
    factor = 1.0 / (found / max_norm).clamp(min=1.0)
    for i in mine:
        grads[i] = grads[i] * factor
    norm.copy_(found)


def _scales(counts: Tensor, rate: Tensor, group: dict[str, Any]) -> Tensor:
    """The numbers in the next step of each parameter, ``[3, n]``.

    They are the learning rate over the correction of the first moment, what the root of the second moment is multiplied
    by to correct it, and what decoupled weight decay leaves of the parameter. Computed in float64: the corrections are
    differences of nearly equal numbers.

    Args:
        counts: of the steps so far, ``[n]``.
        rate: scalar, float64.
        group: of the optimizer.
    """
    steps = counts.double() + 1.0
    beta1, beta2 = group['betas']
    left = (1.0 - rate * group['weight_decay']).expand_as(steps)
    return torch.stack([rate / (1.0 - beta1**steps), (1.0 - beta2**steps).rsqrt(), left]).float()


def _count(counts: Tensor, have_gradients: list[bool], is_finite: Tensor) -> None:
    """Count a step of those that have a gradient."""
    steps = counts + 1.0
    if not all(have_gradients):
        steps = torch.stack([(steps if has else counts)[i] for i, has in enumerate(have_gradients)])
    counts.copy_(torch.where(is_finite, steps, counts))


def _adam(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scales: Tensor, group: dict[str, Any],
          is_decoupled: bool, is_finite: Tensor) -> None:
    """One step of a parameter (Kingma and Ba 2015, algorithm 1) with its ``scales`` ``[3]``."""
    (beta1, beta2), decay = group['betas'], group['weight_decay']
    if decay and not is_decoupled:
        grad = grad + decay * param
    first = exp_avg + (1.0 - beta1) * (grad - exp_avg)
    second = beta2 * exp_avg_sq + (1.0 - beta2) * grad * grad
    start = param * scales[2] if decay and is_decoupled else param
    end = start - scales[0] * first / (second.sqrt() * scales[1] + group['eps'])
    for old, new in ((param, end), (exp_avg, first), (exp_avg_sq, second)):
        old.copy_(torch.where(is_finite, new, old))
