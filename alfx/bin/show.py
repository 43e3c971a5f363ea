"""Print the effective bindings of a conf, with includes and overrides resolved and the origin of each line.

Examples:

  alfx show ppo_cart_pole
  alfx show my.gin --conf_param 'ppo/Adam.lr=1e-4'

The conf is checked in the same way as by alfx train. The output is a valid conf. For a run folder, prints the conf of
the run with the default values that it used.
"""
from alfx import gin_utils
from alfx.bin import flags

flags.define_conf_flags()
flags.define_untrusted_flag()


def main(argv: list[str]) -> int:
    """Print the conf selected by the flags and return the exit code."""
    del argv
    root_dir = flags.root_dir_from_flags() if flags.FLAGS.root_dir else None
    conf = flags.conf_from_flags(root_dir, same_run=False)
    try:
        for line in gin_utils.flat_lines(conf):
            print(line)
    finally:
        gin_utils.clear()
    return 0


if __name__ == '__main__':
    flags.run(main, argument='conf')
