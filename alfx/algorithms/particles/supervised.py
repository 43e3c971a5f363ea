"""Supervised training of ensembles of networks: data, epochs, evaluation, and uncertainty.

:class:`SupervisedTask` defines the task: data, loss and metrics. :class:`SupervisedEnsemble` is a mixin for algorithms
with N networks; it runs an epoch of their ``train_step``. Read next:
:mod:`alfx.algorithms.functional_particle_vi_algorithm`.
"""
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alfx import context, summary
from alfx.data_structures import LossInfo
from alfx.gin_utils import ConfError, check_value, problem_at
from alfx.tensor_specs import TensorSpec, extract_spec
from alfx.utils import sl_utils
from alfx.utils.tensor_loader import TensorLoader

logger = logging.getLogger(__name__)


class Uncertainty(NamedTuple):
    """Metrics of the uncertainty estimates of an ensemble.

    Attributes:
        auroc_entropy: area under the ROC curve of detecting outliers by the entropy of the mean probabilities.
        auroc_variance: the same with the variance of the probabilities over the networks.
        auroc_mutual_information: the same with the mutual information of class and network.
        nll: negative log likelihood of the test data under the mean probabilities, nats per sample.
        brier: Brier score of the mean probabilities, summed over classes.
        ece: expected calibration error of the mean probabilities.
    """
    auroc_entropy: float
    auroc_variance: float
    auroc_mutual_information: float
    nll: float
    brier: float
    ece: float


