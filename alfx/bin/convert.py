"""Convert a Python conf of the Agent Learning Framework (X_conf.py) to a gin file.

Examples:

  alfx convert sac_conf.py > sac.gin
  alfx convert sac_conf.py --conf_param 'hidden_layers=(64, 64)' > sac.gin

The Python code of the conf is executed, so convert only files that you trust. Inside it, alf is a stand-in: calls are
recorded, and nothing is built. --conf_param sets a value of alf.define_config or a binding before the conf runs.
What a gin file cannot express, and names that alfx does not have, are listed with file and line on stderr, and the
exit code is 1. Complete the gin file, then run alfx check.
"""
import sys

import alfx
from alfx.bin import flags
from alfx.bin.flags import FLAGS

PARSER = flags.Parser(__file__, __doc__, ('PYTHON_CONF', 'Python conf of the Agent Learning Framework'), {
    'untrusted': 'convert executes the Python code of the conf and has no --untrusted: read the file first'})
flags.define_conf_flags(PARSER, root_dir=False)


def main() -> int:
    """Print the gin file for the Python conf that the flags name, and return the exit code."""
    from alfx.gin_utils import python_to_gin
    given = [*([FLAGS.conf] if FLAGS.conf else []), *FLAGS.gin_file]
    if len(given) != 1:
        raise alfx.gin_utils.ConfError(f'expected one Python conf, found {len(given)}',
                                       'alfx convert X_conf.py > X.gin')
    if not given[0].endswith('.py'):
        raise alfx.gin_utils.ConfError(f'{given[0]} is not a Python conf', 'docs/coming_from_other_libraries.md maps '
                                       'settings of other libraries to those of alfx')
    print(f'# executing the Python code of {given[0]}', file=sys.stderr)
    found = python_to_gin.convert(given[0], [*FLAGS.conf_param, *FLAGS.gin_param])
    sys.stdout.write(found.text)
    for note in found.notes:
        print(f'# note: {note}', file=sys.stderr)
    for problem in found.problems:
        print(problem, file=sys.stderr)
    return 1 if found.problems else 0


if __name__ == '__main__':
    flags.run(main, PARSER, argument='conf')
