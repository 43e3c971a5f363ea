"""Test all combinations of policy algorithms, intrinsic rewards and representations, composed by confs.

    python tools/compose.py                                        # test all combinations and print the table
    python tools/compose.py --all --markdown docs/composition.md   # also write the page
    python tools/compose.py --policy ppo --intrinsic rnd icm       # test some combinations

Each cell of the table is a conf of includes and bindings, which is trained for a few iterations on a small task. It
must train with finite losses, use every binding, train each parameter with exactly one optimizer, end with the same
parameters when it is repeated with the same seed, load its checkpoint into a new algorithm, and play an episode.
Unsupported combinations must be rejected before the first environment step, with a message that gives the reason.
With --all, exploration bonuses, variants of policy algorithms and ways to train them are tested as well, in smaller
tables.
"""
import argparse
import itertools
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from alfx import gin_utils
from alfx.config import TrainerConfig
from alfx.offline import dataset_folder, recorder
from alfx.runs import building
from alfx.runs import run_files
from alfx.runs.playing import play
from alfx.tensor_specs import SpecError
from alfx.trainers.policy_trainer import RLTrainer
from alfx.utils.checkpoint_utils import read_checkpoint

_COMMON = """
create_environment.num_parallel_environments = 2
create_environment.nonparallel = True
TrainerConfig.random_seed = 3
TrainerConfig.num_threads = 1
TrainerConfig.float32_matmul_precision = 'highest'
TrainerConfig.num_iterations = 6
TrainerConfig.num_checkpoints = 1
TrainerConfig.summary_interval = 3
TrainerConfig.num_summaries = None
"""
_ON_POLICY = 'TrainerConfig.unroll_length = 6\n'
_PPO = """
TrainerConfig.unroll_length = 6
TrainerConfig.mini_batch_length = 2
TrainerConfig.mini_batch_size = 4
TrainerConfig.num_updates_per_train_iter = 2
"""
_REPLAY = """
TrainerConfig.unroll_length = 4
TrainerConfig.initial_collect_steps = 12
TrainerConfig.mini_batch_length = {length}
TrainerConfig.mini_batch_size = 4
TrainerConfig.num_updates_per_train_iter = 2
TrainerConfig.replay_buffer_length = 64
"""
_STATE = 'TrainerConfig.use_rollout_state = True\n'
_CART_POLE = "create_environment.env_name = 'CartPole-v1'\n"
_PENDULUM = "create_environment.env_name = 'Pendulum-v1'\n"
_GEARS = "create_environment.env_name = 'Gears'\ncreate_environment.env_load_fn = @suite_mixed.load\n"
_OBSERVATION_SIZE = {_CART_POLE: 4, _PENDULUM: 3, _GEARS: 1}


class Policy(NamedTuple):
    """Policy algorithm with the bindings of its networks.

    Attributes:
        include: base conf.
        task: bindings of the environment and others.
        networks: class of each network with its size argument.
        recurrent: bindings that make the networks recurrent; ``None`` if that is not supported.
        recurrent_networks: class of each recurrent network with its size argument.
        replay: train on samples of a replay buffer; otherwise on each unroll.
    """

    include: str
    task: str
    networks: tuple[str, ...]
    recurrent: str | None
    recurrent_networks: tuple[str, ...]
    replay: bool = True


_ACTOR_CRITIC_NETWORKS = ('ActorDistributionNetwork.fc_layer_params', 'ValueNetwork.fc_layer_params')
_ACTOR_CRITIC_RNNS = ('ActorDistributionRNNNetwork.fc_layer_params', 'ValueRNNNetwork.fc_layer_params')
_DETERMINISTIC = ('ActorNetwork.fc_layer_params', 'CriticNetwork.joint_fc_layer_params')
_DETERMINISTIC_RNNS = ('ActorRNNNetwork.fc_layer_params', 'CriticRNNNetwork.joint_fc_layer_params')

