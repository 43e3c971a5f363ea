"""Run one of the benchmarks in this folder.

    python tools/benchmarks                              # list them
    python tools/benchmarks benchmark --rounds 5         # alfx and other libraries
    python tools/benchmarks startup                      # the time until the first iteration
"""
import ast
import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
_PARTS = ('__main__', 'benchmark_peers', 'benchmark_off_policy', 'benchmark_offline')  # imported by other files


def benchmarks() -> dict[str, str]:
    """Return the first docstring line of each benchmark by name."""
    return {path.stem: (ast.get_docstring(ast.parse(path.read_text())) or '').partition('\n')[0]
            for path in sorted(FOLDER.glob('*.py')) if path.stem not in _PARTS and not path.stem.startswith('bare_')}


def main() -> None:
    """Run the benchmark that the command line names with its arguments, or list all benchmarks."""
    found = benchmarks()
    if len(sys.argv) < 2 or sys.argv[1] not in found:
        wrong = len(sys.argv) > 1 and sys.argv[1] not in ('-h', '--help')
        print(f'unknown benchmark {sys.argv[1]!r}; available:' if wrong else __doc__ + '\nBenchmarks:')
        print('\n'.join(f'  {name:20} {line}' for name, line in found.items()))
        sys.exit(2 if wrong else 0)
    path = str(FOLDER / f'{sys.argv[1]}.py')
    sys.argv = [path, *sys.argv[2:]]
    runpy.run_path(path, run_name='__main__')


if __name__ == '__main__':
    main()
