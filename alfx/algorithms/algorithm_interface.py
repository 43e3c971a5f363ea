"""Interface of every algorithm.

An iteration collects experience with ``rollout_step`` and trains on it: on-policy directly through ``calc_loss``,
off-policy by ``train_step`` on samples of the replay buffer. An algorithm defines *what* is computed;
:mod:`alfx.engine` decides when. Read next: :mod:`alfx.algorithms.algorithm`.
"""

from torch import nn

from alfx.data_structures import AlgStep, BatchInfo, Experience, LossInfo
from alfx.tensor_specs import NestedTensor


class AlgorithmInterface(nn.Module):
    """The methods of an algorithm; :class:`alfx.algorithms.algorithm.Algorithm` implements most of them.

    An algorithm that outputs actions is an ``RLAlgorithm``. Any other algorithm is a part of one: it is trained
    together with the ``RLAlgorithm``, or trains itself in ``after_train_iter``.
    """

    @property
    def on_policy(self) -> bool | None:
        """Return whether training uses the infos of ``rollout_step``; False: of ``train_step``, ``None``: not set."""
        raise NotImplementedError(f'{type(self).__name__}.on_policy')

    def set_on_policy(self, is_on_policy: bool) -> None:
        """Set :attr:`on_policy`; an algorithm that supports only the other value raises ``ValueError``."""
        raise NotImplementedError(f'{type(self).__name__}.set_on_policy')

    @property
    def path(self) -> str:
        """Path of this algorithm's fields in ``Experience.rollout_info`` and ``Experience.state``, such as 'a.b'."""
        raise NotImplementedError(f'{type(self).__name__}.path')

    def set_path(self, path: str) -> None:
        """Set :attr:`path`; an algorithm with parts sets theirs too."""
        raise NotImplementedError(f'{type(self).__name__}.set_path')

    def predict_step(self, inputs: NestedTensor, state: NestedTensor) -> AlgStep:
        """Run one step of evaluation or play.

        Args:
            inputs: nest ``[B, ...]``; a ``TimeStep`` for an RL algorithm.
            state: nest ``[B, ...]`` of ``predict_state_spec``.

        Returns:
            ``output`` (for an RL algorithm the action), the next ``state``, and an ``info`` for analysis.
        """
        raise NotImplementedError(f'{type(self).__name__}.predict_step')

    def rollout_step(self, inputs: NestedTensor, state: NestedTensor) -> AlgStep:
        """Run one step of collecting experience.

        Args:
            inputs: nest ``[B, ...]``; a ``TimeStep`` for an RL algorithm.
            state: nest ``[B, ...]`` of ``rollout_state_spec``.

        Returns:
            ``output``, the next ``state``, and the ``info``: ``calc_loss`` receives it stacked to ``[T, B, ...]``
            (on-policy), or ``train_step`` receives it as ``rollout_info`` (off-policy).
        """
        raise NotImplementedError(f'{type(self).__name__}.rollout_step')

    def train_step(self, inputs: NestedTensor, state: NestedTensor, rollout_info: NestedTensor) -> AlgStep:
        """Run one step of training on experience from the replay buffer.

        Args:
            inputs: nest ``[B, ...]``.
            state: nest ``[B, ...]`` of ``train_state_spec``.
            rollout_info: nest ``[B, ...]``: the info of ``rollout_step``, processed by ``preprocess_experience``.

        Returns:
            ``output``, the next ``state``, and the ``info``, which ``calc_loss`` receives stacked to ``[T, B, ...]``.
        """
        raise NotImplementedError(f'{type(self).__name__}.train_step')

    def train_step_offline(self, inputs: NestedTensor, state: NestedTensor, rollout_info: NestedTensor,
                           pre_train: bool = False) -> AlgStep:
        """Run ``train_step`` on experience from an offline buffer; ``pre_train``: before any online experience."""
        raise NotImplementedError(f'{type(self).__name__}.train_step_offline')

    def calc_loss(self, info: NestedTensor) -> LossInfo:
        """Return the loss of each step of each sample: ``info`` is ``[T, B, ...]``, ``LossInfo.loss`` is ``[T, B]``."""
        raise NotImplementedError(f'{type(self).__name__}.calc_loss')

    def calc_loss_offline(self, info: NestedTensor, pre_train: bool = False) -> LossInfo:
        """Return the loss for the infos of ``train_step_offline``, as :meth:`calc_loss`."""
        raise NotImplementedError(f'{type(self).__name__}.calc_loss_offline')

    def preprocess_experience(self, root_inputs: NestedTensor, rollout_info: NestedTensor,
                              batch_info: BatchInfo) -> tuple[NestedTensor, NestedTensor]:
        """Process a batch from the replay buffer before it is trained on; PPO computes its advantages here.

        Args:
            root_inputs: nest ``[B, T, ...]``: inputs of the root algorithm's ``rollout_step``.
            rollout_info: nest ``[B, T, ...]``: this algorithm's infos of ``rollout_step``.
            batch_info: where the batch came from.

        Returns:
            The processed ``root_inputs`` and ``rollout_info``; neither is changed in place.
        """
        return root_inputs, rollout_info

    def after_update(self, root_inputs: NestedTensor, info: NestedTensor) -> None:
        """Called after each gradient update, for instance to update target networks.

        Args:
            root_inputs: nest ``[T, B, ...]``: inputs of the root algorithm.
            info: nest ``[T, B, ...]``: the input of ``calc_loss``; ``()`` if the update ran from a traced graph, which
                needs ``Capabilities.traceable_update``.
        """

    def after_train_iter(self, root_inputs: NestedTensor | None, rollout_info: NestedTensor | None) -> None:
        """Called once per iteration, after its updates; for parts that train themselves.

        Args:
            root_inputs: nest ``[T, B, ...]``: inputs of the root algorithm during the unroll; ``None`` if there was
                none.
            rollout_info: nest ``[T, B, ...]``: this algorithm's infos of ``rollout_step``; ``None`` without an unroll.
        """

    def train_iter(self) -> int:
        """Run one training iteration; return the number of samples trained on."""
        raise NotImplementedError(f'{type(self).__name__}.train_iter')

    def train_from_unroll(self, experience: Experience, train_info: NestedTensor) -> int:
        """Train on ``[T, B, ...]`` experience and infos of an unroll; returns the number of steps trained on."""
        raise NotImplementedError(f'{type(self).__name__}.train_from_unroll')

    def train_from_replay_buffer(self, update_global_counter: bool = False) -> int:
        """Train on this algorithm's replay buffer; returns the number of steps trained on.

        Args:
            update_global_counter: count each update, if ``TrainerConfig.update_counter_every_mini_batch``. Only
                the root algorithm passes True.
        """
        raise NotImplementedError(f'{type(self).__name__}.train_from_replay_buffer')
