"""Writes docs/reference: what confs can name, with every argument, its default and what it means.

    python tools/reference.py

A page for each kind of thing; everything on it is read from signatures and docstrings, as by `alfx help`.
"""
import argparse
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from alfx import gin_utils
from alfx.bin import help as described

ROOT = Path(__file__).resolve().parent.parent
_GIVEN = {'observation_spec', 'action_spec', 'reward_spec', 'env', 'config', 'debug_summaries', 'name'}
_SECTION = re.compile(r'^(Args|Arguments|Attributes|Returns|Raises|Yields|Example|Examples):$', re.MULTILINE)
_ARGUMENT = re.compile(r'^    (\*{0,2}\w+(?:, \*{0,2}\w+)*): ', re.MULTILINE)
_ROLE = re.compile(r':\w+:`~?(?:[\w.]*\.)?(\w+)`')
_REMARK = ('Made by `python tools/reference.py`; `alfx help NAME` prints the same, and which confs bind it. Arguments '
           'that', 'alfx itself gives, such as `observation_spec`, `env` and `name`, are left out.')
_TRANSFORMERS = 'alfx.algorithms.data_transformer'


class Page(NamedTuple):
    """One page.

    Attributes:
        title: its heading.
        text: what it begins with.
        folders: of alfx, or modules, of which it has everything that no page before it has.
    """

    title: str
    text: str
    folders: tuple[str, ...]


ALGORITHMS = 'algorithms'
PAGES = {
    'transformers': Page('Data transformers', 'What `TrainerConfig.data_transformer_ctor` takes, one or a list: they '
                         'change observations and rewards on their way to the algorithm.', (_TRANSFORMERS, )),
    'environments': Page('Environments and wrappers', 'What makes environments (`create_environment.env_load_fn`), and '
                         'what can be put around them: wrappers of a single gymnasium environment '
                         '(`suite_gym.load.gym_env_wrappers`) and of a whole batch '
                         '(`create_environment.batched_wrappers`). Wrappers of other packages are named by dotted '
                         'names. How to make one of your own is in [Write a conf file]'
                         '(../write_a_conf.md#custom-environments).', ('alfx.environments', )),
    'networks': Page('Networks', 'Networks, their layers, and what they prepare inputs with.',
                     ('alfx.networks', 'alfx.layers', 'alfx.nest', 'alfx.norm_layers', 'alfx.initializers',
                      'alfx.distributions')),
    ALGORITHMS: Page('Losses and parts of algorithms', 'What is in `alfx.algorithms` and has no page of its own, as '
                     '[algorithms](../algorithms.md) with confs do: losses, parts, bases.', ('alfx.algorithms', )),
    'parts': Page('Optimizers, schedules and the rest', 'What is named in confs and is none of the above.', ('alfx', )),
}


def entries() -> dict[str, list[described.Entry]]:
    """What is on each page, by its name."""
    gin_utils.import_configurables()
    left, found = described.entries(), {}
    for name, page in PAGES.items():
        found[name] = [entry for entry in left if any(f'{entry.module}.'.startswith(f'{x}.') for x in page.folders)]
        left = [entry for entry in left if entry not in found[name]]
    return found


def pages() -> dict[str, str]:
    """The text of each page, by its name; that of algorithms is made by tools/algorithm_table.py."""
    return {name: page_of(name, inside) for name, inside in entries().items() if name != ALGORITHMS}


def page_of(name: str, inside: Sequence[described.Entry]) -> str:
    """The text of a page with these on it."""
    sections = sorted((_heading(entry), entry) for entry in inside)
    return '\n'.join([f'# {PAGES[name].title}', '', *textwrap.wrap(PAGES[name].text, 120), '', *_REMARK, '', *(
        line for heading, entry in sections
        for line in (f'## {heading}', '', f'`{entry.selector}`', '', *introduction(entry), '', *arguments(entry)))])


def _heading(entry: described.Entry) -> str:
    """The shortest name that says what it is: `suite_gym.load`, but `Adam`."""
    parts = entry.selector.split('.')
    return parts[-1] if parts[-1] != 'load' else '.'.join(parts[-2:])


def introduction(entry: described.Entry) -> Iterator[str]:
    """What its docstring says before arguments."""
    importlib.import_module(entry.module)
    return as_markdown(_SECTION.split(gin_utils.describe(entry.selector).docstring)[0])


def arguments(entry: described.Entry) -> Iterator[str]:
    """The table of its arguments; nothing where it takes none."""
    said = meanings(entry)
    found = gin_utils.describe(entry.selector).parameters
    shown = {key: p for key, p in found.items() if key not in _GIVEN}
    if not shown:
        return
    yield from ('| argument | default | type | meaning |', '| --- | --- | --- | --- |')
    for key, p in shown.items():
        default = '*required*' if p.default is p.empty else _code(described.show_default(p.default))
        kind = '' if p.annotation is p.empty else cell(described.type_name(p.annotation))
        yield f'| `{key}` | {default} | {kind} | {cell(said.get(key, ""))} |'
    yield ''


def meanings(entry: described.Entry) -> dict[str, str]:
    """What docstrings say of arguments, by name; of those that a class hands on, its bases do."""
    importlib.import_module(entry.module)
    return _meanings(getattr(sys.modules[entry.module], entry.defined_as),
                     gin_utils.describe(entry.selector).docstring)


def _meanings(target: Any, docstring: str) -> dict[str, str]:
    classes = inspect.getmro(target)[1:] if inspect.isclass(target) else ()
    texts = [docstring, *(inspect.getdoc(x) or '' for x in classes if x.__module__.startswith('alfx.'))]
    meanings: dict[str, str] = {}
    for text in texts:
        parts = _SECTION.split(text)
        for title, body in zip(parts[1::2], parts[2::2]):
            found = _ARGUMENT.split(body) if title in ('Args', 'Arguments', 'Attributes') else []
            for names, meaning in zip(found[1::2], found[2::2]):
                for name in names.split(', '):
                    meanings.setdefault(name.lstrip('*'), ' '.join(meaning.split()))
    return meanings


def as_markdown(docstring: str) -> Iterator[str]:
    """The text of a docstring, line by line."""
    before = ''
    for line in _ROLE.sub(r'`\1`', docstring.strip()).replace('``', '`').replace('::\n', ':\n').splitlines():
        if before and (line.startswith(('- ', '* ')) and not before.startswith(('- ', '* ', '  '))):
            yield ''
        yield line.rstrip()
        before = line


def cell(text: str) -> str:
    """A text as it stands in a table."""
    return _ROLE.sub(r'`\1`', text).replace('``', '`').replace('|', '\\|').replace('<', '&lt;')


def _code(text: str) -> str:
    return '`' + ' '.join(text.split()).replace('|', '\\|') + '`'


def main() -> int:
    """Write the pages; returns the exit code."""
    argparse.ArgumentParser(description='Writes docs/reference.').parse_args()
    folder = ROOT / 'docs' / 'reference'
    folder.mkdir(exist_ok=True)
    for name, text in pages().items():
        (folder / f'{name}.md').write_text(text.rstrip() + '\n')
    return 0


if __name__ == '__main__':
    sys.exit(main())
