"""Write docs/algorithms.md, the table of algorithms and their supported actions, and the pages in docs/algorithms.

    python tools/algorithm_table.py

The table is tested, not declared: each policy algorithm of a shipped conf is created for a discrete, a continuous and
a mixed action, with feed-forward and with recurrent networks. Unsupported combinations must raise an error about
actions or recurrent networks. Everything else is read: papers, arguments and descriptions from signatures and
docstrings, tasks from the header comments of the confs, results from docs/results.json and docs/curves.json, and tags
from the sources and docs/what_tags_mean.md. All other parts of alfx.algorithms are listed in
docs/reference/algorithms.md.
"""
import argparse
import contextlib
import functools
import inspect
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

from alfx import gin_utils
from alfx.algorithms.algorithm import Algorithm, Loss
from alfx.algorithms.off_policy_algorithm import OffPolicyAlgorithm
from alfx.algorithms.on_policy_algorithm import OnPolicyAlgorithm
from alfx.algorithms.rl_algorithm import RLAlgorithm
from alfx.algorithms.td_loss import TDLoss
from alfx.bin import help as described
from alfx.bin.list import Head, read_heads
from alfx.config import TrainerConfig
from alfx.environments.utils import create_environment
from alfx.runs import building

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / 'tools'))
try:
    import reference
    import results
finally:
    sys.path.pop(0)

_GIVE_ENV = 'create_environment.env_name = '
_GYM = 'create_environment.env_load_fn = @suite_gym.load'
TASKS = {'discrete': (_GIVE_ENV + "'CartPole-v1'", _GYM), 'continuous': (_GIVE_ENV + "'Pendulum-v1'", _GYM),
         'mixed': (_GIVE_ENV + "'Gears'", 'create_environment.env_load_fn = @suite_mixed.load')}
_SMALL = ('create_environment.num_parallel_environments = 2', 'create_environment.nonparallel = True',
          'TrainerConfig.unroll_length = 4', 'TrainerConfig.num_iterations = 9', 'TrainerConfig.mini_batch_length = 4',
          'TrainerConfig.mini_batch_size = 4', 'TrainerConfig.replay_buffer_length = 64',
          'TrainerConfig.offline_buffer_dir = None', 'TrainerConfig.random_seed = 1')
_RECURRENT = {'ActorDistributionNetwork': 'ActorDistributionRNNNetwork', 'ActorNetwork': 'ActorRNNNetwork',
              'CriticNetwork': 'CriticRNNNetwork', 'EncodingNetwork': 'LSTMEncodingNetwork',
              'QNetwork': 'QRNNNetwork', 'SaleActorNetwork': 'ActorRNNNetwork',
              'SaleCriticNetwork': 'CriticRNNNetwork', 'ValueNetwork': 'ValueRNNNetwork'}
_NETWORK = re.compile(r'^((?:\S*_)?network_(?:ctor|cls)) = (@(?:\w+/)?)(\w+)$')
_REFUSED = re.compile(r'discrete action|continuous|one action|nested action|memory|recurrent|feed-forward|without it')
_DATA = "TrainerConfig.offline_buffer_dir = 'data'"
_STATE = 'TrainerConfig.use_rollout_state = True'


class Probe(NamedTuple):
    """Test settings of a policy algorithm.

    Attributes:
        conf: shipped conf; its first line names the algorithm and its paper.
        bindings: additional bindings.
        memory: additional bindings with recurrent networks.
        by_kind: additional bindings for a kind of action.
        confs: other confs for a kind of action.
        trains: create the algorithm for training; False if it needs a dataset to train.
        remembers: the algorithm has a memory without recurrent networks.
    """

    conf: str
    bindings: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    by_kind: dict[str, tuple[str, ...]] = {}
    confs: dict[str, str] = {}
    trains: bool = True
    remembers: bool = False


_GRID = {'discrete': (_GIVE_ENV + "'MountainCar-v0'", 'QLearningAlgorithm.grid_size = 4'),
         'continuous': ('QLearningAlgorithm.grid_size = 4', ), 'mixed': ('QLearningAlgorithm.grid_size = 4', )}
