"""Print a conf as it takes effect: what it includes and what overrides it in one list, each line with its origin.

Examples:

  alfx show ppo_cart_pole
  alfx show my.gin --conf_param 'ppo/Adam.lr=1e-4'

The conf is checked as train does. What is printed can be read as a conf again. For a run folder it is the conf of the
run, with the defaults that were used.
"""
from alfx import gin_utils
from alfx.bin import flags

flags.define_conf_flags()


def main(argv: list[str]) -> int:
    """Print the conf that the flags name; returns the exit code."""
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
