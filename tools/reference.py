"""Write docs/reference: everything that confs can bind, with all arguments, defaults and meanings.

    python tools/reference.py

Each page covers one kind of object. The content comes from signatures and docstrings, as in `alfx help`.
"""
import argparse
import importlib
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from alfx import gin_utils
from alfx.bin import help as described
from alfx.gin_utils.describe import SECTION
from alfx.utils import docstrings

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / 'tools'))
try:
    import formulas
finally:
    sys.path.pop(0)

_GIVEN = {'observation_spec', 'action_spec', 'reward_spec', 'env', 'config', 'debug_summaries', 'name'}
_REMARK = ('Written by `python tools/reference.py`. `alfx help NAME` prints the same, and the confs that bind it.',
           'Arguments that alfx passes itself, such as `observation_spec`, `env` and `name`, are omitted.')
_TRANSFORMERS = 'alfx.algorithms.data_transformer'


class Page(NamedTuple):
    """One page.

    Attributes:
        title: heading.
        text: introduction.
        folders: packages or modules whose content the page lists, except for the content of earlier pages.
    """

    title: str
    text: str
    folders: tuple[str, ...]


ALGORITHMS = 'algorithms'
PAGES = {
    'transformers': Page('Data transformers', 'Values of `TrainerConfig.data_transformer_ctor`, one or a list. They '
                         'transform observations and rewards before the algorithm receives them.',
                         (_TRANSFORMERS, 'alfx.algorithms.return_scaling')),
    'environments': Page('Environments and wrappers', 'Functions that load environments '
                         '(`create_environment.env_load_fn`), and wrappers around a single gymnasium environment '
                         '(`suite_gym.load.gym_env_wrappers`) or around a whole batch '
                         '(`create_environment.batched_wrappers`). Wrappers from other packages are bound by '
                         'their import path. To write your own environment, see [Write a conf file]'
                         '(../write_a_conf.md#custom-environments).', ('alfx.environments', )),
    'networks': Page('Networks', 'Networks, layers, and preprocessors of their inputs.',
                     ('alfx.networks', 'alfx.layers', 'alfx.nest', 'alfx.norm_layers', 'alfx.initializers',
                      'alfx.distributions')),
    ALGORITHMS: Page('Losses and algorithm parts', 'Losses, parts and base classes of `alfx.algorithms`. The '
                     '[algorithms](../algorithms.md) that confs use have their own pages.', ('alfx.algorithms', )),
    'parts': Page('Optimizers, schedules and others', 'Everything else that confs can bind.', ('alfx', )),
}


def entries() -> dict[str, list[described.Entry]]:
    """Return the entries of each page by the name of the page."""
    gin_utils.import_configurables()
    remaining, found = described.entries(), {}
    for name, page in PAGES.items():
        found[name] = [entry for entry in remaining
                       if any(f'{entry.module}.'.startswith(f'{x}.') for x in page.folders)]
        remaining = [entry for entry in remaining if entry not in found[name]]
    return found


def pages() -> dict[str, str]:
    """Return the text of each page by name, except for the algorithms, which tools/algorithm_table.py writes."""
    return {name: page_of(name, inside) for name, inside in entries().items() if name != ALGORITHMS}


def page_of(name: str, inside: Sequence[described.Entry]) -> str:
    """Return the text of a page with the given entries."""
    sections = sorted((_heading(entry), entry) for entry in inside)
    return '\n'.join([f'# {PAGES[name].title}', '', *textwrap.wrap(PAGES[name].text, 120), '', *_REMARK, '', *(
        line for heading, entry in sections
        for line in (f'## {heading}', '', f'`{entry.selector}`', '', *introduction(entry), '', *arguments(entry)))])


def _heading(entry: described.Entry) -> str:
    """Return the shortest descriptive name: `Adam`, but `suite_gym.load`."""
    parts = entry.selector.split('.')
    return parts[-1] if parts[-1] != 'load' else '.'.join(parts[-2:])


def introduction(entry: described.Entry) -> Iterator[str]:
    """Return the lines of the docstring before the arguments."""
    importlib.import_module(entry.module)
    return as_markdown(SECTION.split(gin_utils.describe(entry.selector).docstring)[0])


def arguments(entry: described.Entry) -> Iterator[str]:
    """Return the table of arguments; nothing if there are none."""
    descriptions = meanings(entry)
    found = gin_utils.describe(entry.selector).parameters
    shown = {key: p for key, p in found.items() if key not in _GIVEN}
    if not shown:
        return
    yield from ('| argument | default | type | meaning |', '| --- | --- | --- | --- |')
    for key, p in shown.items():
        default = '*required*' if p.default is p.empty else _code(docstrings.show_default(p.default))
        kind = '' if p.annotation is p.empty else cell(described.type_name(p.annotation))
        yield f'| `{key}` | {default} | {kind} | {cell(descriptions.get(key, ""))} |'
    yield ''


def meanings(entry: described.Entry) -> dict[str, str]:
    """Return the meaning of each argument by name, from the docstrings of the class and its bases."""
    importlib.import_module(entry.module)
    return gin_utils.meanings(entry.selector)


def as_markdown(docstring: str) -> Iterator[str]:
    """Convert a docstring to lines of Markdown, with its formulas as LaTeX."""
    before = ''
    for line in formulas.convert_blocks(docstrings.markdown(docstring.strip()).replace('::\n', ':\n').splitlines()):
        if before and (line.startswith(('- ', '* ')) and not before.startswith(('- ', '* ', '  '))):
            yield ''
        yield line.rstrip()
        before = line


def cell(text: str) -> str:
    """Escape a text for a table cell."""
    return docstrings.markdown(text).replace('|', '\\|').replace('<', '&lt;')


def _code(text: str) -> str:
    return '`' + ' '.join(text.split()).replace('|', '\\|') + '`'


def main() -> int:
    """Write the pages; return the exit code."""
    argparse.ArgumentParser(description='Write docs/reference.').parse_args()
    folder = ROOT / 'docs' / 'reference'
    folder.mkdir(exist_ok=True)
    for name, text in pages().items():
        (folder / f'{name}.md').write_text(text.rstrip() + '\n')
    return 0


if __name__ == '__main__':
    sys.exit(main())