_SIZES = {'continuous': ('decoder/EncodingNetwork.last_layer_size = 3', ),
          'mixed': ('decoder/EncodingNetwork.last_layer_size = 1', )}
PROBES = {
    'ActorCriticAlgorithm': Probe('ac_simple'),
    'AwacAlgorithm': Probe('awac_pendulum'),
    'BcAlgorithm': Probe('bc_pendulum', ('BcAlgorithm.actor_network_cls = @ActorDistributionNetwork', _DATA),
                         trains=False),
    'CategoricalSacAlgorithm': Probe('categorical_sac_pendulum'),
    'CausalBcAlgorithm': Probe('causal_bc_pendulum', (_DATA, ), trains=False),
    'CqlAlgorithm': Probe('cql'),
    'DaggerAlgorithm': Probe('dagger_cart_pole', ('DaggerAlgorithm.expert_cls = @RandomAlgorithm', )),
    'DdpgAlgorithm': Probe('ddpg'),
    'DiscreteCqlAlgorithm': Probe('cql_cart_pole'),
    'DqnAlgorithm': Probe('deep_q', ('DqnAlgorithm.q_network_cls = @QNetwork', )),
    'DynamicActionRepeatAgent': Probe('dynamic_action_repeat'),
    'EvolutionStrategyAlgorithm': Probe('es'),
    'ImpalaAlgorithm': Probe('impala', memory=(_STATE, )),
    'IqlAlgorithm': Probe('iql'),
    'LatentMbrlAlgorithm': Probe('mbrl_latent_pendulum'),
    'MbrlAlgorithm': Probe('mbrl_pendulum'),
    'MdqAlgorithm': Probe('mdq'),
    'MerlinAlgorithm': Probe('merlin_t_maze', by_kind=_SIZES, remembers=True),
    'ModelBasedPolicyAlgorithm': Probe('mbpo_pendulum', ('TrainerConfig.mini_batch_length = 2', )),
    'MpoAlgorithm': Probe('mpo'),
    'MunchausenDqnAlgorithm': Probe('munchausen_dqn_minatar_breakout', (
        'MunchausenDqnAlgorithm.q_network_cls = @QNetwork', 'QNetwork.conv_layer_params = None',
        'TrainerConfig.data_transformer_ctor = None')),
    'MuzeroAlgorithm': Probe('muzero_cart_pole', confs={'continuous': 'muzero_pendulum'}),
    'OacAlgorithm': Probe('oac'),
    'PPGAlgorithm': Probe('ppg', memory=('ppg/LSTMEncodingNetwork.hidden_size = (8, )', _STATE)),
    'PPOAlgorithm': Probe('ppo', memory=(_STATE, )),
    'PpodAlgorithm': Probe('ppod_corridor', trains=False),
    'PqnAlgorithm': Probe('pqn', ('PqnAlgorithm.q_network_cls = @QNetwork', 'TrainerConfig.mini_batch_length = 1')),
    'QLearningAlgorithm': Probe('q_learning', by_kind=_GRID),
    'QrsacAlgorithm': Probe('qrsac'),
    'SacAlgorithm': Probe('sac'),
    'SarsaAlgorithm': Probe('sarsa'),
    'TaacAlgorithm': Probe('taac'),
    'TaacLAlgorithm': Probe('taacl_pendulum'),
    'TaacQAlgorithm': Probe('taacq_pendulum'),
    'Td3Algorithm': Probe('td3'),
    'Td3BcAlgorithm': Probe('td3_bc'),
    'Td7Algorithm': Probe('td7'),
    'TracAlgorithm': Probe('trac_cart_pole'),
}
# policies of some confs that do not learn
NOT_LEARNING = {'RandomAlgorithm', 'LinearFeedbackAlgorithm', 'WaypointAlgorithm'}


class Made(NamedTuple):
    """Properties of an algorithm that was created.

    Attributes:
        compiles: ``TrainerConfig.compile`` supports its update.
        data: 'unrolls' if it trains on each unroll, once or for several epochs; 'replay' if it trains on samples of
            a replay buffer.
    """

    compiles: bool
    data: str


