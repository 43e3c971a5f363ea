"""Samplers that choose an action from the probabilities of all actions.

A sampler is called as ``action, state = sampler(probs, state)``. The caller keeps its state, described by
``state_spec``, for each environment; it starts from zeros in each episode, like every state of an algorithm.
"""
import torch
from torch import Tensor, nn

from alfx.distributions.discrete import sample_categories
from alfx.gin_utils import Count, Fraction, NonNegative, configurable
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec


class ActionSampler(nn.Module):
    """Base of samplers.

    Args:
        state_spec: nest of specs of the state of one environment; ``()`` without state.
    """

    def __init__(self, state_spec: NestedTensorSpec = ()):
        super().__init__()
        self._state_spec = state_spec

    @property
    def state_spec(self) -> NestedTensorSpec:
        """Nest of specs of the state."""
        return self._state_spec

    def forward(self, probs: Tensor, state: NestedTensor = ()) -> tuple[Tensor, NestedTensor]:
        """Choose actions.

        Args:
            probs: ``[B, N]``, probabilities or weights, which need not sum to 1.
            state: nest ``[B, ...]`` of ``state_spec``.

        Returns:
            int64 ``[B]`` in ``0 .. N - 1``, and the next state.
        """
        raise NotImplementedError(f'{type(self).__name__}.forward')


@configurable
class MultinomialSampler(ActionSampler):
    """Sampler that draws each action with its probability."""

    def forward(self, probs: Tensor, state: NestedTensor = ()) -> tuple[Tensor, NestedTensor]:
        """Choose actions; see the base class."""
        return sample_categories(probs.log()), state


@configurable
class EpsilonGreedySampler(ActionSampler):
    """Sampler that takes the most probable action, or with probability epsilon samples from the probabilities.

    Args:
        epsilon_greedy: probability of sampling, independently for each element of the batch.

    Raises:
        ValueError: ``epsilon_greedy`` is not in [0, 1].
    """

    def __init__(self, epsilon_greedy: Fraction = 0.1):
        super().__init__()
        self._epsilon_greedy = epsilon_greedy

    def forward(self, probs: Tensor, state: NestedTensor = ()) -> tuple[Tensor, NestedTensor]:
        """Choose actions; see the base class."""
        best = probs.argmax(-1)
        if self._epsilon_greedy == 0.0:
            return best, state
        explore = torch.rand(best.shape, device=best.device) < self._epsilon_greedy
        return torch.where(explore, sample_categories(probs.log()), best), state


@configurable
class CategoricalSeedSampler(ActionSampler):
    """Sampler that draws each action with its probability from noise that persists for several steps.

    The action is ``argmin_i E[i] / p[i]``, which has the distribution p for exponential noise E. While the noise is
    kept, similar probabilities give the same choice, so exploration is consistent over time.

    Args:
        num_classes: number of actions N.
        new_noise_prob: probability of new noise in each step; the first step of an episode always gets new noise.
        concentration: actions are chosen with probabilities proportional to ``p ** concentration``; larger values are
            greedier.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, num_classes: Count, new_noise_prob: Fraction = 0.01, concentration: NonNegative = 1):
        super().__init__(TensorSpec((num_classes, )))
        self._new_noise_prob = new_noise_prob
        self._concentration = concentration

    def forward(self, probs: Tensor, state: NestedTensor = ()) -> tuple[Tensor, NestedTensor]:
        """Choose actions; see the base class. The state is the noise ``[B, N]``."""
        tiny = torch.finfo(probs.dtype).tiny
        renew = torch.rand((probs.shape[0], 1), device=probs.device) < self._new_noise_prob
        renew = renew | (state == 0).all(-1, keepdim=True)  # no noise yet
        noise = torch.where(renew, torch.empty_like(probs).exponential_().clamp_min(tiny), state)
        log_probs = torch.where(probs > 0, self._concentration * probs.clamp_min(tiny).log(), -torch.inf)
        return (log_probs - noise.log()).argmax(-1), noise
