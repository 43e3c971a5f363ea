"""Properties of an algorithm that the engine has to know in advance.

Each class declares its capabilities (``Algorithm.own_capabilities``). The capabilities of an algorithm and its parts
are joined by the rule of each field, so that a wrapper does not have to forward them.
"""
from collections.abc import Sequence
from typing import NamedTuple

from alfx.utils.renamed import FIELDS, warn_renamed


class _Fields(NamedTuple):
    """Properties of an algorithm, declared by its class and joined with the capabilities of its parts.

    A field is joined by one of three rules: (all) the algorithm and all parts have it, (any) the algorithm or any part
    has it, (actors) the algorithm and the part that chooses the actions have it.

    Attributes:
        traceable_update: (all) an update executes the same tensor operations every time, so that it can be traced and
            compiled. No number, schedule or counter kept in Python decides what ``train_step`` and ``calc_loss``
            compute, except through ``graph_key``, and ``after_update`` does not read the infos.
        trains_sequences_at_once: (all) ``train_sequence`` computes for a sequence what ``train_step`` computes for its
            steps one after the other. That holds for stateless algorithms. An algorithm whose state is only the
            previous step may declare it if its ``train_sequence`` reads that step from the sequence.
        recomputes_rollout_info: (actors) ``train_step`` on stored steps returns the infos that ``rollout_step``
            would have returned. On-policy training then collects with ``collect_step`` and without gradients, and
            computes the infos of all ``[T * B]`` steps at once.
        needs_previous_step: (any) the loss of a step needs the previous step, so a sequence of one step that starts
            from a zero state has no loss.
        needs_two_steps: (any) the loss of a transition needs both of its steps in the training sequence, whatever the
            state at its start.
        bootstraps_sequences: (any) the last step of a training sequence is only used to bootstrap from and has no
            loss. Whole unrolls are cut into sequences of ``mini_batch_length + 1`` steps that overlap by one; of a
            sampled sequence of ``mini_batch_length`` steps, all but the last are trained on.
        trains_after_iteration: (any) ``after_train_iter`` does something; only then are its arguments computed.
        traceable_prediction: (actors) ``predict_step`` is stateless and reads only the observation and the action
            mask. It executes the same tensor operations every time, except through ``prediction_graph_key``, so that it
            can be traced. Evaluation then reads nothing from its info.
        postprocesses_unrolls: (any) ``postprocess_unroll`` or ``postprocess_steps`` adds something.
        has_offline_hooks: (any) ``train_step_offline`` or ``calc_loss_offline`` differs from ``train_step`` or
            ``calc_loss``, so stored datasets cannot be trained on in one batch with collected experience.
    """

    traceable_update: bool = False
    trains_sequences_at_once: bool = False
    recomputes_rollout_info: bool = False
    traceable_prediction: bool = False
    needs_previous_step: bool = False
    needs_two_steps: bool = False
    bootstraps_sequences: bool = False
    trains_after_iteration: bool = False
    postprocesses_unrolls: bool = False
    has_offline_hooks: bool = False


class Capabilities(_Fields):
    __doc__ = _Fields.__doc__ or ''
    __slots__ = ()

    def _replace(self, **changes: bool) -> 'Capabilities':
        """Return a copy with other values; former names of fields are accepted with a warning."""
        for old, new in FIELDS.items():
            if old in changes:
                warn_renamed(f'Capabilities.{old}', new)
                changes[new] = changes.pop(old)
        return super()._replace(**changes)

    @property
    def needs_unroll_inputs(self) -> bool:
        """Return whether the transformed time steps of an unroll are needed besides its experience."""
        return self.trains_after_iteration or self.postprocesses_unrolls

    def joined(self, parts: 'Sequence[Capabilities]', acting: 'Capabilities | None') -> 'Capabilities':
        """Return the capabilities of an algorithm that has parts.

        Args:
            parts: capabilities of all parts.
            acting: capabilities of the part that chooses the actions, if there is one.
        """
        everything = self, *parts
        actors = self if acting is None else acting, self
        return Capabilities(**{name: all(getattr(x, name) for x in everything) for name in _ALL},
                            **{name: any(getattr(x, name) for x in everything) for name in _ANY},
                            **{name: all(getattr(x, name) for x in actors) for name in _ACTING})


_ALL = ('traceable_update', 'trains_sequences_at_once')
_ANY = ('needs_previous_step', 'needs_two_steps', 'bootstraps_sequences', 'trains_after_iteration',
        'postprocesses_unrolls', 'has_offline_hooks')
_ACTING = ('recomputes_rollout_info', 'traceable_prediction')
assert {*_ALL, *_ANY, *_ACTING} == set(Capabilities._fields), 'each capability needs a rule'
