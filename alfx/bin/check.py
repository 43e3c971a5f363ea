"""Check a conf file: build everything, train until the first update and report problems.

Example:

  alfx check sac_pendulum --conf_param 'TrainerConfig.mini_batch_size=128'

Prints the specs along the data flow, the parameters of each optimizer and the memory that the replay buffer will need.
Then trains in a temporary folder until the first update and lists unused bindings. The exit code is 0 if the conf is
correct, 1 if a binding of the conf or of --conf_param is unused, and 2 if the conf has errors. Unused bindings of
included confs are only noted, because the conf may override what would use them.
"""

import tempfile

import alfx
from alfx.bin import flags, policy_flags

PARSER = flags.Parser(__file__, __doc__, flags.CONF, {
    'root_dir': 'check has no --root_dir, because it trains in a temporary folder; remove the flag'})
flags.define_device_flag(PARSER)
flags.define_conf_flags(PARSER, root_dir=False)


def main() -> int:
    """Check the conf that the flags name.

    Returns:
        The exit code.
    """
    from alfx.trainers import conf_check
    policy_flags.set_up_logging()
    flags.stop_on_signals()
    flags.device_from_flags()
    conf = flags.conf_from_flags(allow_unused=True)
    try:
        with tempfile.TemporaryDirectory(prefix='alfx_check_') as root_dir:
            for line in conf_check.check(root_dir, conf.conf_file):
                print(line, flush=True)
        result = conf_check.unused()
    finally:
        alfx.gin_utils.clear()
    print(result)
    return 1 if result.mistakes else 0


if __name__ == '__main__':
    flags.run(main, PARSER, argument='conf')
