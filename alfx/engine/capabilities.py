"""What the loops have to know of an algorithm besides its methods.

Declared by each class (``Algorithm.own_capabilities``) and joined by a rule, so that what is around an algorithm
need not hand it on.
"""
from collections.abc import Sequence
from typing import NamedTuple


class Capabilities(NamedTuple):
    """What the loops have to know of an algorithm: declared by its class, joined with the capabilities of its parts.

    Attributes:
        traceable_update: (all) an update is the same tensor operations every time, so that it can be recorded and
        compiled:
            no number, schedule or counter kept in Python decides what ``train_step`` and ``calc_loss`` compute, but for
            what ``graph_key`` tells, and ``after_update`` does not look at the infos.
        trains_sequences_at_once: (all) ``train_sequence`` does for a sequence what ``train_step`` does step by step.
            That is so without a state. An algorithm whose state is nothing but the step before may say so as well, if
            its own ``train_sequence`` looks at the step before in the sequence.
        recomputes_rollout_info: (all that act) ``train_step`` on stored steps yields the infos that ``rollout_step``
            would have yielded. Then on-policy training collects with ``collect_step`` and without gradients, and
            computes the infos of all ``[T * B]`` steps at once: the same numbers from one large graph.
        needs_previous_step: (any) the loss of a step needs the step before it, so that a sequence of one step from
            zeros has none.
        bootstraps_sequences: (any) the last step of a training sequence is there only to bootstrap from: its loss does
            not count. Whole unrolls are then cut into sequences of ``mini_batch_length`` steps and one more, the first
            one of the next sequence; of a sampled sequence of ``mini_batch_length`` steps all but the last are trained
            on.
        trains_after_iteration: (any) ``after_train_iter`` does something: only then are its arguments made.
        traceable_prediction: (all that act) ``predict_step`` has no state and reads of its inputs the observation
        and the
            action mask. It is the same tensor operations every time, but for what ``prediction_graph_key`` tells, so
            that it can be recorded, and evaluation measures nothing in its info.
        postprocesses_unrolls: (any) ``postprocess_unroll`` has something to add.
        has_offline_hooks: (any) ``train_step_offline`` or ``calc_loss_offline`` does something else than ``train_step``
            and ``calc_loss``, so that stored datasets cannot be trained on in one batch with own experience.
    """

    traceable_update: bool = False
    trains_sequences_at_once: bool = False
    recomputes_rollout_info: bool = False
    traceable_prediction: bool = False
    needs_previous_step: bool = False
    bootstraps_sequences: bool = False
    trains_after_iteration: bool = False
    postprocesses_unrolls: bool = False
    has_offline_hooks: bool = False

    @property
    def needs_unroll_inputs(self) -> bool:
        """Whether the transformed time steps of an unroll are needed besides its experience."""
        return self.trains_after_iteration or self.postprocesses_unrolls

    def joined(self, parts: 'Sequence[Capabilities]', acting: 'Capabilities | None') -> 'Capabilities':
        """The capabilities of an algorithm that has parts.

        Args:
            parts: those of all its parts.
            acting: those of the part that chooses the actions, if one does.
        """
        everything = self, *parts
        return Capabilities(**{name: all(getattr(x, name) for x in everything) for name in _ALL},
                      **{name: any(getattr(x, name) for x in everything) for name in _ANY},
                      **{name: all(getattr(x, name) for x in (self, acting) if x is not None) for name in _ACTING})


_ALL = ('traceable_update', 'trains_sequences_at_once')
_ANY = ('needs_previous_step', 'bootstraps_sequences', 'trains_after_iteration', 'postprocesses_unrolls',
        'has_offline_hooks')
_ACTING = ('recomputes_rollout_info', 'traceable_prediction')
assert {*_ALL, *_ANY, *_ACTING} == set(Capabilities._fields), 'each trait has a rule'