class SupervisedTask:
    """Supervised task: data, loss and metrics.

    Args:
        owner: class of the algorithm, for error messages.
        data_creator: called without arguments, returns ``(train_loader, test_loader)``, each an iterable of
            ``(inputs, targets)`` with ``dataset`` and ``batch_size``; ``None``: the data is set later, if at all.
        data_creator_outlier: the same for out-of-distribution data.
        input_tensor_spec: spec of the inputs; ``None``: taken from the data.
        output_dim: number of outputs of a network; ``None``: the number of classes, or of targets.
        loss_type: 'classification' or 'regression'.
        voting: 'soft' or 'hard' voting for classes.
        num_train_classes: number of classes in the training data.
        noise_stddev: standard deviation of the noise of the targets of regression.

    Raises:
        ConfError: a value is invalid, or there are neither data nor specs.
    """

    def __init__(self, owner: str, data_creator: Callable | None, data_creator_outlier: Callable | None,
                 input_tensor_spec: TensorSpec | None, output_dim: int | None, loss_type: str, voting: str,
                 num_train_classes: int, noise_stddev: float):
        self._owner = owner
        check_value(owner, 'loss_type', loss_type, str, choices=['classification', 'regression'])
        check_value(owner, 'voting', voting, str, choices=['soft', 'hard'])
        self.is_classification = loss_type == 'classification'
        self._voting, self._noise_stddev = voting, noise_stddev
        self.train_loader: Any = None
        self.test_loader: Any = None
        self.outlier_loaders: tuple[Any, Any] | None = None
        if data_creator is None and (input_tensor_spec is None or output_dim is None):
            raise ConfError([problem_at(owner, 'data_creator', 'is not set',
                                        'set it, such as to @load_digits, or both input_tensor_spec and output_dim')])
        loaders = (None, None) if data_creator is None else data_creator()
        example = None if loaders[0] is None else next(_examples(loaders[0]))
        if input_tensor_spec is None and example is not None:
            input_tensor_spec = extract_spec(example[0])
        if output_dim is None and example is not None:
            output_dim = num_train_classes if self.is_classification else example[1].shape[-1]
        assert input_tensor_spec is not None and output_dim is not None
        self.input_spec, self.output_dim = input_tensor_spec, output_dim
        outliers = None if data_creator_outlier is None else data_creator_outlier()
        if loaders[0] is not None:
            self.set_data_loader(loaders[0], loaders[1], outliers)
        elif outliers is not None:
            self.outlier_loaders = outliers

    def set_data_loader(self, train_loader: Any, test_loader: Any, outlier_loaders: tuple[Any, Any] | None) -> None:
        """Set the data; ``None`` keeps the previous outlier data.

        Raises:
            ConfError: the targets do not match ``output_dim``.
        """
        self._check(train_loader)
        self.train_loader, self.test_loader = train_loader, test_loader
        if outlier_loaders is not None:
            self.outlier_loaders = outlier_loaders

    def _check(self, loader: Any) -> None:
        targets = loader.data.targets if isinstance(loader, TensorLoader) else next(_examples(loader))[1]
        if not self.is_classification:
            if targets.ndim != 2 or targets.shape[1] != self.output_dim:
                raise ConfError(f'{self._owner}: expected targets [B, {self.output_dim}] for regression, found '
                                f'{list(targets.shape)}', 'set output_dim, or loss_type to classification')
        elif targets.is_floating_point() or targets.ndim != 1:
            raise ConfError(f'{self._owner}: expected int64 targets [B] for classification, found {targets.dtype} '
                            f'{list(targets.shape)}', f"set {self._owner}.loss_type to 'regression'")
        elif int(targets.max()) >= self.output_dim:
            raise ConfError([problem_at(self._owner, 'num_train_classes', f'= {self.output_dim}, but there is a class '
                                        f'{int(targets.max())}', 'set it to the number of classes')])

    @property
    def train_size(self) -> int:
        """Number of samples to train on."""
        return len(self.train_loader.dataset)

    @property
    def batch_share(self) -> float:
        """Batch size divided by the number of samples: the share of the posterior in the loss of one batch."""
        return min(1.0, self.train_loader.batch_size / self.train_size)

    def loss(self, outputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the negative log likelihood of a batch, ``[N]``, for outputs ``[B, N, C]``."""
        if self.is_classification:
            return sl_utils.classification_loss(outputs, targets, mask)
        return sl_utils.regression_loss(outputs, targets, mask, self._noise_stddev)

    def quality(self, outputs: Tensor, targets: Tensor) -> float:
        """Return the accuracy of classes, or the root mean squared error, of the mean of the networks."""
        if self.is_classification:
            return float((sl_utils.class_probabilities(outputs, self._voting).argmax(-1) == targets).double().mean())
        return float((outputs.mean(1) - targets).square().mean().sqrt())

    def measures(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Return metrics of outputs ``[n, N, C]``, by name."""
        if self.is_classification:
            return sl_utils.classification_metrics(outputs, targets, self._voting)
        return sl_utils.regression_metrics(outputs, targets, self._noise_stddev)


def _examples(loader: Iterable) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over batches without advancing torch's random generator."""
    if isinstance(loader, TensorLoader):
        yield loader.data.inputs[:2], loader.data.targets[:2]
        return
    with torch.random.fork_rng(devices=[]):
        yield from loader


def _with_last(batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[tuple[Tensor, Tensor], bool]]:
    """Iterate over pairs of batch and flag, ``True`` for the last batch."""
    waiting = None
    for batch in batches:
        if waiting is not None:
            yield waiting, False
        waiting = batch
    if waiting is not None:
        yield waiting, True


class SupervisedEnsemble:
    """Mixin for algorithms that train N networks on the data of a :class:`SupervisedTask`.

    The algorithm has ``train_step((inputs, targets), ...)`` and passes functions that compute the outputs of its
    networks to the methods here.

    If several processes train together, all of them draw the same batches and the same noise. Each computes the loss of
    its own rows, or the outputs of its networks; the averaged gradients equal those of the whole batch.
    """

    divides_batches = True
    """Flag: each of several processes takes its own rows of each batch."""

    _task: SupervisedTask
    _config: Any
    _entropy_regularization: Any
    _logs: dict[str, bool]

    def set_data_loader(self, train_loader: Any, test_loader: Any = None,
                        outlier_data_loaders: tuple[Any, Any] | None = None,
                        entropy_regularization: float | None = None) -> None:
        """Set the data for training and evaluation.

        Args:
            train_loader: an iterable of ``(inputs, targets)`` with ``dataset`` and ``batch_size``.
            test_loader: the same; ``None``: no evaluation.
            outlier_data_loaders: a pair of loaders of out-of-distribution data.
            entropy_regularization: weight of the repulsion; ``None``: keep the current one, or if none is set, use
                batch size divided by number of samples.

        Raises:
            ConfError: the targets do not match the networks.
        """
        self._task.set_data_loader(train_loader, test_loader, outlier_data_loaders)
        if entropy_regularization is not None:
            self._entropy_regularization = entropy_regularization
        elif self._entropy_regularization is None:
            self._entropy_regularization = self._task.batch_share

    @property
    def graph_key(self) -> Hashable:
        """Key of the traced graph: the entropy regularization and the size of the training set."""
        loader = self._task.train_loader
        return self._entropy_regularization, None if loader is None else self._task.train_size

    def _batch_losses(self, batch: tuple[Tensor, ...]) -> tuple[Any, None, Any]:
        info = self.train_step(batch).info  # type: ignore[attr-defined]
        return info, None, info

    def _own_rows(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the rows of a batch whose loss this process computes."""
        return tuple(map(context.own_rows, batch))

    def _train_epoch(self) -> int:
        """Update once for each batch of the training data; return the number of updates."""
        if self._task.train_loader is None:
            raise ConfError(f'{type(self).__name__}: there is no data to train on',
                            f'bind {type(self).__name__}.data_creator, or call set_data_loader()')
        algorithm: Any = self
        recording, device = context.should_record_summaries(), algorithm.device
        if context.get_ranks() is not None:
            context.get_ranks().same_random_numbers()
        total, correct, num = 0.0, 0.0, 0
        for (inputs, targets), is_last in _with_last(self._task.train_loader):
            batch = inputs.to(device), targets.to(device)
            if recording or self._logs['training']:
                answers = self._answers(batch[0])
                total += float(self._task.loss(answers, batch[1]).mean())
                correct += self._task.quality(answers, batch[1])
            with context.record_if(recording and is_last):  # the other updates can be replayed from a traced graph
                loss_info = algorithm.updater.train_on_batch(self._batch_losses, batch)
            num += 1
            if self._config is not None and self._config.update_counter_every_mini_batch:
                context.increment_global_counter()
        if recording:
            algorithm.summarize_train(loss_info, algorithm.optimized_parameters()[1], cum_loss=total,
                                      avg_acc=correct / num)
        if self._logs['training']:
            logger.info('%s: loss %.5g over the epoch, %s %.4g on batches', algorithm.name, total,
                        self._quality_name, correct / num)
        return num

    @property
    def _quality_name(self) -> str:
        return 'acc' if self._task.is_classification else 'rmse'

    def _answers(self, inputs: Tensor) -> Tensor:
        """Return the current outputs ``[B, N, C]`` of the networks, without gradients."""
        raise NotImplementedError

    def _answers_of(self, loader: Iterable, answer: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return outputs ``[n, N, C]`` and targets ``[n, ...]`` of all samples."""
        device = self.device  # type: ignore[attr-defined]
        batches = [(inputs.to(device), targets.to(device)) for inputs, targets in loader]
        with torch.no_grad():
            return torch.cat([answer(inputs) for inputs, _ in batches]), torch.cat([y for _, y in batches])

    def _evaluate_with(self, answer: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return metrics of the test data by name."""
        if self._task.test_loader is None:
            raise ConfError(f'{type(self).__name__}: there is no data to evaluate on',
                            'return a test loader from data_creator, or set TrainerConfig.evaluate to False')
        outputs, targets = self._answers_of(self._task.test_loader, answer)
        measures = {f'test_{name}': value for name, value in self._task.measures(outputs, targets).items()}
        if self._logs['evaluate']:
            logger.info('%s: %s', type(self).__name__,
                        ', '.join(f'{name} {value:.4g}' for name, value in measures.items()))
        return measures

    def check_uncertainty(self) -> None:
        """Raise ``ConfError`` if uncertainty cannot be evaluated."""
        owner = type(self).__name__
        if not self._task.is_classification:
            raise ConfError([problem_at(owner, 'loss_type', "= 'regression', but uncertainty is evaluated only for "
                                        'classification', 'leave TrainerConfig.eval_uncertainty at False')])
        if self._task.outlier_loaders is None or self._task.test_loader is None:
            raise ConfError([problem_at(owner, 'data_creator_outlier', 'is not set: uncertainty is evaluated by the '
                                        'detection of outliers', f'bind it, such as {owner}.data_creator_outlier = '
                                        '@outlier/load_digits')])

    def _uncertainty_with(self, answer: Callable[[Tensor], Tensor]) -> Uncertainty:
        self.check_uncertainty()
        assert self._task.outlier_loaders is not None
        outputs, targets = self._answers_of(self._task.test_loader, answer)
        outliers, _ = self._answers_of(self._task.outlier_loaders[1], answer)
        inside, outside = (sl_utils.uncertainty_scores(x) for x in (outputs, outliers))
        aurocs = {f'auroc_{name}': sl_utils.auc_score(inside[name], outside[name]) for name in inside}
        measures = sl_utils.classification_metrics(outputs, targets)
        return Uncertainty(**aurocs, **{name: measures[name] for name in ('nll', 'brier', 'ece')})

    def _summarize_epoch(self, loss_info: LossInfo, params: Any, cum_loss: float | None, avg_acc: float | None) -> None:
        super().summarize_train((), (), loss_info, params)  # type: ignore[misc]
        if cum_loss is not None:
            summary.scalar('train_epoch/neg_logprob', cum_loss)
        if avg_acc is not None:
            summary.scalar(f'train_epoch/avg_{self._quality_name}', avg_acc)
