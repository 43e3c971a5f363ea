"""Export the policy of a run to a file that runs without alfx: torch.export (.pt2) or ONNX (.onnx).

Examples:

  alfx export runs/cart_pole
  alfx export runs/cart_pole --output cart_pole.onnx

The file contains one greedy step of the policy: data transformers, normalizers, action masks, networks with their
recurrent state, and actions within the bounds of the environment. The exported policy is verified before the file is
written: both policies run on the same observations, and their outputs may differ by 1e-5 at most.
"""
import os

from alfx.bin import flags, policy_flags
from alfx.bin.flags import FLAGS, number

PARSER = flags.Parser(__file__, __doc__, flags.RUN)
PARSER.add('output FILE', 'the file to write, .pt2 or .onnx; default: policy.pt2 in the run folder')
PARSER.add('num_steps N', 'number of environment steps to compare', number(int, 1), 10_000)
PARSER.add('tolerance X', 'largest allowed difference between the outputs of the file and the policy',
           number(float, 0), 1e-05)
policy_flags.define_checkpoint_flag(PARSER)
flags.define_conf_flags(PARSER, untrusted=True)


def main() -> int:
    """Export the policy selected by the flags and return the exit code."""
    from alfx.trainers import devices
    from alfx.reports import curves
    from alfx.runs import exporting, playing, zoo
    from alfx.runs.policy import Policy
    policy_flags.set_up_logging()
    flags.stop_on_signals()
    root_dir = flags.root_dir_from_flags()
    is_agent = FLAGS.root_dir.startswith(zoo.PREFIX)
    output = FLAGS.output or (f'{os.path.basename(root_dir)}.pt2' if is_agent else os.path.join(root_dir, 'policy.pt2'))
    exporting.check_path(output)
    step = policy_flags.checkpoint_step_from_flags()
    policy_flags.check_run_folder(root_dir)
    devices.use_device(devices.find_device('cpu'))
    # ONNX Runtime computes in float32 on CPUs
    FLAGS.gin_param = [*FLAGS.gin_param, 'TrainerConfig.enable_amp = False']
    flags.conf_from_flags(root_dir, same_run=False)
    env, algorithm = playing.make_policy(root_dir, 1, epsilon_greedy=0.0)
    with env:
        step = playing.load_for_play(root_dir, algorithm, step)
        policy = Policy(env, algorithm)
        name = f'{curves.conf_name(root_dir)} ({type(algorithm.policy_algorithm or algorithm).__name__})'
        about = {'conf': curves.conf_name(root_dir), 'checkpoint_step': step}
        difference = exporting.export_to(output, policy, env, name, about, FLAGS.num_steps, FLAGS.tolerance)
    print(f'largest difference over {FLAGS.num_steps:,} environment steps: {difference:.3g}')
    print(f'policy of {name}, checkpoint {step}: {output} ({os.path.getsize(output):,} bytes)')
    return 0


if __name__ == '__main__':
    flags.run(main, PARSER, argument='root_dir')
