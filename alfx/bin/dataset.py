"""Show, check, mix, filter and convert datasets.

Examples:

  alfx dataset show data/pendulum
  alfx dataset check data/pendulum --conf iql_pendulum
  alfx dataset mix data/random data/expert --output data/both
  alfx dataset filter data/both --top 0.1 --output data/best
  alfx dataset convert runs/sac --output data/replay

A dataset is a dataset folder, a run folder or checkpoint with a replay buffer, or minari:ID.
"""
import json
import sys
from collections.abc import Sequence
from typing import Any

import alfx
from alfx.bin import flags, policy_flags
from alfx.bin.flags import FLAGS, number

_COMMANDS = ('show', 'check', 'mix', 'filter', 'convert')
_WRITE = ('mix', 'filter', 'convert')
_USES = {'output': _WRITE, 'overwrite': _WRITE, 'num_steps': _WRITE, 'top': ('filter',), 'min_return': ('filter',),
         'max_return': ('filter',), 'json': ('show',), 'conf': ('check',), 'root_dir': ('check',),
         'reference_returns': ('show', *_WRITE)}
PARSER = flags.Parser(__file__, __doc__, ('|'.join(_COMMANDS) + ' DATASET ...', 'what to do, and datasets'))
PARSER.add('output DIR', 'mix, filter, convert: the dataset folder to write')
PARSER.add('top X', 'filter: keep this fraction of the episodes, those with the highest returns', number(float, 0, 1))
PARSER.add('min_return X', 'filter: keep episodes with at least this return', number(float))
PARSER.add('max_return X', 'filter: keep episodes with at most this return', number(float))
PARSER.add('num_steps N', 'filter, mix, convert: keep at most this many steps from the start of each dataset; the last '
           'episode is truncated', number(int, 2))
PARSER.add('json', 'show: print JSON')
policy_flags.define_dataset_flags(PARSER)
flags.define_conf_flags(PARSER, untrusted=True)


def main(argv: list[str]) -> int:
    """Run the command named by the first argument on the datasets named by the other arguments.

    Returns:
        The exit code.
    """
    command, names = argv[1] if len(argv) > 1 else None, argv[2:]
    if command not in _COMMANDS:
        raise alfx.gin_utils.ConfError(f'expected one of {", ".join(_COMMANDS)}, found {command}',
                                       '--help shows examples')
    if not names:
        raise alfx.gin_utils.ConfError('no dataset is given', f'alfx dataset {command} FOLDER')
    for flag, commands in _USES.items():
        if flag in FLAGS.given and command not in commands:
            raise alfx.gin_utils.ConfError(f'--{flag} has no effect on {command}', f'it is for {", ".join(commands)}')
    if command in ('filter', 'convert') and len(names) > 1:
        raise alfx.gin_utils.ConfError(f'{command} takes one dataset, found {len(names)}', 'mix joins several into one')
    policy_flags.set_up_logging()
    if command == 'show':
        _show(names)
    elif command == 'check':
        _check(names)
    else:
        _write(command, names)
    return 0


def _show(names: list[str]) -> None:
    """Print the statistics of each dataset."""
    from alfx.offline import dataset_checks, dataset_sources, dataset_statistics
    shown: dict[str, Any] = {}
    reference = policy_flags.reference_returns()
    for name in names:
        dataset = dataset_sources.read(name)
        dataset_checks.check_consistent(dataset)
        if reference is not None:
            dataset = dataset._replace(about={**dataset.about, 'reference_returns': reference})
        if FLAGS.json:
            shown[name] = {**dataset_statistics.summary(dataset),
                           'arrays': dataset_statistics.array_lines(dataset.episodes),
                           'about': dataset.about, 'sha256': dataset.fingerprint}
            continue
        print('\n'.join([*dataset_statistics.lines(dataset),
                         *(f'  {x}' for x in dataset_statistics.array_lines(dataset.episodes)),
                         *(f'  {key}: {value}' for key, value in sorted(dataset.about.items())),
                         f'  SHA-256 {dataset.fingerprint}']))
    if FLAGS.json:
        json.dump(shown, sys.stdout, indent=2)