POLICIES = {
    'actor-critic': Policy('ac_simple.gin', _CART_POLE + _ON_POLICY, _ACTOR_CRITIC_NETWORKS,
                           'ActorCriticAlgorithm.actor_network_ctor = @ActorDistributionRNNNetwork\n'
                           'ActorCriticAlgorithm.value_network_ctor = @ValueRNNNetwork\n', _ACTOR_CRITIC_RNNS, False),
    'ppo': Policy('ppo.gin', _CART_POLE + _PPO, _ACTOR_CRITIC_NETWORKS,
                  'PPOAlgorithm.actor_network_ctor = @ActorDistributionRNNNetwork\n'
                  'PPOAlgorithm.value_network_ctor = @ValueRNNNetwork\n' + _STATE, _ACTOR_CRITIC_RNNS, False),
    'sac continuous': Policy('sac.gin', _PENDULUM + 'NormalProjectionNetwork.state_dependent_std = True\n'
                             'NormalProjectionNetwork.scale_distribution = True\n',
                             ('ActorDistributionNetwork.fc_layer_params', 'CriticNetwork.joint_fc_layer_params'),
                             'SacAlgorithm.actor_network_cls = @ActorDistributionRNNNetwork\n'
                             'SacAlgorithm.critic_network_cls = @CriticRNNNetwork\n',
                             ('ActorDistributionRNNNetwork.fc_layer_params', 'CriticRNNNetwork.joint_fc_layer_params')),
    'sac discrete': Policy('sac.gin', _CART_POLE, ('QNetwork.fc_layer_params', ),
                           'SacAlgorithm.q_network_cls = @QRNNNetwork\n', ('QRNNNetwork.fc_layer_params', )),
    'sac mixed': Policy('sac.gin', _GEARS,
                        ('ActorDistributionNetwork.fc_layer_params', 'QNetwork.fc_layer_params'),
                        'SacAlgorithm.actor_network_cls = @ActorDistributionRNNNetwork\n'
                        'SacAlgorithm.q_network_cls = @QRNNNetwork\n',
                        ('ActorDistributionRNNNetwork.fc_layer_params', 'QRNNNetwork.fc_layer_params')),
    'dqn': Policy('dqn.gin', _CART_POLE, ('QNetwork.fc_layer_params', ),
                  'DqnAlgorithm.q_network_cls = @QRNNNetwork\n', ('QRNNNetwork.fc_layer_params', )),
    'ddpg': Policy('ddpg.gin', _PENDULUM, _DETERMINISTIC, 'DdpgAlgorithm.actor_network_ctor = @ActorRNNNetwork\n'
                   'DdpgAlgorithm.critic_network_ctor = @CriticRNNNetwork\n', _DETERMINISTIC_RNNS),
    'td3': Policy('td3.gin', _PENDULUM, _DETERMINISTIC, 'Td3Algorithm.actor_network_ctor = @ActorRNNNetwork\n'
                  'Td3Algorithm.critic_network_ctor = @CriticRNNNetwork\n', _DETERMINISTIC_RNNS),
    'impala': Policy('impala.gin', _CART_POLE + _PPO, _ACTOR_CRITIC_NETWORKS,
                     'ImpalaAlgorithm.actor_network_ctor = @ActorDistributionRNNNetwork\n'
                     'ImpalaAlgorithm.value_network_ctor = @ValueRNNNetwork\n' + _STATE, _ACTOR_CRITIC_RNNS, False),
    'ppg': Policy('ppg.gin', _CART_POLE + _PPO + 'PPGAuxOptions.interval = 2\nPPGAuxOptions.mini_batch_length = 3\n',
                  ('ppg/EncodingNetwork.fc_layer_params', ),
                  'PPGAlgorithm.encoding_network_ctor = @ppg/LSTMEncodingNetwork\n'
                  'ppg/LSTMEncodingNetwork.hidden_size = (8, )\n' + _STATE,
                  ('ppg/LSTMEncodingNetwork.pre_fc_layer_params', ), False),
}
_OPTIMIZER = 'Agent.optimizer = @parts/Adam()\nparts/Adam.lr = 1e-3\n'  # if the policy has its own
INTRINSIC = {'none': '', 'icm': "include 'icm.gin'\n", 'rnd': "include 'rnd.gin'\n", 'diayn': "include 'diayn.gin'\n"}
_CRITIC_NETWORKS = ('ActorDistributionNetwork.fc_layer_params', 'CriticNetwork.joint_fc_layer_params')
_SMALL_BLOCKS = 'actor/BlockEncodingNetwork.hidden_size = 16\ncritic/BlockEncodingNetwork.hidden_size = 16\n'
VARIANTS = {  # policy algorithms that are tested with feed-forward networks and without representation
    'pqn': Policy('pqn.gin', _CART_POLE + _PPO.replace('length = 2', 'length = 1'), ('QNetwork.fc_layer_params', ),
                  None, (), False),
    'munchausen dqn': Policy('munchausen_dqn_minatar_breakout.gin', _CART_POLE + 'QNetwork.conv_layer_params = None\n'
                             'create_environment.env_load_fn = @suite_gym.load\n'
                             'TrainerConfig.data_transformer_ctor = None\n', ('QNetwork.fc_layer_params', ), None, ()),
    'qrsac': Policy('qrsac.gin', _PENDULUM, _CRITIC_NETWORKS, None, ()),
    'tqc': Policy('tqc.gin', _PENDULUM, _CRITIC_NETWORKS, None, ()),
    'categorical sac': Policy('categorical_sac.gin', _PENDULUM, _CRITIC_NETWORKS, None, ()),
    'crossq': Policy('crossq.gin', _PENDULUM, _CRITIC_NETWORKS, None, ()),
    'droq': Policy('droq.gin', _PENDULUM, _CRITIC_NETWORKS, None, ()),
    'simba': Policy('simba.gin', _PENDULUM + _SMALL_BLOCKS, (), None, ()),
    'simba_v2': Policy('simba_v2.gin', _PENDULUM + _SMALL_BLOCKS, (), None, ()),
    'bro': Policy('bro.gin', _PENDULUM + _SMALL_BLOCKS + 'ResetNetworks.at_env_steps = (30, )\n', (), None, ()),
    'flash_sac': Policy('flash_sac.gin', _PENDULUM + _SMALL_BLOCKS, (), None, ()),
    'xqc': Policy('xqc.gin', _PENDULUM, _CRITIC_NETWORKS, None, ()),
    'td7': Policy('td7.gin', _PENDULUM, ('SaleActorNetwork.fc_layer_params', 'SaleCriticNetwork.joint_fc_layer_params'),
                  None, ()),
}
BONUSES = {name: f"include '{name}.gin'\n" for name in (
    'episodic_count', 'e3b', 'noveld', 'ride', 'pseudo_count', 'ngu', 're3', 'disagreement', 'apt', 'deir')}