class Row(NamedTuple):
    """Row of the table of algorithms.

    Attributes:
        kinds: supported kinds of actions, a subset of :data:`TASKS`.
        memory: 'yes' with recurrent networks, 'built in' if it has a memory without them, or ''.
        data: see :class:`Made`; 'dataset' is added if a shipped conf trains it on a dataset.
        compiles: see :class:`Made`.
    """

    kinds: tuple[str, ...]
    memory: str
    data: str
    compiles: bool


class Unexpected(RuntimeError):
    """Rejection of an algorithm for a reason other than its actions or recurrent networks."""


def try_to_make(name: str, kind: str, recurrent: bool) -> Made | None:
    """Create an algorithm for a kind of action.

    Args:
        name: name of the class.
        kind: kind of action.
        recurrent: replace all networks with recurrent ones.

    Returns:
        Properties of the algorithm; None if the combination is rejected, or if no network can be recurrent.

    Raises:
        Unexpected: the combination is rejected for another reason.
    """
    probe = PROBES[name]
    conf = probe.confs.get(kind, probe.conf)
    bindings = [*_SMALL, *TASKS[kind], *probe.bindings, *probe.by_kind.get(kind, ())]
    try:
        if recurrent:
            networks = list(_recurrent_networks(gin_utils.load(conf, bindings)))
            if not networks:
                return None
            bindings += [*networks, *probe.memory]
        gin_utils.load(conf, bindings)
        config = TrainerConfig(root_dir='')
        with contextlib.closing(create_environment()) as env:
            algorithm = building.create_algorithm(config, env, trains=probe.trains)
        on_unrolls = algorithm.on_policy or config.whole_replay_buffer_training and config.clear_replay_buffer
        return Made(algorithm.capabilities.traceable_update,
                    'unrolls' if on_unrolls else 'replay')
    except (gin_utils.ConfError, ValueError, TypeError) as error:
        message = ' '.join(str(error).split())
        if _REFUSED.search(message):
            return None
        raise Unexpected(f'{name} of {conf}.gin for a {kind} action{", recurrent" if recurrent else ""}: {message}; '
                         f'correct PROBES[{name!r}], or mention actions or memory in the error message') from error
    finally:
        gin_utils.clear()


def _recurrent_networks(loaded: Any) -> Iterator[str]:
    for binding in loaded.bindings:
        match = _NETWORK.match(str(binding))
        if match is not None and match[3] in _RECURRENT:
            yield f'{match[1]} = {match[2]}{_RECURRENT[match[3]]}'


def row_of(name: str, trains_on_dataset: bool) -> Row:
    """Test an algorithm with all kinds of actions, with feed-forward and recurrent networks."""
    probed = {(kind, recurrent): try_to_make(name, kind, recurrent)
              for kind, recurrent in itertools.product(TASKS, (False, True))}
    plain = {kind: probed[kind, False] for kind in TASKS if probed[kind, False] is not None}
    if not plain:
        raise Unexpected(f'{name} supports no kind of action')
    first = next(found for found in plain.values() if found is not None)
    recurrent = any(probed[kind, True] is not None for kind in TASKS)
    data = ', '.join([first.data] * (_DATA not in PROBES[name].bindings) + ['dataset'] * trains_on_dataset)
    memory = 'built in' if PROBES[name].remembers else 'yes' if recurrent else ''
    return Row(tuple(plain), memory, data, first.compiles)


class Use(NamedTuple):
    """Shipped conf for a task, with its bindings.

    Attributes:
        head: parsed header comment.
        classes: names after an ``@`` in its bindings.
        has_dataset: the conf trains on a dataset.
    """

    head: Head
    classes: frozenset[str]
    has_dataset: bool