def _check(names: list[str]) -> None:
    """Check that each dataset is valid and, with ``--conf`` or ``--root_dir``, that it fits the environment."""
    from alfx.offline import dataset_checks, dataset_loading, dataset_sources
    if not (FLAGS.conf or FLAGS.gin_file or FLAGS.root_dir):
        for name in names:
            dataset_checks.check_consistent(dataset_sources.read(name))
            print(f'{name}: valid')
        return
    from alfx.config import TrainerConfig
    from alfx.runs import building
    root_dir = flags.root_dir_from_flags() if FLAGS.root_dir else ''
    flags.conf_from_flags(root_dir or None, same_run=False)
    config = TrainerConfig(root_dir=root_dir)
    with building.create_eval_environment(config, 1) as env:
        dataset_loading.load(names, None, env.observation_spec(), env.action_spec(), env.reward_spec(),
                     config.mini_batch_length or 1, env.name)
    print(f'{", ".join(names)}: valid, and compatible with the environment')


def _write(command: str, names: list[str]) -> None:
    """Write a dataset made from other datasets."""
    from alfx.offline import dataset_checks, dataset_folder, dataset_sources, dataset_statistics
    from alfx.offline.dataset_files import Dataset, DatasetError, check_alike
    from alfx.offline.dataset_episodes import joined, shortened
    if not FLAGS.output:
        raise alfx.gin_utils.ConfError(f'{command}: no output folder is given', 'add --output FOLDER')
    dataset_folder.check_writable(FLAGS.output, FLAGS.overwrite)
    reference = policy_flags.reference_returns()
    datasets = [dataset_sources.read(name) for name in names]
    for dataset in datasets:
        dataset_checks.check_consistent(dataset)
    check_alike(datasets)
    parts = [shortened(x.episodes if command != 'filter' else _filtered(x), FLAGS.num_steps) for x in datasets]
    episodes = joined([part for part in parts if len(part.lengths)] or parts)
    if not len(episodes.lengths):
        raise DatasetError(f'{", ".join(names)}: no episode is left',
                           'relax --top, --min_return, --max_return or --num_steps')
    about = {**_common(datasets), 'made': command, 'from': [[x.name, x.fingerprint] for x in datasets]}
    if reference is not None:
        about['reference_returns'] = reference
    dataset_folder.write(FLAGS.output, episodes, about, FLAGS.overwrite)
    print('\n'.join(dataset_statistics.lines(Dataset(FLAGS.output, episodes, about, ''))))


def _common(datasets: Sequence[Any]) -> dict[str, Any]:
    """Return the metadata of a mixture: the entries that are equal, and what is known about the environments."""
    common = {key: value for key, value in datasets[0].about.items()
              if all(dataset.about.get(key) == value for dataset in datasets)}
    for key in ('specs', 'reference_returns', 'action_bounds'):
        found = [dataset.about[key] for dataset in datasets if dataset.about.get(key)]
        if found and (key != 'reference_returns' or all(x == found[0] for x in found)):
            common[key] = found[0]
    if names := [dataset.about['env_name'] for dataset in datasets if 'env_name' in dataset.about]:
        common['env_name'] = ', '.join(dict.fromkeys(names))
    return common


def _filtered(dataset: Any) -> Any:
    """Return the episodes selected by the flags."""
    import numpy as np
    episodes = dataset.episodes
    if FLAGS.top is None and FLAGS.min_return is None and FLAGS.max_return is None and FLAGS.num_steps is None:
        raise alfx.gin_utils.ConfError('filter: no criterion is given',
                                       'add --top, --min_return, --max_return or --num_steps')
    returns = episodes.returns()
    low, high = (x if x is not None else sign * np.inf for x, sign in ((FLAGS.min_return, -1), (FLAGS.max_return, 1)))
    kept = np.flatnonzero((returns >= low) & (returns <= high))
    if FLAGS.top is not None:
        count = max(round(FLAGS.top * len(returns)), 1)
        kept = np.intersect1d(kept, np.argsort(-returns, kind='stable')[:count])
    return episodes.select(kept) if len(kept) else episodes.part(0, 0)


if __name__ == '__main__':
    flags.run(main, PARSER, argument='*')