for _name in ('episodic_count', 'noveld', 'ride'):
    BONUSES[_name] += 'EpisodicCount.resolution = 0.1\n'  # for observations that are floats
BONUSES['apt'] += 'ParticleEntropy.num_neighbors = 2\n'  # for minibatches of four sequences
_DATASET = 'recorded_steps'
_GOALS = "create_environment.env_load_fn = @suite_goals.load\ncreate_environment.env_name = 'PointGoal'\n"
TRAINING = {  # ways to train a variant of soft actor-critic
    'dict observation': _GOALS,
    'hindsight': _GOALS + 'TrainerConfig.data_transformer_ctor = (@HindsightExperienceTransformer, {transformer})\n',
    'n-step': 'TrainerConfig.mini_batch_length = 4\n',
    'prioritized': 'TrainerConfig.priority_replay = True\nSacAlgorithm.calculate_priority = True\n',
    'prior data': f"TrainerConfig.offline_buffer_dir = '{_DATASET}'\nTrainerConfig.offline_mini_batch_size = 4\n",
    'mbpo': "include 'mbpo.gin'\nModelBasedPolicyAlgorithm.rl_algorithm_cls = @{algorithm}\n"
            'Agent.rl_algorithm_cls = @ModelBasedPolicyAlgorithm\n'
            'StochasticDynamicsAlgorithm.num_replicas = 3\nStochasticDynamicsAlgorithm.num_elites = 2\n'
            'StochasticDynamicsAlgorithm.hidden_size = (16, )\nModelBasedPolicyAlgorithm.model_period = 8\n'
            'ModelBasedPolicyAlgorithm.max_model_updates = 4\nModelBasedPolicyAlgorithm.num_rollouts = 16\n'
            'ModelBasedPolicyAlgorithm.num_imagined = 64\n'}
