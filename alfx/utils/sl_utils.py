"""Losses and metrics of supervised runs with ensembles, including their uncertainty.

An ensemble of N networks outputs ``[B, N, C]``: logits of C classes, or C numbers. Losses are per network, ``[N]``, and
*sums* over the batch: negative log likelihoods of the batch, to which a prior and an entropy can be added.
"""
import math

import torch
from torch import Tensor
from torch.nn import functional as F


def classification_loss(outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
    """Negative log likelihood of classes.

    Args:
        outputs: logits ``[B, N, C]``.
        targets: int64 ``[B]``.
        mask: ``[B]``: 0 for samples to ignore.

    Returns:
        Losses ``[N]``, summed over the batch.
    """
    num = outputs.shape[1]
    losses = F.cross_entropy(outputs.flatten(0, 1), targets.repeat_interleave(num), reduction='none').view(-1, num)
    return _summed(losses, mask)


def regression_loss(outputs: Tensor, targets: Tensor, mask: Tensor | None = None, noise_stddev: float = 1.0) -> Tensor:
    """Negative log likelihood of numbers with normal noise, without its constant.

    Args:
        outputs: ``[B, N, C]``.
        targets: ``[B, C]``.
        mask: ``[B]``: 0 for samples to ignore.
        noise_stddev: standard deviation of the noise.

    Returns:
        Losses ``[N]``, summed over the batch.
    """
    return _summed((outputs - targets.unsqueeze(1)).square().sum(-1) * (0.5 / noise_stddev**2), mask)


def _summed(losses: Tensor, mask: Tensor | None) -> Tensor:
    """Sum ``[B, N]`` over the batch to ``[N]``."""
    return (losses if mask is None else losses * mask.to(losses.dtype).unsqueeze(1)).sum(0)


def auc_score(inliers: Tensor, outliers: Tensor) -> float:
    """Area under the ROC curve: the probability that an outlier has a larger score than an inlier.

    Ties count as half. Computed from ranks, in O(n log n).

    Args:
        inliers: scores ``[n]``.
        outliers: scores ``[m]``.

    Raises:
        ValueError: an argument is empty.
    """
    if not inliers.numel() or not outliers.numel():
        raise ValueError(f'auc_score: expected scores of both, found {inliers.numel()} inliers and '
                         f'{outliers.numel()} outliers')
    sorted_inliers = inliers.flatten().sort().values
    below = torch.searchsorted(sorted_inliers, outliers.flatten(), right=False)
    up_to = torch.searchsorted(sorted_inliers, outliers.flatten(), right=True)
    return float((below + up_to).double().mean()) / (2 * sorted_inliers.numel())


def class_probabilities(outputs: Tensor, voting: str) -> Tensor:
    """Class probabilities predicted by an ensemble.

    Args:
        outputs: logits ``[B, N, C]``.
        voting: 'soft' for the mean of the probabilities, 'hard' for the share of the networks that choose a class.

    Returns:
        Probabilities ``[B, C]``.
    """
    if voting == 'soft':
        return outputs.softmax(-1).mean(1)
    return F.one_hot(outputs.argmax(-1), outputs.shape[-1]).to(outputs.dtype).mean(1)


def entropy(probabilities: Tensor) -> Tensor:
    """Entropy in nats, ``[...]``, of probabilities ``[..., C]``."""
    return -torch.xlogy(probabilities, probabilities).sum(-1)


def uncertainty_scores(outputs: Tensor) -> dict[str, Tensor]:
    """Uncertainty of an ensemble for each sample.

    Args:
        outputs: logits ``[B, N, C]``.

    Returns:
        Scores ``[B]`` each: 'entropy' of the mean probabilities, 'variance' of the probabilities over the networks,
        summed over classes, and 'mutual_information' of the class and the network.
    """
    probabilities = outputs.softmax(-1)
    total = entropy(probabilities.mean(1))
    return {'entropy': total, 'variance': probabilities.var(1, unbiased=False).sum(-1),
            'mutual_information': total - entropy(probabilities).mean(1)}


def calibration_error(probabilities: Tensor, targets: Tensor, num_bins: int = 15) -> float:
    """Expected calibration error (Naeini et al. 2015): mean of |accuracy - confidence| over bins of the confidence.

    Args:
        probabilities: ``[B, C]``.
        targets: int64 ``[B]``.
        num_bins: number of bins of equal width.
    """
    confidence, choice = probabilities.max(-1)
    difference = (choice == targets).double() - confidence.double()
    bins = (confidence * num_bins).long().clamp(max=num_bins - 1)
    sums = difference.new_zeros(num_bins).index_add_(0, bins, difference)
    return float(sums.abs().sum() / len(targets))


def classification_metrics(outputs: Tensor, targets: Tensor, voting: str = 'soft') -> dict[str, float]:
    """Metrics of an ensemble of classifiers.

    Args:
        outputs: logits ``[B, N, C]``.
        targets: int64 ``[B]``.
        voting: voting for the accuracy, see :func:`class_probabilities`.

    Returns:
        'accuracy', and for the mean probabilities 'nll' (mean, nats), 'brier' (sum over classes) and 'ece'.
    """
    probabilities = class_probabilities(outputs, 'soft')
    votes = probabilities if voting == 'soft' else class_probabilities(outputs, voting)
    log_mean = outputs.log_softmax(-1).logsumexp(1) - math.log(outputs.shape[1])
    one_hot = F.one_hot(targets, probabilities.shape[-1]).to(probabilities.dtype)
    return {'accuracy': float((votes.argmax(-1) == targets).double().mean()),
            'nll': float(F.nll_loss(log_mean, targets)),
            'brier': float((probabilities - one_hot).square().sum(-1).mean()),
            'ece': calibration_error(probabilities, targets)}


def regression_metrics(outputs: Tensor, targets: Tensor, noise_stddev: float = 1.0) -> dict[str, float]:
    """Metrics of an ensemble for regression.

    Args:
        outputs: ``[B, N, C]``.
        targets: ``[B, C]``.
        noise_stddev: standard deviation of the noise.

    Returns:
        'rmse' of the mean, 'nll' of the mixture of the N normal distributions (mean over samples, nats), and 'stddev'
        of the outputs over the networks.
    """
    mean = outputs.mean(1)
    exponent = -0.5 * (outputs - targets.unsqueeze(1)).square().sum(-1) / noise_stddev**2
    constant = 0.5 * targets.shape[-1] * math.log(2 * math.pi * noise_stddev**2) + math.log(outputs.shape[1])
    return {'rmse': float((mean - targets).square().mean().sqrt()),
            'nll': float((constant - exponent.logsumexp(1)).mean()),
            'stddev': float(outputs.var(1, unbiased=False).mean().sqrt())}
