"""Record a dataset: episodes of a trained policy, of a random one, or what a replay buffer holds.

Examples:

  python -m alfx.bin.record --root_dir runs/pendulum --dataset data/pendulum-expert --num_steps 20000
  python -m alfx.bin.record --root_dir runs/pendulum --dataset data/pendulum-random --mode random
  python -m alfx.bin.record --conf sac_pendulum --dataset data/pendulum-random --mode random

Observations, actions and rewards are those of the environment, before any data transformer. Ctrl-C keeps the episodes
that have ended. A dataset is there as a whole or not at all.
"""
import sys
from typing import Any

from absl import flags as absl_flags

from alfx import gin_utils
from alfx.bin import flags, policy_flags

flags.define_conf_flags()
policy_flags.define_policy_flags()
absl_flags.DEFINE_string('dataset', None, 'the folder to write, which is a dataset then')
absl_flags.DEFINE_integer('num_steps', 10000, 'how many actions, in all environments together', lower_bound=1)
absl_flags.DEFINE_integer('num_environments', 1, 'how many environments', lower_bound=1)
absl_flags.DEFINE_enum('mode', 'sampled', ['sampled', 'greedy', 'random'], 'sample actions from the policy, take its '
                       'most likely ones, or take random ones; with --epsilon_greedy, that takes the place of the '
                       'first two')
absl_flags.DEFINE_float('noise', 0.0, 'standard deviation of noise on continuous actions, in units of half their range',
                        lower_bound=0)
absl_flags.DEFINE_float('correlated_noise', 0.0, 'likewise; the noise of each step is added to the next action as well',
                        lower_bound=0)
policy_flags.define_dataset_flags()
FLAGS = absl_flags.FLAGS


def main(argv: list[str]) -> int:
    """Record as the flags say.

    Returns:
        The exit code.
    """
    del argv
    from alfx.offline import dataset_folder
    from alfx.offline import dataset_statistics
    from alfx.offline.dataset_files import Dataset, DatasetError
    policy_flags.set_up_logging()
    if not FLAGS.dataset:
        raise gin_utils.ConfError('no dataset is named', 'add --dataset FOLDER')
    reference = policy_flags.reference_returns()
    dataset_folder.check_writable(FLAGS.dataset, FLAGS.overwrite)
    env, act, about = _actor()
    try:
        episodes = _record(env, act)
    finally:
        env.close()
    if episodes is None:
        raise DatasetError(f'{FLAGS.dataset}: no episode has ended: nothing is written', 'give it more time')
    if reference is not None:
        about['reference_returns'] = reference
    dataset_folder.write(FLAGS.dataset, episodes, about, FLAGS.overwrite)
    print('\n'.join(dataset_statistics.lines(Dataset(FLAGS.dataset, episodes, about, ''))))
    return 0


def _actor() -> tuple[Any, Any, dict[str, Any]]:
    """The environments, what acts in them, and what is to be told of both."""
    from alfx.offline import recorder
    from alfx.offline import dataset_spaces
    is_random, count = FLAGS.mode == 'random' and FLAGS.epsilon_greedy is None, FLAGS.num_environments
    if is_random and not FLAGS.root_dir:
        env, about = _environments_of_conf(), {'conf': FLAGS.conf}
    else:
        root_dir = flags.root_dir_from_flags()
        env, algorithm = policy_flags.policy_from_flags(root_dir, count)
        about = {'root_dir': root_dir}
    about |= {'env_name': env.name, 'mode': FLAGS.mode, 'noise': FLAGS.noise,
              'correlated_noise': FLAGS.correlated_noise}
    if is_random:
        act: Any = recorder.random_policy(env.action_spec(), count,
                                          _mask_field(env.observation_spec()))
    else:
        from alfx.runs import building
        from alfx.runs.playing import load_for_play
        algorithm.eval()
        about['checkpoint_step'] = load_for_play(root_dir, algorithm, policy_flags.checkpoint_step_from_flags())
        if FLAGS.epsilon_greedy is None:
            building.set_epsilon_greedy(algorithm, 1.0 if FLAGS.mode == 'sampled' else 0.0)
        act = recorder.Policy(algorithm, count)
    about |= dataset_spaces.specs_as_json(env)
    for scale, is_correlated in ((FLAGS.noise, False), (FLAGS.correlated_noise, True)):
        if scale:
            act = recorder.with_noise(act, env.action_spec(), scale, is_correlated)
    return env, act, about


def _mask_field(observation_spec: Any) -> str | None:
    """Where observations say which actions are valid, if they do."""
    import gin

    from alfx import nest
    try:
        field = str(gin.query_parameter('ActionMask.field'))
    except ValueError:  # the conf does not say
        field = 'valid_action_mask'
    is_there = any(f'{path}.'.startswith(f'{field}.') for path, _ in nest.flatten_with_path(observation_spec))
    return field if is_there else None


def _environments_of_conf() -> Any:
    from alfx.algorithms.config import TrainerConfig
    from alfx.runs import building
    from alfx.utils import random_state
    flags.conf_from_flags()
    config = TrainerConfig(root_dir='')
    if config.ml_type != 'rl':
        raise gin_utils.ConfError(f"{FLAGS.conf}: TrainerConfig.ml_type = '{config.ml_type}': nothing is done in an "
                                  'environment there', 'name the conf of a task that has one')
    if FLAGS.random_seed is not None:
        config.random_seed = FLAGS.random_seed
    config.random_seed = random_state.set_random_seed(config.random_seed)
    return building.create_eval_environment(config, FLAGS.num_environments)


def _record(env: Any, act: Any) -> Any:
    """Record, and show how far it is."""
    from tqdm import tqdm

    from alfx.offline import recorder
    with tqdm(total=FLAGS.num_steps, unit='steps', disable=not sys.stderr.isatty()) as bar:
        return recorder.record(env, act, FLAGS.num_steps, lambda done: bar.update(done - bar.n))


if __name__ == '__main__':
    flags.run(main)