@functools.cache
def read_feature_uses() -> tuple[Use, ...]:
    """Return all shipped confs that name a task."""
    uses = []
    for head in read_heads():
        if head.task:
            bindings = [str(binding) for binding in gin_utils.load(head.name).bindings]
            gin_utils.clear()
            values = '\n'.join(binding.split(' = ', 1)[1] for binding in bindings)
            uses.append(Use(head, frozenset(re.findall(r'@(?:\w+/)?(?:\w+\.)*(\w+)', values)),
                            any(re.search(r'\.(offline_buffer_dir|demonstrations) ', binding) for binding in bindings)))
    return tuple(uses)


def algorithms_of(uses: Sequence[Use]) -> dict[str, type]:
    """Return the algorithm classes that confs use by name, except for ``Agent`` and policies that do not learn."""
    named = {name for use in uses for name in use.classes} - NOT_LEARNING - {'Agent'} | set(PROBES)
    found = {target.__name__: target for target in _subclasses(Algorithm)
             if target.__module__.startswith('alfx.') and not issubclass(target, Loss)}
    return {name: found[name] for name in sorted(named & set(found))}


def _subclasses(target: type) -> Iterator[type]:
    for subclass in target.__subclasses__():
        yield from (subclass, *_subclasses(subclass))


def papers(*texts: str) -> str:
    """Return links to the publications cited by the first text that cites any; '' if none does."""
    for text in texts:
        joined = ' '.join(text.split())
        cited = [*re.findall(r'\(([A-Z][^()]*\b(?:19|20)\d\d\b[^()]*)\)', joined),
                 *(f'{who}, {where}' for who, where in re.findall(
                     r'([A-Z][\w-]+(?:, [A-Z]\w+)*(?: et al\.| (?:and|&) [A-Z]\w+)?,? (?:19|20)\d\d)'
                     r'(?: \(|, (?:"[^"]*", )?)((?:arXiv|doi):[^\s,);]*[^\s,);.])', joined))]
        if cited:
            return '; '.join(_linked(paper) for paper in dict.fromkeys(cited))
    return ''


def _linked(paper: str) -> str:
    paper = re.sub(r'(https?:\S*[^\s.,;])', r'<\1>', paper)
    paper = re.sub(r'arXiv:(\d+\.\d+)', r'[arXiv:\1](https://arxiv.org/abs/\1)', paper)
    return re.sub(r'doi:([^\s,;]*[^\s,;.])', r'[doi:\1](https://doi.org/\1)', paper)


def _conf_rows(uses: Sequence[Use], stored: dict[str, Any]) -> Iterator[str]:
    yield '| conf | task | steps | expected | measured |'
    yield '| --- | --- | ---: | --- | --- |'
    for use in uses:
        head = use.head
        rows = results.rows_of(head.name, stored[head.name]) if head.name in stored else []
        measured = '; '.join(f"{row[5].partition(',')[0]} {row[6]}{f' ({row[7]})' if row[7] else ''}, {row[3]} "
                             f"seed{'s' if row[3] != '1' else ''}{''.join(row[5].partition(',')[1:])}" for row in rows)
        yield f'| `{head.name}` | {head.task} | {head.steps} | {head.expected} | {measured} |'


def losses_of(target: type, named: Set[str]) -> list[type]:
    """Return the losses used in the modules of an algorithm and its bases, and those with one of the given names."""
    known = [value for module in _modules(target) for value in vars(module).values()]
    known += [loss for base in (Loss, TDLoss) for loss in (base, *_subclasses(base)) if loss.__name__ in named]
    return sorted({x for x in filter(inspect.isclass, known) if issubclass(x, (Loss, TDLoss)) and x is not Loss},
                  key=lambda loss: loss.__name__)


def _modules(target: type) -> list[Any]:
    """Return the modules of a class and its bases, except for the bases of all algorithms."""
    bases = [base for base in inspect.getmro(target) if base.__module__.startswith('alfx.algorithms')
             and base not in (Algorithm, Loss, RLAlgorithm, OnPolicyAlgorithm, OffPolicyAlgorithm)]
    return [sys.modules[name] for name in dict.fromkeys(base.__module__ for base in bases)]


