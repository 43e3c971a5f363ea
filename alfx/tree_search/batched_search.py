"""Batched tree search: S times select a leaf of every tree, evaluate it with the model, expand and back up.

All B trees advance together, so the model is called once per simulation for all of them, or once for several
independent simulations. The trees (:mod:`alfx.tree_search.trees`) are in host memory. The latent states of the model
stay on its device, in one tensor ``[N * B, ...]`` for each leaf of the state, written and read by index. Selection,
expansion and backup run in C (:mod:`alfx.tree_search.native_search`) or, without a compiler, on tensors
(:mod:`alfx.tree_search.tensor_search`), with bit-identical results: torch's generator draws all random numbers
beforehand.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from alfx import nest
from alfx.tensor_specs import NestedTensor
from alfx.tree_search import build, rules
from alfx.tree_search.native_search import NativeSearch
from alfx.tree_search.tensor_search import TensorSearch
from alfx.tree_search.trees import CHILD, PRIOR, VALUE, VISITS, Noise, SearchSettings, Trees


class SearchError(ValueError):
    """The model returned values that are not finite."""


_NOT_FINITE = ('is not finite. Common causes: a learning rate that is too high, no gradient clipping, very large '
               'rewards or observations')


class Prediction(NamedTuple):
    """Predictions of a model for N nodes; additional fields are allowed.

    Attributes:
        value: ``[N]``, value for the first player.
        reward: ``[N]``, reward for arriving at the node, for the first player; ``()`` means 0.
        game_over: bool ``[N]``, True at terminal nodes; ``()`` means never.
        actions: ``[N, A, ...]``, candidate actions; ``()`` means the integers 0, ..., A - 1.
        action_probs: ``[N, A]``, prior probabilities of the actions; actions with probability 0 do not exist.
        state: nest of ``[N, ...]``, latent state of the model.
    """

    value: Tensor
    reward: Any = ()
    game_over: Any = ()
    actions: Any = ()
    action_probs: Any = ()
    state: NestedTensor = ()


Model = Callable[[NestedTensor, Tensor], Any]
"""Model: called with the states of N nodes and an action of each, ``[N, ...]``; returns a :class:`Prediction` of the
resulting nodes, or another record with these fields."""

BackendFactory = Callable[[Callable[[Any], Any], nn.Module], Callable[[Any], Any]]
"""Backend: called with a function of tensors and the module whose buffers it reads and writes; returns an equivalent
function."""


def root_prior(prior: Tensor, mask: Tensor | None, dirichlet_alpha: float, fraction: float) -> Tensor:
    """Compute the prior of the actions at roots: only valid actions, mixed with noise.

    The result is ``(1 - fraction) * prior / sum(prior) + fraction * noise``. The sum runs over valid actions, and the
    noise is a sample of a Dirichlet distribution over them. If the prior of all valid actions is 0, the prior is
    uniform over them.

    Args:
        prior: ``[B, A]``.
        mask: bool ``[B, A]``, the valid actions, at least one per row; ``None`` means all.
        dirichlet_alpha: parameter of the noise.
        fraction: weight of the noise; with 0 no random numbers are drawn.

    Returns:
        Prior, float64 ``[B, A]`` in host memory.
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
    """Search with fixed settings.

    Trees, latent states and the functions created by ``make_backend`` are cached for the last four batch sizes; if
    more batch sizes alternate, they are created again each time.

    Args:
        settings: settings of the search.
        native: use the compiled code if it is available.
        make_backend: creates a faster backend of a function; called as ``make_backend(function, memory)``. The
            function is the work around each call of the model, from int64 ``[3, N]`` to ``()``, and ``memory`` the
            module whose buffers it reads and writes. All searches must then use the same model. ``None`` runs the
            function eagerly.
    """

    _KEPT = 4

    def __init__(self, settings: SearchSettings, native: bool = True, make_backend: BackendFactory | None = None):
        self.settings = settings
        self._native, self._make_backend = native, make_backend
        self._forests: dict[Any, _Forest] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without trees; copies and pickles start with an empty cache."""
        return {**self.__dict__, '_forests': {}}

    @torch.no_grad()
    def run(self, model: Model, root: Any, prior: Tensor, to_play: Tensor) -> Trees:
        """Search from the roots.

        Args:
            model: the model.
            root: a :class:`Prediction` of the roots; reward, game over and priors are ignored.
            prior: float64 ``[B, A]`` in host memory, prior of the actions of the roots.
            to_play: int ``[B]``, 0 or 1, the player to move.

        Returns:
            The trees; the next search with the same batch size overwrites them.

        Raises:
            SearchError: the model returned values that are not finite.
        """
        batch_size, num_actions = prior.shape
        kept = nest.flatten((root.state, root.actions))
        key = batch_size, num_actions, root.value.device, *((x.shape[1:], x.dtype, x.device) for x in kept)
        forest = self._forests.pop(key, None)
        if forest is None:
            forest = _Forest(self.settings, batch_size, num_actions, root, self._native, self._make_backend)
            if len(self._forests) >= self._KEPT:
                self._forests.pop(next(iter(self._forests)))
        self._forests[key] = forest  # dicts keep insertion order: the most recently used is last
        noise = Noise.draw(self.settings, batch_size, num_actions)
        forest.run(model, root, prior, to_play.cpu(), noise)
        return forest.trees


class _Memory(nn.Module):
    """Latent states and candidate actions of the nodes of all trees; row ``n * B + b`` is node n of tree b.

    Args:
        root: prediction of the roots.
        num_rows: number of nodes.
        width: count of numbers predicted for each node.
        most: maximum number of nodes in one call of the model.

    Attributes:
        outputs: float64 ``[most, width]``, predictions of the latest call, see ``TensorSearch.expand_backup``.
    """

    outputs: Tensor
    actions: Tensor

    def __init__(self, root: Any, num_rows: int, width: int, most: int):
        super().__init__()
        self._structure = nest.structure(root.state)
        self._count = len(nest.flatten(root.state))
        kept = {f'state_{i}': x for i, x in enumerate(nest.flatten(root.state))}
        self._names_actions = not isinstance(root.actions, tuple)
        if self._names_actions:
            kept['actions'] = root.actions
        for name, x in kept.items():
            self.register_buffer(name, x.new_zeros(num_rows, *x.shape[1:]))
        self.register_buffer('outputs', torch.zeros(most, width, dtype=torch.float64, device=root.value.device))

    def read(self, rows: Tensor, action: Tensor) -> tuple[NestedTensor, Tensor]:
        """Return the states of nodes, and the actions with the given indices."""
        state = [getattr(self, f'state_{i}').index_select(0, rows) for i in range(self._count)]
        return self._structure.unflatten(state), self.actions[rows, action] if self._names_actions else action

    def write(self, rows: Tensor, output: Any) -> None:
        """Store the states and the candidate actions of nodes."""
        states: list[Any] = self._structure.flatten_up_to(output.state)
        for i, new in enumerate(states):
            kept = getattr(self, f'state_{i}')
            kept.index_copy_(0, rows, new.to(kept.dtype))
        if self._names_actions:
            self.actions.index_copy_(0, rows, output.actions.to(self.actions.dtype))


class _Step:
    """Work of each call of the model: everything between selection and expansion.

    It holds no reference to a forest: a reference cycle would keep the forest alive until garbage collection.

    Args:
        memory: read and written.
        with_logs: also return the logs of the priors.
    """

    model: Model

    def __init__(self, memory: _Memory, with_logs: bool):
        self._memory, self._with_logs = memory, with_logs

    def take(self, places: Tensor) -> tuple[()]:
        """Predict the nodes that follow ``places``, see :meth:`_Forest._call`, and write them to the memory."""
        rows, action, new = places.unbind(0)
        output = self.model(*self._memory.read(rows, action))
        self._memory.write(new, output)
        value, prior = output.value.double()[:, None], output.action_probs.double()
        reward, over = (torch.zeros_like(value) if isinstance(x, tuple) else x.double()[:, None]
                        for x in (output.reward, output.game_over))
        logs = (prior.log(), ) if self._with_logs else ()
        self._memory.outputs[:len(rows)] = torch.cat((value, reward, over, prior, *logs), 1)
        return ()


class _Forest:
    """Trees and latent states for one batch size; all buffers are allocated once."""

    def __init__(self, settings: SearchSettings, batch_size: int, num_actions: int, root: Any, native: bool,
                 make_backend: BackendFactory | None):
        self._settings, self._batch_size, self._num_actions = settings, batch_size, num_actions
        self.trees = Trees(settings, batch_size, num_actions)
        library = build.load() if native else None
        self._halves: Any = TensorSearch(self.trees) if library is None else NativeSearch(self.trees, library)
        width = 3 + num_actions * (2 if settings.rule == 'gumbel' else 1)
        most = max(self.trees.num_paths, num_actions if settings.expand_all or settings.expand_root else 1)
        self._memory = _Memory(root, self.trees.ints.shape[1] * batch_size, width, most * batch_size)
        self._is_on_host = root.value.device.type == 'cpu'
        self._outputs = self._memory.outputs if self._is_on_host else torch.zeros_like(self._memory.outputs,
                                                                                      device='cpu')
        self._roots = torch.arange(batch_size, device=root.value.device)  # rows of the roots
        self._calls: dict[int, tuple[Tensor, Tensor]] = {}
        self._step = _Step(self._memory, settings.rule == 'gumbel')
        self._take = make_backend(self._step.take, self._memory) if make_backend else self._step.take

    def run(self, model: Model, root: Any, prior: Tensor, to_play: Tensor, noise: Noise) -> None:
        """Run one search."""
        value = root.value.detach().to('cpu', torch.float64)
        finite = np.isfinite(prior.numpy()).all(-1) & np.isfinite(value.numpy())
        if not finite.all():
            raise SearchError(f'root {finite.argmin()} of {self._batch_size}: the value or the prior that the '
                              f'model predicts for the root itself {_NOT_FINITE}')
        self._step.model = model
        self.trees.plant(value, prior, to_play, noise)
        self._memory.write(self._roots, root)
        first, made, per_leaf = 1, 0, self._num_actions if self._settings.expand_all else 1
        if self._settings.expand_root:
            places, outputs = self._call(self._num_actions)
            self.trees.choose_roots(places.numpy())
            self._ask(places)
            self._check(self._halves.expand_root(outputs), 'expanding the root')
            first += self._num_actions
        for step, count in enumerate(self.trees.steps):
            places, outputs = self._call(count * per_leaf)
            self._halves.select(step, count, first, places)
            self._ask(places)
            bad_root = self._halves.expand_backup(outputs, first)
            if bad_root >= 0:
                self._check(bad_root, f'simulation {made}')
            first, made = first + count * per_leaf, made + count

    def _call(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the buffers of a call of the model for n nodes of each tree; they are allocated once.

        Returns:
            Inputs, int64 ``[3, n * B]``: rows of the parent nodes, indices of the actions, rows of the new nodes; and
            predictions, see ``TensorSearch.expand_backup``; both in host memory.
        """
        if size not in self._calls:
            places = torch.zeros(3, size * self._batch_size, dtype=torch.int64)
            outputs = self._outputs[:size * self._batch_size].view(size, self._batch_size, -1)
            self._calls[size] = places, outputs
        return self._calls[size]

    def _ask(self, places: Tensor) -> None:
        """Predict the nodes that follow, and store their states."""
        if self._is_on_host:
            self._take(places)
        else:
            self._take(places.to(self._memory.outputs.device))
            count = places.shape[1]
            self._outputs[:count].copy_(self._memory.outputs[:count])

    def _check(self, bad: int, when: str) -> None:
        if bad >= 0:
            raise SearchError(f'root {bad} of {self._batch_size}, {when}: a value, reward or prior that the model '
                              f'predicts {_NOT_FINITE}')


# Results of a search ----------------------------------------------------------------------------------------------


def exploration_policy(trees: Trees, kind: str, node: int = 0) -> Tensor:
    """Regularized policy at the roots after the search, float64 ``[B, A]``.

    Args:
        trees: trees after a search.
        kind: 'rkl' or 'kl'.
        node: index of another node, the same in all trees.
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
    """Best action ``[B]`` among the most visited ones, and improved policy ``[B, A]``, of Gumbel MuZero."""
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
