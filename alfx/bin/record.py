"""Record a dataset: episodes of a trained policy or of a random policy.

Examples:

  alfx record runs/pendulum --dataset data/pendulum-expert --num_steps 20000
  alfx record runs/pendulum --dataset data/pendulum-random --mode random
  alfx record sac_pendulum --dataset data/pendulum-random --mode random

Observations, actions and rewards are recorded as the environment returns them, before any data transformer. Ctrl-C
stops the recording and keeps the completed episodes. The dataset is written atomically: completely or not at all.
"""
import sys
from typing import Any

import alfx
from alfx.bin import flags, policy_flags
from alfx.bin.flags import FLAGS, number

PARSER = flags.Parser(__file__, __doc__, flags.RUN_OR_CONF)
PARSER.add('dataset DIR', 'dataset folder to write')
PARSER.add('num_steps N', 'number of steps, over all environments', number(int, 1), 10_000)
PARSER.add('num_environments N', 'number of environments', number(int, 1), 1)
PARSER.add('mode sampled|greedy|random', 'sample actions from the policy, take its most likely actions, or take '
           'uniformly random actions; --epsilon_greedy overrides this; default: sampled, or greedy for value-based '
           'algorithms, which have no action distribution')
PARSER.add('noise X', 'standard deviation of noise on continuous actions, in units of half their range',
           number(float, 0), 0.0)
PARSER.add('correlated_noise X', 'the same as noise, but each noise sample is also added to the next action',
           number(float, 0), 0.0)
policy_flags.define_dataset_flags(PARSER)
policy_flags.define_policy_flags(PARSER)


def main() -> int:
    """Record the dataset described by the flags.

    Returns:
        The exit code.
    """
    from alfx.offline import dataset_folder, dataset_statistics
    from alfx.offline.dataset_files import Dataset, DatasetError
    policy_flags.set_up_logging()
    if not FLAGS.dataset:
        raise alfx.gin_utils.ConfError('no dataset folder is given', 'add --dataset FOLDER')
    reference = policy_flags.reference_returns()
    dataset_folder.check_writable(FLAGS.dataset, FLAGS.overwrite)
    env, act, about = _actor()
    with env:
        episodes = _record(env, act)
    if episodes is None:
        raise DatasetError(f'{FLAGS.dataset}: no episode was completed, so nothing is written', 'record longer')
    if reference is not None:
        about['reference_returns'] = reference
    dataset_folder.write(FLAGS.dataset, episodes, about, FLAGS.overwrite)
    print('\n'.join(dataset_statistics.lines(Dataset(FLAGS.dataset, episodes, about, ''))))
    return 0


def _actor() -> tuple[Any, Any, dict[str, Any]]:
    """Return the environments, the function that selects actions, and the metadata of the dataset."""
    from alfx.offline import dataset_spaces, recorder
    is_random, count = FLAGS.mode == 'random' and FLAGS.epsilon_greedy is None, FLAGS.num_environments
    if is_random and not FLAGS.root_dir:
        env, transformer = _environments_of_conf()
        about = {'conf': FLAGS.conf}
    else:
        root_dir = flags.root_dir_from_flags()
        env, algorithm = policy_flags.policy_from_flags(root_dir, count)
        transformer, about = algorithm.data_transformer, {'root_dir': root_dir}
    about |= {'env_name': env.name, 'noise': FLAGS.noise, 'correlated_noise': FLAGS.correlated_noise}
    if (FLAGS.noise or FLAGS.correlated_noise) and not any(
            spec.is_continuous for spec in alfx.nest.flatten(env.action_spec())):
        raise alfx.gin_utils.ConfError('--noise has no effect: the environment has no continuous actions',
                                       'use --epsilon_greedy')
    if is_random:
        if 'checkpoint_step' in FLAGS.given:
            raise alfx.gin_utils.ConfError('--checkpoint_step has no effect on --mode random', 'remove one of them')
        about['mode'] = 'random'
        act: Any = recorder.random_policy(env.action_spec(), count, _masks(env, transformer))
    else:
        from alfx.runs import building
        from alfx.runs.playing import load_for_play
        algorithm.eval()
        about['checkpoint_step'] = load_for_play(root_dir, algorithm, policy_flags.checkpoint_step_from_flags())
        if FLAGS.epsilon_greedy is None:
            about['mode'] = _mode(algorithm)
            building.set_epsilon_greedy(algorithm, 1.0 if about['mode'] == 'sampled' else 0.0)
        else:
            about['mode'] = f'epsilon_greedy={FLAGS.epsilon_greedy:g}'
        act = recorder.Policy(algorithm, count)
    about |= dataset_spaces.specs_as_json(env)
    for scale, is_correlated in ((FLAGS.noise, False), (FLAGS.correlated_noise, True)):
        if scale:
            act = recorder.with_noise(act, env.action_spec(), scale, is_correlated)
    return env, act, about


def _mode(algorithm: Any) -> str:
    """Return the value of ``--mode``, or its default for an algorithm."""
    if not policy_flags.is_value_based(algorithm):
        return FLAGS.mode or 'sampled'
    if FLAGS.mode == 'sampled':
        raise alfx.gin_utils.ConfError('--mode sampled: the algorithm has no action distribution, so that all actions '
                                       'would be random', 'use --mode greedy, --mode random or --epsilon_greedy')
    return 'greedy'


def _masks(env: Any, transformer: Any) -> Any:
    """Return a function from time steps to their action masks; None if there are none."""
    from alfx.algorithms.data_transformer import ActionMask
    from alfx.offline import recorder
    if getattr(transformer, 'has_action_mask', False):
        return recorder.action_masks(transformer, env.batch_size)
    spec = env.observation_spec()
    has_mask = isinstance(spec, dict) and 'valid_action_mask' in spec
    return recorder.action_masks(ActionMask(spec), env.batch_size) if has_mask else None


def _environments_of_conf() -> tuple[Any, Any]:
    """Return the environments and the data transformer of a conf."""
    from alfx import context
    from alfx.algorithms.data_transformer import create_data_transformer
    from alfx.config import TrainerConfig
    from alfx.runs import building
    from alfx.utils import random_state
    flags.conf_from_flags()
    config = TrainerConfig(root_dir='')
    if config.ml_type != 'rl':
        raise alfx.gin_utils.ConfError(f"{FLAGS.conf}: TrainerConfig.ml_type = '{config.ml_type}': this conf has no "
                                       'environment', "name a conf with ml_type 'rl'")
    if policy_flags.random_seed() is not None:
        config.random_seed = policy_flags.random_seed()
    config.random_seed = random_state.set_random_seed(config.random_seed)
    env = building.create_eval_environment(config, FLAGS.num_environments)
    spec = env.observation_spec()
    context.set_run_specs(spec, spec, env.action_spec(), env.reward_spec())
    return env, create_data_transformer(config.data_transformer_ctors(), spec)


def _record(env: Any, act: Any) -> Any:
    """Record episodes and show a progress bar."""
    from tqdm import tqdm

    from alfx.offline import recorder
    with tqdm(total=FLAGS.num_steps, unit='steps', disable=not sys.stderr.isatty()) as bar:
        return recorder.record(env, act, FLAGS.num_steps, lambda done: bar.update(done - bar.n))


if __name__ == '__main__':
    flags.run(main, PARSER, argument='conf')
