"""How to choose an action from the probabilities of all actions.

A sampler is called as ``action, state = sampler(probs, state)``. Its state, of ``state_spec``, is kept by the caller
for each environment and starts from zeros with each episode, as any state of an algorithm.
"""
import torch
from torch import Tensor, nn

from alfx.distributions.discrete import sample_categories
from alfx.gin_utils import configurable
from alfx.gin_utils.value_checks import Count, Fraction, NonNegative
from alfx.tensor_specs import NestedTensor, NestedTensorSpec, TensorSpec


class ActionSampler(nn.Module):
    """Base of the samplers.

    Args:
        state_spec: nest of specs of the state of one environment; ``()`` without memory.
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
    """Each action with its probability."""

    def forward(self, probs: Tensor, state: NestedTensor = ()) -> tuple[Tensor, NestedTensor]:
        """See the base class."""
        return sample_categories(probs.log()), state


@configurable
class EpsilonGreedySampler(ActionSampler):
    """The most probable action, or sometimes each with its probability.

    Args:
        epsilon_greedy: the chance of sampling, for each element of the batch by itself.

    Raises:
        ValueError: it is not in [0, 1].
    """

    def __init__(self, epsilon_greedy: Fraction = 0.1):
        super().__init__()
        _check_probability('EpsilonGreedySampler.epsilon_greedy', epsilon_greedy)
        self._epsilon_greedy = epsilon_greedy

    def forward(self, probs: Tensor, state: NestedTensor = ()) -> tuple[Tensor, NestedTensor]:
        """See the base class."""
        best = probs.argmax(-1)
        if self._epsilon_greedy == 0.0:
            return best, state
        explore = torch.rand(best.shape, device=best.device) < self._epsilon_greedy
        return torch.where(explore, sample_categories(probs.log()), best), state


@configurable
class CategoricalSeedSampler(ActionSampler):
    """Each action with its probability, but by noise that an environment keeps for a while.

    The action is ``argmin_i E[i] / p[i]``, which has the distribution p for exponential noise E. As long as the noise
    stays, so does the choice where the probabilities are similar: exploration is consistent over time.

    Args:
        num_classes: N, the number of actions.
        new_noise_prob: the chance of new noise in each step; the first step of an episode always gets it.
        concentration: actions are chosen with probabilities proportional to ``p ** concentration``; the larger, the
            greedier.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, num_classes: Count, new_noise_prob: Fraction = 0.01, concentration: NonNegative = 1):
        super().__init__(TensorSpec((num_classes, )))
        _check_probability('CategoricalSeedSampler.new_noise_prob', new_noise_prob)
        if num_classes < 1 or concentration < 0:
            raise ValueError('CategoricalSeedSampler: expected num_classes >= 1 and concentration >= 0, found '
                             f'{num_classes} and {concentration}')
        self._new_noise_prob = new_noise_prob
        self._concentration = concentration

    def forward(self, probs: Tensor, state: NestedTensor = ()) -> tuple[Tensor, NestedTensor]:
        """See the base class; the state is the noise ``[B, N]``."""
        tiny = torch.finfo(probs.dtype).tiny
        renew = torch.rand((probs.shape[0], 1), device=probs.device) < self._new_noise_prob
        renew = renew | (state == 0).all(-1, keepdim=True)  # there is none yet
        noise = torch.where(renew, torch.empty_like(probs).exponential_().clamp_min(tiny), state)
        log_probs = torch.where(probs > 0, self._concentration * probs.clamp_min(tiny).log(), -torch.inf)
        return (log_probs - noise.log()).argmax(-1), noise


def _check_probability(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f'{name}: expected a probability in [0, 1], found {value}')
