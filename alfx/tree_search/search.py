"""The search: S times select a leaf of every tree, ask the model for what is there, expand and back up.

All B trees advance together, so that the model is called once a simulation for all of them, or once for several
simulations that do not depend on each other. The trees (:mod:`alfx.tree_search.trees`) are in host memory; what the
model needs to go on, its latent states, lies where the model left it, in one tensor ``[N * B, ...]`` for each leaf of
the state, written and read by index. Selecting, expanding and backing up are done in C
(:mod:`alfx.tree_search.native_search`) or, where there is no compiler, with tensors
(:mod:`alfx.tree_search.tensor_search`), with the same results bit for bit: all random numbers are drawn beforehand from
torch's generator.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alfx import nest
from alfx.tensor_specs import NestedTensor
from alfx.tree_search import build, rules
from alfx.tree_search.native_search import NativeSearch
from alfx.tree_search.tensor_search import TensorSearch
from alfx.tree_search.trees import CHILD, PRIOR, VALUE, VISITS, Noise, SearchSettings, Trees


class SearchError(ValueError):
    """The model returned something that is not finite, or a root has no action."""


class Prediction(NamedTuple):
    """What a model says of N nodes; more fields do not matter.

    Attributes:
        value: ``[N]``, for the first player.
        reward: ``[N]``, for arriving there, for the first player; ``()``: 0.
        game_over: bool ``[N]``, nothing follows; ``()``: never.
        actions: ``[N, A, ...]``, candidates; ``()``: the integers 0, ..., A - 1.
        action_probs: ``[N, A]``, their prior probabilities; an action of probability 0 does not exist.
        state: nest of ``[N, ...]``, what the model needs to go on.
    """

    value: Tensor
    reward: Any = ()
    game_over: Any = ()
    actions: Any = ()
    action_probs: Any = ()
    state: NestedTensor = ()


Model = Callable[[NestedTensor, Tensor], Any]
"""Called with the states of N nodes and an action of each, ``[N, ...]``; returns a :class:`Prediction` of what follows,
or any other record with such fields."""


def root_prior(prior: Tensor, mask: Tensor | None, dirichlet_alpha: float, fraction: float) -> Tensor:
    """The prior of the actions at roots: only valid actions, mixed with noise.

    ``(1 - fraction) * prior / sum(prior) + fraction * noise``, the sum over valid actions and the noise from a
    Dirichlet distribution over them. Where the prior of all valid actions is 0, they are equal.

    Args:
        prior: ``[B, A]``.
        mask: bool ``[B, A]``, which actions are valid, one at least; ``None``: all.
        dirichlet_alpha: of the noise.
        fraction: 0 for no noise; then no random numbers are drawn.

    Returns:
        float64 ``[B, A]`` in host memory.
    """
    prior = prior.detach().to('cpu', torch.float64)
    if mask is not None:
        mask = mask.cpu()
        prior = torch.where(mask, prior, 0.0)
        prior = torch.where(prior.sum(-1, keepdim=True) > 0, prior, mask.double())
    prior = prior / prior.sum(-1, keepdim=True)
    if fraction == 0.0:
        return prior
    gamma = torch.distributions.Gamma(torch.full_like(prior, dirichlet_alpha), torch.ones_like(prior))
    noise = gamma.sample().clamp_min(rules.TINY)
    valid = prior > 0 if mask is None else mask
    noise = torch.where(valid, noise, 0.0)
    return (1 - fraction) * prior + fraction * noise / noise.sum(-1, keepdim=True)


class TreeSearch:
    """Searches with given settings.

    Trees and latent states of the last few sizes of batches are kept and used again.

    Args:
        settings: how to search.
        native: whether to use the compiled code if there is any.
    """

    _KEPT = 4

    def __init__(self, settings: SearchSettings, native: bool = True):
        self.settings = settings
        self._native = native
        self._forests: dict[Any, _Forest] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Copies and what goes to another process start without trees."""
        return {**self.__dict__, '_forests': {}}

    @torch.no_grad()
    def run(self, model: Model, root: Any, prior: Tensor, to_play: Tensor) -> Trees:
        """Search from roots.

        Args:
            model: the model.
            root: a :class:`Prediction` of the roots; its reward, game over and priors do not matter.
            prior: float64 ``[B, A]`` in host memory, of the actions of the roots.
            to_play: int ``[B]``, 0 or 1: whose turn it is.

        Returns:
            The trees; the next search of as many roots writes to them.

        Raises:
            SearchError: the model returned something that is not finite.
        """
        batch_size, num_actions = prior.shape
        kept = nest.flatten((root.state, root.actions))
        key = batch_size, num_actions, *((x.shape[1:], x.dtype, x.device) for x in kept)
        forest = self._forests.pop(key, None)
        if forest is None:
            forest = _Forest(self.settings, batch_size, num_actions, root, self._native)
            if len(self._forests) >= self._KEPT:
                self._forests.pop(next(iter(self._forests)))
        self._forests[key] = forest  # the last one is the latest
        noise = Noise.draw(self.settings, batch_size, num_actions)
        forest.run(model, root, prior, to_play.cpu(), noise)
        return forest.trees


