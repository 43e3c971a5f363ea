"""Evaluate a trained policy: mean return with its 95% confidence interval, with greedy and with sampled actions.

For a supervised learning run, the metrics of its algorithm on the test data are computed instead.

Examples:

  alfx evaluate /tmp/cart_pole --num_episodes 100
  alfx evaluate /tmp/cart_pole --mode greedy --json -
"""
import json
import sys
from typing import Any

import alfx
from alfx.bin import flags, policy_flags
from alfx.bin.flags import FLAGS, number

PARSER = flags.Parser(__file__, __doc__, flags.RUN)
PARSER.add('num_episodes N', 'number of episodes, over all environments', number(int, 1), 20)
PARSER.add('num_environments N', 'number of environments', number(int, 1), 1)
PARSER.add('mode both|greedy|sampled', 'most likely actions (greedy), sampled actions, or one evaluation of each; '
           'by default both, but only greedy for value-based algorithms, and only epsilon_greedy if the conf or '
           '--epsilon_greedy sets it', default='both')
PARSER.add('json FILE', 'write the results to this file as JSON; with - print only JSON to stdout')
policy_flags.define_reference_flag(PARSER)
policy_flags.define_policy_flags(PARSER)


def main() -> int:
    """Evaluate the policy selected by the flags.

    Returns:
        The exit code.
    """
    from alfx.runs import building
    from alfx.runs.evaluator import evaluate, evaluate_supervised
    from alfx.runs.playing import load_for_play, make_policy, run_config
    policy_flags.set_up_logging()
    flags.check_output('json')
    reference = policy_flags.reference_returns()
    root_dir = flags.root_dir_from_flags()
    results: dict[str, Any] = {'root_dir': root_dir}
    policy_flags.run_from_flags(root_dir)
    config = run_config(root_dir, policy_flags.random_seed())
    if config.ml_type == 'sl':
        if unused := {'num_episodes', 'mode', 'epsilon_greedy', 'num_environments'}.intersection(FLAGS.given):
            raise alfx.gin_utils.ConfError(f'a supervised learning run has no episodes: remove --{min(unused)}')
        algorithm = building.create_algorithm(config, None, trains=False)
        results['checkpoint_step'] = load_for_play(root_dir, algorithm, policy_flags.checkpoint_step_from_flags())
        results['measures'] = evaluate_supervised(algorithm, config)
        for name, value in results['measures'].items() if FLAGS.json != '-' else ():
            print(f'{name} {value:.6g}')
    else:
        env, algorithm = make_policy(root_dir, FLAGS.num_environments, policy_flags.random_seed(),
                                     FLAGS.epsilon_greedy, renders=False)
        with env:
            results['checkpoint_step'] = load_for_play(root_dir, algorithm, policy_flags.checkpoint_step_from_flags())
            if FLAGS.json != '-':
                print(f'checkpoint {results["checkpoint_step"]}', flush=True)
            for name, epsilon_greedy in _modes(algorithm, config.epsilon_greedy):
                results[name] = _evaluate(evaluate, env, algorithm, name, epsilon_greedy,
                                          reference or policy_flags.reference_returns_of_run(root_dir))
    _write_json(results)
    return 0


def _modes(algorithm: Any, conf_epsilon: float) -> list[tuple[str, float]]:
    """Return the name and the ``epsilon_greedy`` of each evaluation."""
    if FLAGS.epsilon_greedy is not None or conf_epsilon and FLAGS.mode == 'both':
        epsilon = conf_epsilon if FLAGS.epsilon_greedy is None else FLAGS.epsilon_greedy
        return [(f'epsilon_greedy={epsilon:g}', epsilon)]
    modes = [('greedy', 0.0), ('sampled', 1.0)]
    if FLAGS.mode == 'both' and policy_flags.is_value_based(algorithm):
        return modes[:1]  # sampled actions would be uniformly random
    return [mode for mode in modes if FLAGS.mode in ('both', mode[0])]


def _evaluate(evaluate: Any, env: Any, algorithm: Any, name: str, epsilon_greedy: float,
              reference: tuple[float, float] | None) -> dict[str, Any]:
    from alfx.runs import building
    building.set_epsilon_greedy(algorithm, epsilon_greedy)
    result = evaluate(env, algorithm, FLAGS.num_episodes)._replace(reference=reference)
    if FLAGS.json != '-':
        print(f'{name}: {result}', flush=True)
    return {**{key: None if value != value else value for key, value in result.statistics().items()},
            'returns': result.returns.tolist(), 'lengths': result.lengths.tolist(),
            'env_info': {path: values.tolist() for path, values in result.env_info().items()},
            'measures': {name: values.tolist() for name, values in result.measures.items()}}


def _write_json(results: dict[str, Any]) -> None:
    text = json.dumps(results, indent=2) + '\n'
    if FLAGS.json == '-':
        sys.stdout.write(text)
    elif FLAGS.json is not None:
        alfx.gin_utils.stored_files.write(FLAGS.json, text)


if __name__ == '__main__':
    flags.run(main, PARSER, argument='root_dir')
