"""List the confs that come with alfx: task, algorithm, environment steps, and the result to expect.

Examples:

  alfx list
  alfx list --algorithm ppo --task MiniGrid

A base conf holds what several confs have in common; --all lists those as well. alfx show NAME prints one.
"""
import argparse
import glob
import os
import re
import sys
from collections.abc import Sequence
from typing import NamedTuple

CONFS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'examples', 'confs')


class Head(NamedTuple):
    """What the first lines of a conf say of it; '' where they do not.

    Attributes:
        name: of the file, without ``.gin``.
        algorithm: what the title begins with.
        task: the environment.
        steps: how many environment steps, or whatever else the run counts.
        expected: the result.
        bases: names of the confs that it includes, and of those that these include.
    """
    name: str
    algorithm: str
    task: str
    steps: str
    expected: str
    bases: tuple[str, ...]


def read_heads(folder: str = CONFS) -> list[Head]:
    """The heads of all confs of a folder, by name."""
    texts = {}
    for path in sorted(glob.glob(os.path.join(folder, '*.gin'))):
        with open(path, encoding='utf8') as file:
            texts[os.path.splitext(os.path.basename(path))[0]] = file.read()
    return [_head(name, texts) for name in texts]


def _head(name: str, texts: dict[str, str]) -> Head:
    lines = texts[name].split('\n')
    fields = {match[1]: match[2] for line in lines if (match := re.match(r'#   (task|expected)\s+(.*)', line))}
    task = re.sub(r' \(see [^)]*\)', '', fields.get('task', ''))
    steps = re.search(r', ([\d,]+) (\w+)', task)
    title = re.split(r' on (?=[A-Z])| \(|[:;,]', lines[0].removeprefix('#').strip())[0]
    return Head(name, title, task[:steps.start()] if steps else task,
                '' if steps is None else steps[1] if steps[2] == 'steps' else f'{steps[1]} {steps[2]}',
                fields.get('expected', '').removeprefix('evaluation '), tuple(_bases(name, texts)))


def _bases(name: str, texts: dict[str, str]) -> list[str]:
    found = []
    for base in re.findall(r"^include '([^']*)\.gin'", texts[name], re.MULTILINE):
        found += [base, *(_bases(base, texts) if base in texts else [])]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the list; returns the exit code."""
    assert __doc__
    parser = argparse.ArgumentParser(prog='alfx list', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('text', nargs='*', help='only confs in whose line all of these are found')
    parser.add_argument('--task', default='', help='only confs whose task has this in its name')
    parser.add_argument('--algorithm', default='', help='only confs of this algorithm: a part of its name, as in the '
                        'names of the confs (ppo, sac) or in full')
    parser.add_argument('--all', action='store_true', help='base confs as well, which name no task')
    args = parser.parse_args(arguments)
    heads = [head for head in read_heads() if (head.task or args.all) and _is_meant(head, args)]
    if not heads:
        print('no conf is like that; without options all are listed', file=sys.stderr)
        return 1
    rows = [('conf', 'task', 'algorithm', 'steps', 'expected'),
            *((head.name, head.task or 'base', head.algorithm, head.steps, head.expected) for head in heads)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for name, task, algorithm, steps, expected in rows:
        print(f'{name:{widths[0]}}  {task:{widths[1]}}  {algorithm:{widths[2]}}  {steps:>{widths[3]}}  {expected}'
              .rstrip())
    return 0


def _is_meant(head: Head, args: argparse.Namespace) -> bool:
    names = ' '.join([head.name, head.algorithm, *head.bases]).lower()
    line = ' '.join([*head[:5], '' if head.task else 'base']).lower()
    return (args.task.lower() in head.task.lower() and args.algorithm.lower() in names
            and all(text.lower() in line for text in args.text))


if __name__ == '__main__':
    sys.exit(main())
