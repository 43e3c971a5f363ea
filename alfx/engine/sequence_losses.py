"""The losses of an algorithm for a batch of experience, as one object that a gradient step can call."""
import torch

from alfx import context
from alfx.config import TrainerConfig
from alfx.data_structures import Experience, LossInfo, require_loss_info
from alfx.engine.batch_sources import concatenate
from alfx.engine.contract import Trains
from alfx.engine.loss_reduction import masked_loss
from alfx.engine.minibatches import compute_train_info
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, extract_spec

Losses = tuple[LossInfo, torch.Tensor | None, NestedTensor]


class SequenceLosses:
    """Losses of sequences of experience, each as a method from a batch to ``(losses, masks, infos)``.

    The losses are ``[T, B]``, or ``[T - 1, B]`` if the last step of a sequence is only used to bootstrap from
    (``Capabilities.bootstraps_sequences``). The masks have the same shape. The infos ``[T, B, ...]`` are the input of
    ``calc_loss``.

    Args:
        algorithm: computes infos and losses.
        settings: configuration of the run, or ``None``.

    Attributes:
        train_info_spec: spec of the infos; ``None`` before the first batch.
    """

    def __init__(self, algorithm: Trains, settings: TrainerConfig | None):
        self._algorithm, self._settings = algorithm, settings
        self.train_info_spec: NestedTensorSpec = None

    def train_info(self, experience: Experience, offline: bool = False) -> NestedTensor:
        """Infos ``[T, B, ...]`` of ``train_step`` (of its offline hook if ``offline``) for ``[T, B, ...]``."""
        independent = self._settings.temporally_independent_train_step if self._settings is not None else None
        if independent is None:
            independent = self._algorithm.capabilities.trains_sequences_at_once
        return self._described(compute_train_info(self._algorithm, experience, independent, offline))

    def collected(self, experience: Experience) -> Losses:
        """Losses of collected experience ``[T, B, ...]``."""
        return self._masked(self.train_info(experience), experience, self._algorithm.capabilities.bootstraps_sequences)

    def offline(self, experience: Experience) -> Losses:
        """Losses of stored datasets ``[T, B, ...]``, by the offline hooks."""
        train_info = self.train_info(experience, offline=True)
        loss_info = self._algorithm.calc_loss_offline(train_info, context.is_pretrain())
        return *masked_loss(loss_info, experience.time_step.step_type,
                            self._algorithm.capabilities.bootstraps_sequences), train_info

    def hybrid(self, batches: tuple[Experience, Experience]) -> Losses:
        """Losses of collected experience, followed by those of stored datasets; the infos are those of the former."""
        collected, masks, train_info = self.collected(batches[0])
        offline, offline_masks, _ = self.offline(batches[1])
        assert masks is not None and offline_masks is not None, 'the losses of sequences need masks'
        return concatenate(collected, offline), torch.cat((masks, offline_masks), 1), train_info

    def unroll(self, experience: Experience) -> Losses:
        """Losses of an unroll ``[T + 1, B, ...]`` whose last step is only used to bootstrap from."""
        return self._masked(self.train_info(experience), experience, bootstraps=True)

    def unroll_with_info(self, unroll: tuple[NestedTensor, Experience]) -> Losses:
        """Losses of an unroll whose infos ``[T + 1, B, ...]`` have been computed while it was collected."""
        self._described(unroll[0])
        return self._masked(*unroll, bootstraps=True)

    def _described(self, train_info: NestedTensor) -> NestedTensor:
        if self.train_info_spec is None:
            self.train_info_spec = extract_spec(train_info, from_dim=2)
        return train_info

    def _masked(self, train_info: NestedTensor, experience: Experience, bootstraps: bool) -> Losses:
        loss_info = require_loss_info(self._algorithm.calc_loss(train_info), self._algorithm)
        loss_info, masks = masked_loss(loss_info, experience.time_step.step_type, bootstraps)
        return loss_info, masks, train_info