def tags_of(*targets: type) -> tuple[list[str], list[str]]:
    """Return the tags that classes log at summaries, from the sources of the classes and their bases.

    Returns:
        Rows of the tables of docs/what_tags_mean.md, and the names of other tags without their prefix.
    """
    sources = [inspect.getsource(module) for target in targets for module in _modules(target)]
    named = re.findall(r"summary(?:_utils)?\.(?!scope)\w+\(\s*f?'([^']+)'", '\n'.join(sources))
    written = {name.replace('{self._name}', targets[0].__name__).replace('{suffix}', '') for name in named}
    written = {name for name in written if not name.startswith('{')}
    explained, known = [], set()
    for row in re.findall(r'^\| `.*$', (ROOT / 'docs' / 'what_tags_mean.md').read_text(), re.MULTILINE):
        tags = re.findall('`([^`]*)`', row.split(' | ')[0])
        documented = {name for name in written if any(re.fullmatch(_any_part(name), tag) for tag in tags)}
        explained += [row] * bool(documented)
        known |= documented
    return explained, sorted({re.sub(r'\{[^}]*\}', '*', name) for name in written - known})


def _any_part(name: str) -> str:
    """Return a regular expression for the values of an f-string."""
    return '[^/]+'.join(re.escape(part) for part in re.split(r'\{[^}]*\}', name))


def page_of(name: str, target: type, head: Sequence[str], uses: Sequence[Use], stored: dict[str, Any],
            entries: dict[str, described.Entry]) -> str:
    """Return the page of an algorithm.

    Args:
        name: name of the class.
        target: class.
        head: first line of the conf that it is tested with, and its row of the table; empty for a part.
        uses: confs that use it.
        stored: content of docs/results.json.
        entries: objects of alfx.algorithms that confs can bind, by name.
    """
    module = inspect.getdoc(inspect.getmodule(target)) or ''
    cited = papers(*head[:1], inspect.getdoc(target) or '', module)
    descriptions = reference.meanings(entries[name])
    lines = [f'# {name}', '', *_introduction(entries[name]), '',
             (f'Paper: {cited}. ' if cited else '')
             + f"Source: `{target.__module__.replace('.', '/')}.py`. [All algorithms](../algorithms.md)", '',
             *([*_COLUMNS, head[1], ''] if head else []),
             *(f'- `{key}`: {reference.cell(descriptions[key])}' for key in _SPECS if key in descriptions), '',
             '## How it works', '', *reference.as_markdown(module), '']
    if uses:
        pictures = [results.picture_of(use.head.name) for use in uses]
        lines += ['## Confs and results', '', *textwrap.wrap(_EXPECTED, 120), '', *_conf_rows(uses, stored), '',
                  *(f'![Learning curve of {path.stem}](../{path.relative_to(ROOT / "docs")})' for path in pictures
                    if path.exists()), '']
    lines += ['## Arguments', '',
              f'`alfx help {name}` prints these arguments. Those that alfx passes itself are omitted.', '',
              *reference.arguments(entries[name])]
    losses = losses_of(target, {loss for use in uses for loss in use.classes} if head else set())
    links = [f'[{loss.__name__}](../reference/algorithms.md#{loss.__name__.lower()})' for loss in losses
             if loss.__name__ in entries]
    lines += [f"Losses: {', '.join(links)}.", ''] if links else []
    return re.sub('\n{3,}', '\n\n', '\n'.join(lines + _tag_lines(target, *losses))).rstrip() + '\n'


def _tag_lines(*targets: type) -> list[str]:
    explained, further = tags_of(*targets)
    lines = ['## Tags', '', 'Logged at summaries, in addition to the [common tags](../what_tags_mean.md):', '']
    if explained:
        lines += ['| tag | meaning | healthy | otherwise |', '| --- | --- | --- | --- |',
                  *(row.replace('](', '](../') for row in explained), '']
    if further:
        lines += textwrap.wrap('Under the name of the algorithm, its loss or a part: '
                               f"{', '.join(f'`{x}`' for x in further)}. "
                               'Some of them need `TrainerConfig.debug_summaries`.', 120)
    return lines if explained or further else []