class _Forest:
    """The trees and the latent states of one size of batch; all buffers and their views are made once."""

    def __init__(self, settings: SearchSettings, batch_size: int, num_actions: int, root: Any, native: bool):
        self._settings, self._batch_size, self._num_actions = settings, batch_size, num_actions
        self.trees = Trees(settings, batch_size, num_actions)
        library = build.load() if native else None
        self._form: Any = TensorSearch(self.trees) if library is None else NativeSearch(self.trees, library)
        self._device = root.value.device
        self._structure = nest.structure(root.state)
        num_nodes = self.trees.ints.shape[1]
        kept = [*nest.flatten(root.state), *([] if isinstance(root.actions, tuple) else [root.actions])]
        self._kept = [x.new_zeros(num_nodes * batch_size, *x.shape[1:]) for x in kept]
        self._names_actions = not isinstance(root.actions, tuple)
        self._calls: dict[int, _Call] = {}
        self._places: dict[tuple[int, int], list[Tensor]] = {}
        self._every_action = torch.arange(num_actions).repeat_interleave(batch_size)

    def run(self, model: Model, root: Any, prior: Tensor, to_play: Tensor, noise: Noise) -> None:
        """One search."""
        value = root.value.detach().to('cpu', torch.float64)
        bad = ~value.isfinite() | ~prior.isfinite().all(-1)
        if bad.any():
            raise SearchError(f'root {int(bad.int().argmax())} of {self._batch_size}: the value or the prior that the '
                              'model predicts of the root itself is not finite')
        self.trees.plant(value, prior, to_play, noise)
        self._keep(root, 0, 1)
        first = 1
        if self._settings.expand_root:
            call = self._call(self._num_actions)
            outputs = self._ask(model, call, call.columns, self._every_action, first)
            self._check(self._form.expand_root(outputs), 'expanding the root')
            first += self._num_actions
        made = 0
        for step, count in enumerate(self.trees.steps):
            self._form.select(step, count)
            chosen = self._call(count)
            call, rows, actions = chosen, chosen.chosen_rows(), chosen.actions
            if self._settings.expand_all:
                call = self._call(self._num_actions)
                rows, actions = rows.repeat(self._num_actions), self._every_action
            outputs = self._ask(model, call, rows, actions, first)
            bad = self._form.expand_backup(outputs, first)
            if bad >= 0:
                self._check(bad, f'simulation {made}')
            first, made = first + call.size, made + count

    def _call(self, size: int) -> '_Call':
        if size not in self._calls:
            self._calls[size] = _Call(size, self.trees)
        return self._calls[size]

    def _ask(self, model: Model, call: '_Call', rows: Tensor, action: Tensor, first: int) -> Any:
        """Ask the model what follows after actions, and keep what is needed to go on from there.

        Args:
            model: the model.
            call: for n nodes of each tree.
            rows: int64 ``[n * B]``, of what is kept of the nodes acted in.
            action: int64 ``[n * B]``, their indices.
            first: number of the first node that is new.

        Returns:
            float64 ``[n, B, 3 + A]`` or ``[n, B, 3 + 2 A]``, a numpy array.
        """
        if self._device.type != 'cpu':
            rows, action = rows.to(self._device), action.to(self._device)
        kept = self._kept
        if self._names_actions:
            action = kept[-1][rows, action]
            kept = kept[:-1]
        output = model(self._structure.unflatten([x.index_select(0, rows) for x in kept]), action)
        self._keep(output, first, call.size)
        call.outputs.fill(output)
        return call.outputs.array

    def _keep(self, output: Any, first: int, size: int) -> None:
        """Keep the states and the candidates of what the model was asked for, as those of nodes from ``first`` on."""
        slots = self._places.get((first, size))
        if slots is None:
            slots = [x.narrow(0, first * self._batch_size, size * self._batch_size) for x in self._kept]
            self._places[first, size] = slots
        states: list[Any] = self._structure.flatten_up_to(output.state)
        for slot, new in zip(slots, states):
            slot.copy_(new)
        if self._names_actions:
            slots[-1].copy_(output.actions)

    def _check(self, bad: int, when: str) -> None:
        if bad >= 0:
            raise SearchError(f'root {bad} of {self._batch_size}, {when}: a value, reward or prior that the model '
                              'predicts is not finite')