_TRAINED = {  # class and data transformer of the variants that are trained in these ways
    'crossq': ('SacAlgorithm', ''), 'simba': ('SacAlgorithm', '@ObservationNormalizer'),
    'categorical sac': ('CategoricalSacAlgorithm', '@DiscountedReturnScaling')}
_ENCODING = """
Agent.representation_learner_cls = @EncodingAlgorithm
EncodingAlgorithm.encoder_cls = @representation/EncodingNetwork
representation/EncodingNetwork.fc_layer_params = (16, )
"""
_VAE = """
Agent.representation_learner_cls = @VAERepresentationLearner
VAERepresentationLearner.vae_ctor = @VariationalAutoEncoder
VariationalAutoEncoder.z_dim = 4
VAERepresentationLearner.decoder_ctor = @decoder/EncodingNetwork
decoder/EncodingNetwork.fc_layer_params = (16, )
decoder/EncodingNetwork.last_layer_size = {size}
decoder/EncodingNetwork.last_activation = @math_ops.identity
"""
_PREDICTIVE = """
include 'predictive.gin'
PredictiveRepresentationLearner.num_unroll_steps = 2
encoder/LSTMEncodingNetwork.hidden_size = (8, )
dynamics/LSTMEncodingNetwork.hidden_size = (8, )
decoder/EncodingNetwork.fc_layer_params = (16, )
decoder/EncodingNetwork.last_layer_size = {size}
"""
REPRESENTATION = {'none': '', 'encoding': _ENCODING, 'predictive': _PREDICTIVE, 'vae': _VAE}
FORMS = ('feed-forward', 'recurrent')


_ONE_HOT = 'OneHot.num_classes = 2\ndynamics/LSTMEncodingNetwork.input_preprocessors = '
_ACTION_INPUTS = {  # encoding of the actions in the dynamics of the predictive representation
    _CART_POLE: _ONE_HOT + '@OneHot()\n', _PENDULUM: '',
    _GEARS: _ONE_HOT + '(@OneHot(), None)\ndynamics/LSTMEncodingNetwork.preprocessing_combiner = @NestConcat()\n'}


class Cell(NamedTuple):
    """Combination, given by keys of the tables above."""

    policy: str
    intrinsic: str
    representation: str
    form: str


class Outcome(NamedTuple):
    """Result of a cell: ``'ok'``, ``'rejected'`` with the error message, or ``'failed'`` with the problems."""

    verdict: str
    message: str = ''


def conf_of(cell: Cell) -> str:
    """Return the conf of a cell, which consists of includes and bindings."""
    policy = (POLICIES | VARIANTS)[cell.policy]
    recurrent = cell.form == 'recurrent'
    task = next(task for task in _OBSERVATION_SIZE if task in policy.task)
    lines = [f"include '{policy.include}'\n",
             REPRESENTATION[cell.representation].format(size=_OBSERVATION_SIZE[task]),
             (INTRINSIC | BONUSES).get(cell.intrinsic, ''), _COMMON, policy.task]
    if cell.representation == 'predictive':
        lines.append(_ACTION_INPUTS[task])
    if policy.replay:
        lines.append(_REPLAY.format(length=4 if cell.representation == 'predictive' or recurrent else 2))
    if recurrent:
        assert policy.recurrent is not None
        lines.append(policy.recurrent)
    networks = policy.recurrent_networks if recurrent else policy.networks
    lines += [f'{size} = (16, )\n' for size in networks]
    names = [size.partition('.')[0] for size in networks]
    lines += [f'{name}.lstm_hidden_size = (8, )\n' for name in names if recurrent and name.endswith('RNNNetwork')]
    if cell.policy in ('ddpg', 'td3') and (cell.intrinsic == 'diayn' or cell.representation != 'none'):
        lines.append(_OPTIMIZER)
    if cell.intrinsic == 'diayn' or 'Gears' in policy.task:
        lines += [_combiner(name) for name in names if cell.intrinsic == 'diayn' or name.startswith('Q')]
    if cell.intrinsic in TRAINING:
        algorithm, transformer = _TRAINED[cell.policy]
        lines.append(TRAINING[cell.intrinsic].format(algorithm=algorithm, transformer=transformer))
    return ''.join(lines)


