"""What an update that is compiled says of itself: the losses and scalars that it would write, as results of its graph.

Written in Python, they would need the update to be made step by step where summaries are due, which takes several times
as long. What is not a scalar, or is known to Python alone, is written in that way only.
"""
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, fx

from alfx import context, nest, summary
from alfx.data_structures import LossInfo
from alfx.engine.program import draws_numbers, written_by
from alfx.engine.recording import Batch, Gradients, NotRecordableError, Step, UpdateRecorder
from alfx.engine.update import masked_means

if TYPE_CHECKING:
    from alfx.algorithms.algorithm import Algorithm


class UpdateSummaries(NamedTuple):
    """What the last results of a recorded update are.

    Attributes:
        tags: names of scalars, with their scopes.
        tree: the structure of a :class:`LossInfo` with ``scalar_loss`` and the means of ``extra``.
    """

    tags: list[str]
    tree: Any

    def complete(self, loss_info: LossInfo, values: Sequence[Any]) -> LossInfo:
        """Write the scalars; add the other losses to those in ``loss_info``."""
        writer, step = context.get_summary_writer(), context.get_global_counter()
        for tag, value in zip(self.tags, values):
            writer.add_scalar(tag, float(value), step)
        told = nest.unflatten(self.tree, values[len(self.tags):len(self.tags) + self.tree.num_leaves])
        return loss_info._replace(scalar_loss=told.scalar_loss, extra=told.extra)


class Listener:
    """Stands in for the writer of summaries, and keeps the scalars that an update writes while it is recorded."""

    takes_tensors = True

    def __init__(self) -> None:
        self.scalars: dict[str, Tensor] = {}

    def add_scalar(self, tag: str, value: Any, step: int, walltime: float | None = None) -> None:
        """Keep a scalar.

        Raises:
            NotRecordableError: nothing tells what it will be next time.
        """
        if not isinstance(value, Tensor) or step != context.get_global_counter() or walltime is not None:
            raise NotRecordableError(f'the summary {tag} is not a tensor, or has a time of its own')
        self.scalars[tag] = value.detach().clone()

    def __getattr__(self, name: str) -> Callable[..., None]:
        raise NotRecordableError(f'summaries that are not scalars ({name})')


def without_train_info(summarize_train: Callable[..., None]) -> Callable[..., None]:
    """Decorator of a ``summarize_train`` that does not look at ``train_info`` (unless
    ``TrainerConfig.summarize_action_distributions`` asks for it): it may be called with ``()`` there.

    One that overrides it and is not decorated always gets the infos; updates with summaries then are made step by step.
    """
    summarize_train.is_without_train_info = True  # type: ignore[attr-defined]
    return summarize_train


def can_summarize(algorithm: 'Algorithm') -> bool:
    """Whether what ``algorithm`` writes after an update can be had from a record of the update."""
    config = algorithm._config
    return (getattr(type(algorithm).summarize_train, 'is_without_train_info', False)
            and algorithm.gradient_noise_scale is None
            and not (config is not None and (config.summarize_action_distributions or config.summarize_output)))


def record_summarized(recorder: UpdateRecorder, batch: Batch,
                      step: Step | None = None) -> tuple[Any, UpdateSummaries]:
    """A graph as of ``recorder.record_gradients`` with the summaries of the update as further results.

    Returns:
        tuple:
        - the graph
        - what its further results are

    Raises:
        NotRecordableError: a summary is no scalar, or may change without the graph knowing.
    """
    listener = Listener()
    summaries = UpdateSummaries([], None)

    def tell(found: Gradients) -> list[Tensor]:
        nonlocal summaries
        summaries, values = _told(listener, found.loss_info, found.masks)
        return values

    with summary.push_summary_writer(listener):  # type: ignore[arg-type]
        graph = recorder.record_gradients(batch, tell, step)
    _check(graph, 2 + len(recorder.params))
    return graph, summaries


def _told(listener: Listener, loss_info: LossInfo, masks: Tensor) -> tuple[UpdateSummaries, list[Tensor]]:
    """What an update has told, and the values."""
    if loss_info.gns != () or loss_info.batch_label != ():
        raise NotRecordableError('summaries of gradient noise and of categories')
    told = LossInfo(scalar_loss=loss_info.scalar_loss, extra=masked_means(loss_info.extra, masks))
    leaves, tree = nest.flatten_with_structure(told)
    if not all(isinstance(x, Tensor) for x in leaves):
        raise NotRecordableError('a leaf of LossInfo.extra is not a tensor')
    values = [*listener.scalars.values(), *(x.detach() for x in leaves)]
    return UpdateSummaries(list(listener.scalars), tree), values


def _check(graph: fx.GraphModule, num_before: int) -> None:
    """See that the results after those of the update change with the inputs of the graph, and that it draws no numbers
    for them."""
    nodes = list(graph.graph.nodes)
    results = list(nodes[-1].args[0])
    kept = _what_leads_to([*(x for x in results[:num_before] if x is not None),
                           *(node for node in nodes if written_by(node))])
    if any(draws_numbers(node.target) and node not in kept for node in nodes):
        raise NotRecordableError('summaries that random numbers are drawn for')
    for result in results[num_before:]:
        if all(node.op != 'placeholder' for node in _what_leads_to([result])):
            raise NotRecordableError('a summary that depends on nothing that is known to change')


def _what_leads_to(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    found, left = set(nodes), list(nodes)
    while left:
        new = [node for node in left.pop().all_input_nodes if node not in found]
        found.update(new)
        left += new
    return found
