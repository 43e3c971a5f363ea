"""Run a hyperparameter search: train a conf repeatedly with different values of some bindings.

Examples:

  alfx search search_ppo_cart_pole --root_dir /tmp/search
  alfx search --root_dir /tmp/search --conf_param Search.num_trials=40

Either command resumes an interrupted hyperparameter search. On Ctrl-C or SIGTERM the runs write checkpoints and stop;
when the hyperparameter search is resumed, they continue from these checkpoints. The results are best.gin, results.md,
results.csv and plot.png in the folder.
"""
import glob
import os
import time

import alfx
from alfx.bin import command, flags, policy_flags
from alfx.bin.flags import FLAGS

PARSER = flags.Parser(__file__, __doc__, ('[SEARCH] [KEY=VALUE ...]', 'search conf: a file, or the name of one '
                                          'shipped with alfx; and bindings to override'))
flags.define_conf_flags(PARSER)
SEARCHES = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'examples', 'searches')


def main() -> int:
    """Run the hyperparameter search described by the flags.

    Returns:
        The exit code.
    """
    from alfx.search import search_conf, study
    policy_flags.set_up_logging()
    from alfx.search.search_folder import SearchFolder
    from alfx.search.searching import Searching
    study.import_optuna()
    folder = SearchFolder(_root_dir())
    _choose_conf(folder.conf_file)
    with folder.locked():
        conf = search_conf.prepare(flags.conf_from_flags(), folder)
        print(f'search folder: {folder.root_dir}', flush=True)
        searching = Searching(conf, folder.root_dir, lambda line: print(line, flush=True))
        is_done = searching.run()
    print('\n'.join(searching.summary()))
    if not is_done:
        print(f"to resume: {command.command_of('search', '--root_dir', folder.root_dir)}")
    best = folder.path('best.gin')
    if os.path.isfile(best):
        print(f"results: {', '.join(folder.path(name) for name in ('results.md', 'plot.png'))}")
        if conf.function is None:
            print(f"train the best conf: {command.command_of('train', '--conf', best)}")
    return 0 if is_done or searching.stop_signal is None else 128 + searching.stop_signal


def _root_dir() -> str:
    if FLAGS.root_dir:
        return flags.root_dir_from_flags(trains=True)
    name = os.path.splitext(os.path.basename(FLAGS.conf or 'search'))[0]
    return os.path.join('runs', f'{name}-{time.strftime("%Y%m%d-%H%M%S")}')


def _choose_conf(stored: str) -> None:
    """Set ``--conf`` to the path of the search conf.

    The flag may name a search conf shipped with alfx. If it is missing, the conf stored in the folder is used.
    """
    if FLAGS.conf is None and not FLAGS.gin_file:
        if not os.path.isfile(stored):
            raise alfx.gin_utils.ConfError('no conf file is given, and the folder contains no hyperparameter search',
                                           f'add --conf FILE; search confs shipped with alfx: {", ".join(_shipped())}')
        FLAGS.conf = stored
    elif FLAGS.conf and not os.path.isfile(FLAGS.conf) and FLAGS.conf.removesuffix('.gin') in _shipped():
        FLAGS.conf = os.path.join(SEARCHES, FLAGS.conf.removesuffix('.gin') + '.gin')


def _shipped() -> list[str]:
    return sorted(os.path.basename(path).removesuffix('.gin') for path in glob.glob(os.path.join(SEARCHES, '*.gin')))


if __name__ == '__main__':
    flags.run(main, PARSER, argument='conf')
