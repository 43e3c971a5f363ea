"""Print the effective bindings of a conf, with includes and overrides resolved and the origin of each line.

Examples:

  alfx show ppo_cart_pole
  alfx show my.gin --conf_param 'ppo/Adam.lr=1e-4'

The conf is checked in the same way as by alfx train. The output is a valid conf. For a run folder or a trained agent
zoo:NAME, prints the conf of the run with the default values that it used.
"""
import alfx
from alfx.bin import flags
from alfx.bin.flags import FLAGS

PARSER = flags.Parser(__file__, __doc__, (flags.RUN[0].replace('RUN', 'CONF | RUN'), flags.RUN_OR_CONF[1]))
flags.define_conf_flags(PARSER, untrusted=True)


def main() -> int:
    """Print the conf selected by the flags and return the exit code."""
    root_dir = flags.root_dir_from_flags() if FLAGS.root_dir else None
    conf = flags.conf_from_flags(root_dir, same_run=False)
    try:
        for line in alfx.gin_utils.flat_lines(conf):
            print(line)
    finally:
        alfx.gin_utils.clear()
    return 0


if __name__ == '__main__':
    flags.run(main, PARSER, argument='conf')