def _combiner(network: str) -> str:
    """Return the binding that makes a network accept ``[observation, goal]``."""
    argument = 'observation_preprocessing_combiner' if network.startswith('Critic') else 'preprocessing_combiner'
    return f'{network}.{argument} = @NestConcat()\n'


def cells(policies: Iterable[str] = tuple(POLICIES), intrinsic: Iterable[str] = tuple(INTRINSIC),
          representation: Iterable[str] = tuple(REPRESENTATION), forms: Iterable[str] = FORMS) -> list[Cell]:
    """Return all combinations of the arguments; recurrent ones only for policies that support them."""
    return [cell for cell in itertools.starmap(Cell, itertools.product(policies, intrinsic, representation, forms))
            if cell.form != 'recurrent' or POLICIES[cell.policy].recurrent is not None]


def expected_refusal(cell: Cell) -> str | None:
    """Return text that the error message of an unsupported combination must contain; ``None`` if it must work."""
    if cell.representation == 'predictive' and cell.policy == 'actor-critic':
        return 'on-policy'  # its targets are future steps, which an on-policy unroll does not contain
    if cell.intrinsic == 'mbpo' and _TRAINED[cell.policy][1]:
        return 'untransformed observations'  # the model imagines steps of the environment
    replays = (POLICIES | VARIANTS)[cell.policy].replay
    if cell.intrinsic == 'deir' and replays:
        return 'sampled steps'  # their trajectories are not known
    if cell.intrinsic == 'apt' and not replays:
        return 'rewards'  # it compares the steps of a sampled batch
    return None


def bonus_cells() -> list[Cell]:
    """Return the combinations of exploration bonuses with policies that train on unrolls and on samples."""
    return [Cell(policy, bonus, 'none', form) for policy, form in (
        ('ppo', 'feed-forward'), ('ppo', 'recurrent'), ('dqn', 'feed-forward'), ('sac continuous', 'feed-forward'))
        for bonus in BONUSES]


def variant_cells() -> list[Cell]:
    """Return the combinations of variants of policy algorithms with some intrinsic rewards."""
    return [Cell(policy, reward, 'none', 'feed-forward') for policy in VARIANTS
            for reward in ('none', 'rnd', 'episodic_count', 'e3b')]


def training_cells() -> list[Cell]:
    """Return the ways to train joint batches, residual blocks and categorical critics."""
    return [Cell(policy, training, 'none', 'feed-forward') for policy in _TRAINED for training in TRAINING]


def sample_of_bonuses() -> list[Cell]:
    """Return some cells with a bonus that carries state, and with variants of different kinds."""
    return [Cell(policy, bonus, 'none', 'feed-forward') for policy, bonus in (
        ('ppo', 'episodic_count'), ('pqn', 'rnd'), ('crossq', 'rnd'), ('td7', 'rnd'), ('crossq', 'hindsight'),
        ('simba', 'mbpo'), ('categorical sac', 'prior data'))]


