"""List the confs shipped with alfx: task, algorithm, environment steps, and expected result +- accepted range.

Examples:

  alfx list
  alfx list --algorithm ppo --task MiniGrid

A base conf holds the bindings that several confs share; --all lists base confs as well. The table fits the width of the
terminal; --wide prints complete columns. alfx show NAME prints a conf.
"""
import os
import pathlib
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from alfx.bin import flags
from alfx.bin.flags import Parser

PARSER = Parser(__file__, __doc__, ('[WORD ...]', 'list only confs whose line contains all of these words'))
PARSER.add('task TEXT', 'list only confs whose task name contains this', default='')
PARSER.add('algorithm TEXT', 'list only confs of this algorithm: part of its full name or of a conf name (ppo, sac)',
           default='')
PARSER.add('all', 'list base confs as well, which have no task')
PARSER.add('wide', 'print complete columns, wider than the terminal')
CONFS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'examples', 'confs')


class Head(NamedTuple):
    """Fields of the header comment of a conf; '' where a field is missing.

    Attributes:
        name: name of the file, without ``.gin``.
        algorithm: first part of the title.
        task: the environment.
        steps: number of environment steps, or the number and the unit.
        expected: expected result.
        bases: names of the confs that it includes, directly or indirectly.
    """
    name: str
    algorithm: str
    task: str
    steps: str
    expected: str
    bases: tuple[str, ...]


def read_heads(folder: str = CONFS) -> list[Head]:
    """Return the header comments of all confs of a folder, sorted by name."""
    texts = {path.stem: path.read_text(encoding='utf8') for path in sorted(pathlib.Path(folder).glob('*.gin'))}
    return [_head(name, texts) for name in texts]


def _head(name: str, texts: dict[str, str]) -> Head:
    lines = texts[name].split('\n')
    fields = {match[1]: match[2] for line in lines if (match := re.match(r'#   (task|expected)\s+(.*)', line))}
    task = re.sub(r' \(see [^)]*\)', '', fields.get('task', ''))
    steps = re.search(r', ([\d,]+) (steps|updates|epochs)\b', task)
    title = re.split(r' on (?=[A-Z])| \(|[:;,]', lines[0].removeprefix('#').strip())[0]
    return Head(name, title, task[:steps.start()] if steps else task,
                '' if steps is None else steps[1] if steps[2] == 'steps' else f'{steps[1]} {steps[2]}',
                fields.get('expected', '').removeprefix('evaluation '), tuple(_bases(name, texts)))


def _bases(name: str, texts: dict[str, str]) -> list[str]:
    included = re.findall(r"^include '([^']*)\.gin'", texts[name], re.MULTILINE)
    return [found for base in included for found in (base, *(_bases(base, texts) if base in texts else ()))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the list and return the exit code."""
    args = PARSER.read(sys.argv[1:] if arguments is None else arguments)
    heads = [head for head in read_heads() if (head.task or args.all) and _is_meant(head, args)]
    if not heads:
        print('no conf matches; without options all confs are listed', file=sys.stderr)
        return 1
    rows = [('conf', 'task', 'algorithm', 'steps', 'expected'),
            *((head.name, head.task or 'base', head.algorithm, head.steps, head.expected) for head in heads)]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    columns = shutil.get_terminal_size((120, 24)).columns
    if not args.wide and sum(widths) + 8 > columns:
        rows = [(name, task, algorithm, _short_steps(steps), _short_result(expected))
                for name, task, algorithm, steps, expected in rows]
        widths = _fitting([max(len(row[i]) for row in rows) for i in range(5)], columns)
    for row in rows:
        cells = [_cut(text, width) for text, width in zip(row, widths)]
        aligned = [cell.rjust(width) if i == 3 else cell.ljust(width) for i, (cell, width) in
                   enumerate(zip(cells, widths)) if width]
        print('  '.join(aligned).rstrip())
    return 0


def _short_steps(steps: str) -> str:
    """Return '300k' for '300,000' and '50k updates' for '50,000 updates'."""
    return re.sub(r'(\d),000\b', r'\1k', re.sub(r'(\d),000,000\b', r'\1M', steps))


def _short_result(expected: str) -> str:
    """Return the measure and its first number, for example 'return 500'."""
    result = re.match(r'\S+ (?:at most )?-?[\d,.]*\d', expected)
    return result[0].replace('normalized_score', 'score') if result else expected


def _fitting(widths: list[int], total: int) -> list[int]:
    """Return widths of the columns that fit into ``total`` characters; 0 for a column without room."""
    name, task, algorithm, steps, expected = widths
    left = total - name - steps - 4
    if left < 24:  # both would be unreadable
        return [name, min(task, max(left, 4)), 0, steps, 0]
    expected = min(expected, left - 2 - min(task, left // 2 - 1))
    left -= expected + 2
    task, algorithm = (min(task, left // 2), algorithm) if left >= 40 else (min(task, left), 0)
    return [name, task, algorithm and min(algorithm, left - task - 2), steps, expected]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[:max(width - 1, 0)].rstrip() + '\u2026'


def _is_meant(head: Head, args: Any) -> bool:
    names = ' '.join([head.name, head.algorithm, *head.bases]).lower()
    line = ' '.join([*head[:5], '' if head.task else 'base']).lower()
    return (args.task.lower() in head.task.lower() and args.algorithm.lower() in names
            and all(text.lower() in line for text in args.arguments))


if __name__ == '__main__':
    flags.run(lambda _: main(), PARSER, argument='*')
