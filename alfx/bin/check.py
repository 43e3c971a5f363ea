"""Check a conf file: build everything, run one iteration, and tell what came of it.

Example:

  alfx check sac_pendulum --conf_param 'TrainerConfig.mini_batch_size=128'

Prints the specs as they flow, the parameters with their optimizers, and the memory that the replay buffer will take;
then trains for one iteration in a temporary folder, and lists the bindings that nothing has used. The exit code is 0
if the conf is right, 1 if nothing uses a binding of the conf or of --conf_param, 2 if it is wrong. Bindings of the
confs that it includes may be idle because of what it overrides: they are noted.
"""

import tempfile

from alfx import gin_utils
from alfx.bin import flags, policy_flags

flags.define_conf_flags(root_dir=False)
flags.define_device_flag()


def main(argv: list[str]) -> int:
    """Check the conf that the flags name.

    Returns:
        The exit code.
    """
    del argv
    from alfx.trainers import conf_check
    policy_flags.set_up_logging()
    flags.device_from_flags()
    conf = flags.conf_from_flags(allow_unused=True)
    try:
        with tempfile.TemporaryDirectory(prefix='alfx_check_') as root_dir:
            for line in conf_check.check(root_dir, conf.conf_file):
                print(line, flush=True)
        unused = gin_utils.unused_bindings()
        mistakes = gin_utils.mistakes_of_unused(unused)
    finally:
        gin_utils.clear()
    for binding, hint in mistakes:
        print(f'unused: {binding.location}: {binding}\n  {hint}')
    wrong = [binding for binding, _ in mistakes]
    for binding in unused:
        if binding not in wrong:
            print(f'note: not used so far: {binding.location}: {binding}')
    count = f'{len(wrong)} unused binding' + ('s' if len(wrong) > 1 else '')
    print('every binding is used' if not unused else count if wrong else 'every binding that has to be is used')
    return 1 if wrong else 0


if __name__ == '__main__':
    flags.run(main, {'root_dir': 'check has no --root_dir: it trains in a temporary folder; leave it out'},
              argument='conf')