_HEAD = """# Algorithms

Each algorithm has a page with its paper, arguments, confs, results and tags. `alfx help NAME` prints all arguments of a
class, and `alfx show CONF` a conf in full. The columns of the table are

- *actions*: supported kinds of actions; *mixed* is a combination of discrete and continuous actions;
- *recurrent*: *yes* if recurrent networks are supported, *built in* if the algorithm has a memory without them;
- *learns from*: *unrolls*, the latest rollout, which is then discarded; *replay*, samples from a replay buffer;
  *dataset*, stored data or demonstrations, in at least one shipped conf; TD3, DDPG, DQN and MPO
  [can as well](offline.md);
- *compiled*: the update executes the same operations every time, so `TrainerConfig.compile` supports it.

`python tools/algorithm_table.py` writes this page and the page of each algorithm.

"""
_SPECS = 'observation_spec', 'action_spec', 'reward_spec'
_COLUMNS = '| actions | recurrent | learns from | compiled |', '| --- | --- | --- | --- |'
_EXPECTED = ('*Expected* is the value in the header comment of the conf. *Measured* is the mean over seeds with its '
             "95% interval (Student's t), empty if there is no result; the tables of [the results](../results.md) have "
             'interquartile means and bootstrap intervals.')
_PARTS = """
## Parts and other algorithms

These are parts of an [`Agent`](compose_an_agent.md) (intrinsic rewards, representations, models, planners, imitation
rewards) and algorithms for supervised learning.

"""


def pages() -> dict[str, str]:
    """Return the text of docs/algorithms.md, docs/reference/algorithms.md and each algorithm page, by path in docs."""
    uses = read_feature_uses()
    stored = json.loads((ROOT / 'docs' / 'results.json').read_text())
    titles = {head.name: (Path(gin_utils.load(head.name).conf_file).read_text().splitlines()[0], head.algorithm)
              for head in read_heads() if head.name in {probe.conf for probe in PROBES.values()}}
    gin_utils.clear()
    classes = algorithms_of(uses)
    listed = reference.entries()[reference.ALGORITHMS]
    entries = {entry.defined_as: entry for entry in listed}
    lines = [f'| algorithm | description {_COLUMNS[0]}', f'| --- | --- {_COLUMNS[1]}']
    heads = {}
    for name, probe in PROBES.items():
        row = row_of(name, any(use.has_dataset and name in use.classes for use in uses))
        title, algorithm = titles[probe.conf]
        cells = f"| {', '.join(row.kinds)} | {row.memory} | {row.data} | {'yes' if row.compiles else ''} |"
        lines.append(f"| {_link(name)} | {algorithm.split(' on ')[0]} {cells}")
        heads[name] = title, cells
    parts = [f'| {_link(name)} | {_first_sentence(entries[name])} |' for name in classes if name not in PROBES]
    text = _HEAD + '\n'.join([*lines, _PARTS, '| part | description |', '| --- | --- |', *parts])
    others = [entry for entry in listed if entry.defined_as not in classes]
    return {'algorithms.md': text + '\n',
            'reference/algorithms.md': reference.page_of(reference.ALGORITHMS, others).rstrip() + '\n',
            **{f'algorithms/{name}.md': page_of(
                name, target, heads.get(name, ()), [use for use in uses if name in use.classes], stored, entries)
               for name, target in classes.items()}}


def _link(name: str) -> str:
    return f"[{name.removesuffix('Algorithm')}](algorithms/{name}.md)"


def _first_sentence(entry: described.Entry) -> str:
    return re.sub(r'\s*\([A-Z][^()]*arXiv[^()]*\)', '', ' '.join(itertools.takewhile(bool, _introduction(entry))))


def _introduction(entry: described.Entry) -> Iterator[str]:
    return (re.sub(r'; see the module\b[^.]*', '', line) for line in reference.introduction(entry))


def main() -> int:
    """Write the pages; return the exit code."""
    argparse.ArgumentParser(description='Write docs/algorithms.md and the pages of the algorithms.').parse_args()
    for name, text in pages().items():
        path = ROOT / 'docs' / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == '__main__':
    sys.exit(main())