def covering_sample() -> list[Cell]:
    """Return four cells per policy that cover all pairs of policy, intrinsic reward, representation and form."""
    intrinsic, representation = list(INTRINSIC), list(REPRESENTATION)
    return [Cell(policy, reward, representation[(p + i) % 4], FORMS[(p // 4 + i + (p + i) % 4 // 2) % 2])
            for p, policy in enumerate(POLICIES) for i, reward in enumerate(intrinsic)]


def try_cell(cell: Cell, folder: Path) -> Outcome:
    """Train and check a cell as the module docstring describes.

    Args:
        cell: combination to test.
        folder: empty folder.
    """
    conf = folder / 'composed.gin'
    conf.write_text(conf_of(cell).replace(_DATASET, str(folder / _DATASET)))
    try:
        trainer = _trainer(conf, folder / 'first')
    except (gin_utils.ConfError, SpecError, ValueError) as error:
        gin_utils.clear()
        expected, lines = expected_refusal(cell), [' '.join(line.split()) for line in str(error).splitlines()]
        verdict = 'rejected' if expected is not None and expected in ' '.join(lines) else 'failed'
        return Outcome(verdict, '; '.join(lines))
    if expected_refusal(cell) is not None:
        return Outcome('failed', 'the combination should have been rejected')
    problems = _owner_problems(trainer.algorithm)
    trainer.train()
    problems += [f'unused binding {binding}' for binding in gin_utils.unused_bindings()]
    gin_utils.clear()
    resumed = _trainer(conf, folder / 'second')
    resumed.train()
    gin_utils.clear()
    first, second = (_contents(folder / name) for name in ('first', 'second'))
    different = [name for name in first if not _equal(first[name], second[name])]
    if first.keys() != second.keys() or different:
        problems.append(f'the same seed gives different parameters: {different[:3]}')
    problems += _play_problems(folder / 'first', first)
    return Outcome('failed', '; '.join(problems)) if problems else Outcome('ok')


def _trainer(conf: Path, root_dir: Path) -> RLTrainer:
    """Return a trainer for a new run folder; the conf stays loaded."""
    loaded = gin_utils.load(str(conf))
    gin_utils.write_conf(str(root_dir), loaded)
    config = TrainerConfig(root_dir=str(root_dir), conf_file=str(conf))
    for path in config.offline_datasets():
        _record(path, config)
    return RLTrainer(config)


def _record(path: str, config: TrainerConfig) -> None:
    """Record random steps where the conf expects a dataset, unless they exist."""
    if not Path(path).exists():
        with building.create_eval_environment(config, 2) as env:
            steps = recorder.record(env, recorder.random_policy(env.action_spec(), 2), 400)
        dataset_folder.write(path, steps, {})


def _owner_problems(algorithm: torch.nn.Module) -> list[str]:
    """Return the trained parameters with more than one optimizer."""
    owned = Counter(id(p) for optimizer in algorithm.optimizers() for group in optimizer.param_groups
                    for p in group['params'])
    names = {id(p): name for name, p in algorithm.named_parameters()}
    problems = [f'{names.get(key, "?")} is trained by {count} optimizers' for key, count in owned.items() if count > 1]
    return problems if owned else ['no parameter is trained']


def _play_problems(root_dir: Path, saved: dict[str, object]) -> list[str]:
    """Load the checkpoint of a run into a new algorithm, compare, and play an episode, from the run folder alone."""
    problems = []
    with gin_utils.loaded(None, [], str(root_dir), same_run=False):
        config = TrainerConfig(root_dir=str(root_dir))
        env = building.create_eval_environment(config, 1)
        try:
            algorithm = building.create_algorithm(config, env, trains=False)
            result = play(str(root_dir), env, algorithm, num_episodes=1, render=False)
            state = algorithm.state_dict()
        finally:
            env.close()
    changed = [name for name, value in state.items() if isinstance(value, torch.Tensor)
               and isinstance(saved.get(name), torch.Tensor) and not _equal(value, saved[name])]
    if changed:
        problems.append(f'the loaded checkpoint differs: {changed[:3]}')
    if len(result.returns) != 1 or not torch.isfinite(torch.as_tensor(result.returns)).all():
        problems.append(f'play gives returns {result.returns}')
    return problems


def _contents(root_dir: Path) -> dict[str, object]:
    """Return the algorithm state of the last checkpoint as a flat dict."""
    folder = Path(run_files.checkpoint_dir(str(root_dir)))
    newest = max((path for path in folder.glob('ckpt-*') if path.name[5:].isdigit()), key=lambda p: int(p.name[5:]))
    flat: dict[str, object] = {}
    pending: list[tuple[str, object]] = [('', read_checkpoint(str(newest))['alg'])]
    while pending:
        name, value = pending.pop()
        children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(
            value, (list, tuple)) else None
        if children is None:
            flat[name] = value
        else:
            pending += [(f'{name}.{key}' if name else str(key), child) for key, child in children]
    return flat


def _equal(a: object, b: object) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b


_HEAD = """# Tested combinations of agent parts

`tools/compose.py` composes every combination of policy algorithm, networks, intrinsic reward and representation with
includes and bindings only, and tests it. The columns are *intrinsic reward + representation*.

- *ok*: the combination trains with finite losses, uses every binding, trains each parameter with exactly one optimizer,
  ends with the same parameters for the same seed, loads its checkpoint into a new algorithm without loss, and plays an
  episode.
- *rejected*: the combination raises an error before the first environment step, which is shown below the table.

`python tools/compose.py --all --markdown FILE` writes this page. See also [Compose an agent](compose_an_agent.md).

"""


def table(outcomes: dict[Cell, Outcome]) -> str:
    """Return a Markdown table with a row per policy and form, and a column per intrinsic reward and representation."""
    columns = sorted({(cell.intrinsic, cell.representation) for cell in outcomes},
                     key=lambda c: (list(INTRINSIC | BONUSES | TRAINING).index(c[0]), list(REPRESENTATION).index(c[1])))
    lines = ['| policy | form | ' + ' | '.join(f'{i} + {r}' for i, r in columns) + ' |',
             '| --- | --- |' + ' --- |' * len(columns)]
    for policy, form in dict.fromkeys((cell.policy, cell.form) for cell in outcomes):
        found = [outcomes.get(Cell(policy, i, r, form)) for i, r in columns]
        lines.append(f'| {policy} | {form} | ' + ' | '.join(o.verdict if o else '' for o in found) + ' |')
    return '\n'.join(lines) + '\n'


def reasons(outcomes: dict[Cell, Outcome]) -> list[str]:
    """Return each message of rejected or failed cells with its count."""
    counts = Counter((outcome.verdict, outcome.message) for outcome in outcomes.values() if outcome.message)
    return [f'{count} {verdict}: {message}' for (verdict, message), count in counts.most_common()]


def main(argv: Sequence[str] | None = None) -> int:
    """Test the selected combinations; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--policy', nargs='+', choices=POLICIES, default=list(POLICIES))
    parser.add_argument('--intrinsic', nargs='+', choices=INTRINSIC, default=list(INTRINSIC))
    parser.add_argument('--representation', nargs='+', choices=REPRESENTATION, default=list(REPRESENTATION))
    parser.add_argument('--form', nargs='+', choices=FORMS, default=list(FORMS))
    parser.add_argument('--markdown', help='write the page to this file')
    parser.add_argument('--bonuses', action='store_true', help='test bonuses, variants and ways to train instead, '
                        'whatever is selected')
    parser.add_argument('--all', action='store_true', help='test these as well')
    parser.add_argument('--show', action='store_true', help='only print the confs')
    arguments = parser.parse_args(argv)
    chosen = cells(arguments.policy, arguments.intrinsic, arguments.representation, arguments.form)
    parts = {'': chosen}
    if arguments.bonuses or arguments.all:
        parts = {**(parts if arguments.all else {}), '## Exploration bonuses': bonus_cells(),
                 '## Variants of policy algorithms': variant_cells(), '## Ways to train': training_cells()}
    chosen = list(itertools.chain(*parts.values()))
    if arguments.show:
        print('\n'.join(f'# {" + ".join(cell)}\n{conf_of(cell)}' for cell in chosen))
        return 0
    outcomes: dict[Cell, Outcome] = {}
    for number, cell in enumerate(chosen, 1):
        folder, started = Path(tempfile.mkdtemp(prefix='alfx_compose_')), time.perf_counter()
        outcomes[cell] = try_cell(cell, folder)
        shutil.rmtree(folder)
        print(f'[{number}/{len(chosen)}] {" + ".join(cell)}: {outcomes[cell].verdict} {outcomes[cell].message}'
              f' ({time.perf_counter() - started:.1f} s)', flush=True)
    text = '\n'.join(itertools.chain(*(
        [*([title, ''] if title else []), table(part := {cell: outcomes[cell] for cell in group}), *reasons(part), '']
        for title, group in parts.items()))).rstrip('\n')
    print(text)
    if arguments.markdown:
        Path(arguments.markdown).write_text(_HEAD + text + '\n')
    return int(any(outcome.verdict == 'failed' for outcome in outcomes.values()))


if __name__ == '__main__':
    sys.exit(main())