class _Call:
    """What calls of the model for n nodes of each tree read and write, made once.

    Args:
        size: n.
        trees: the trees.
    """

    def __init__(self, size: int, trees: Trees):
        self.size, batch_size = size, trees.batch_size
        self.columns = torch.arange(batch_size).repeat(size)
        self._rows = torch.zeros_like(self.columns)
        # What select chose, row by row.
        self._nodes, self.actions = (x.reshape(-1) for x in torch.from_numpy(trees.chosen[:2, :size]))
        self.outputs = _Outputs(size, batch_size, trees.num_actions, trees.settings.rule == 'gumbel')

    def chosen_rows(self) -> Tensor:
        """Where what is kept of the chosen nodes lies."""
        return torch.add(self.columns, self._nodes, alpha=len(self.columns) // self.size, out=self._rows)


class _Outputs:
    """What the model predicts of ``n * B`` nodes, as one array for the trees: see ``TensorSearch.expand_backup``.

    Args:
        n: nodes of each tree.
        batch_size: B.
        num_actions: A.
        with_logs: whether the logs of the priors are needed.
    """

    def __init__(self, n: int, batch_size: int, num_actions: int, with_logs: bool):
        packed = torch.zeros(n, batch_size, 3 + num_actions * (2 if with_logs else 1), dtype=torch.float64)
        self.array = packed.numpy()
        rows = packed.view(n * batch_size, -1)
        self._value, self._reward, self._over = rows[:, 0], rows[:, 1], rows[:, 2]
        self._prior = rows[:, 3:3 + num_actions]
        self._logs = rows[:, 3 + num_actions:] if with_logs else None
        self._all = rows[:, :3 + num_actions]

    def fill(self, output: Any) -> None:
        """Take what the model returned."""
        if output.value.device.type != 'cpu':  # one transfer
            like = output.value
            columns = [like[:, None], *(torch.zeros_like(like)[:, None] if isinstance(x, tuple) else
                                        x[:, None].to(like.dtype) for x in (output.reward, output.game_over))]
            self._all.copy_(torch.cat((*columns, output.action_probs), 1))
        else:
            self._value.copy_(output.value)
            self._prior.copy_(output.action_probs)
            for column, x in ((self._reward, output.reward), (self._over, output.game_over)):
                column.zero_() if isinstance(x, tuple) else column.copy_(x)
        if self._logs is not None:
            torch.log(self._prior, out=self._logs)


# What was found -------------------------------------------------------------------------------------------------


def exploration_policy(trees: Trees, kind: str, node: int = 0) -> Tensor:
    """The regularised policy at the roots after the search, float64 ``[B, A]``.

    Args:
        trees: after the search.
        kind: 'rkl' or 'kl'.
        node: of another node, the same in all trees.
    """
    s, A = trees.settings, trees.num_actions
    prior, value, _ = trees.tensor_of(trees.floats, node, PRIOR, 3 * A).split(A, -1)
    expanded = trees.tensor_of(trees.ints, node, CHILD, A) > 0
    visits = trees.tensor_of(trees.ints, node, VISITS)[:, 0].long()
    low, high = torch.from_numpy(trees.bounds).unbind(-1)
    span = (high - low).clamp_min(s.min_max_delta)
    second = trees.players(node) == 1
    own = rules.normalized(trees.mean_value(node), low, span, second)
    scores = rules.normalized(value, low[:, None], span[:, None], second[:, None])
    scores = rules.value_scores(scores, expanded, own, s.unexpanded_value)
    factors = rules.exploration_factors(int(visits.max()), s.pb_c_init, s.pb_c_base, False)
    return rules.regularized_policy(kind, scores, prior, expanded, visits, factors[visits],
                                    s.unexpanded_value == 'none')


def gumbel_choice(trees: Trees) -> tuple[Tensor, Tensor]:
    """The best of the most visited actions ``[B]`` and the improved policy ``[B, A]`` of Gumbel MuZero."""
    s, A = trees.settings, trees.num_actions
    prior, value, log_prior = trees.tensor_of(trees.floats, 0, PRIOR, 3 * A).split(A, -1)
    expanded = trees.tensor_of(trees.ints, 0, CHILD, A) > 0
    visits = trees.root_visits
    sign = torch.where(trees.players(0) == 1, -1.0, 1.0).double()
    model_value = torch.from_numpy(trees.floats[:, 0, VALUE])
    sigma = rules.completed_values(sign[:, None] * value, expanded, prior, visits, sign * model_value, s.value_scale,
                                   s.maxvisit_init)
    most = visits.amax(-1, keepdim=True)
    scores = rules.gumbel_root_scores(torch.from_numpy(trees.gumbel), log_prior, sigma, prior, visits, most)
    logits = torch.where(prior > 0, log_prior + sigma, -torch.inf)
    return scores.argmax(-1), logits.softmax(-1)
