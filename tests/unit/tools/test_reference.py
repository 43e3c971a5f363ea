"""The pages of docs/reference are generated from signatures and docstrings."""
from pathlib import Path

import pytest

from alfx import gin_utils

ROOT = Path(__file__).parents[3]


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'tools'))
    import reference
    return reference


def test_the_pages_are_current(reference):
    pytest.importorskip('torch', minversion='2.13')  # some arguments come from classes of torch
    pages = reference.pages()
    assert {path.stem for path in (ROOT / 'docs' / 'reference').glob('*.md')} == {*pages, reference.ALGORITHMS}
    outdated = [name for name, text in pages.items()
                if (ROOT / 'docs' / 'reference' / f'{name}.md').read_text() != text.rstrip() + '\n']
    assert not outdated, 'run python tools/reference.py'
    assert ' at 0x' not in ''.join(pages.values())


def test_forwarded_arguments_are_described_by_the_base_class():
    class Base:
        """A base.

        Args:
            rate: how fast,
                on the whole.
            first, second: both of them.
        """

    Base.__module__ = 'alfx.base'

    @gin_utils.configurable(module='test_reference')
    class Derived(Base):
        """Another.

        Args:
            rate: how slow.

        Raises:
            first: no argument.
        """

    assert gin_utils.meanings('test_reference.Derived') == {
        'rate': 'how slow.', 'first': 'both of them.', 'second': 'both of them.'}


def test_a_list_in_a_docstring_begins_after_an_empty_line(reference):
    assert list(reference.as_markdown('Either::\n- :class:`~alfx.a.B`, or\n  more\n- ``c``\n* :mod:`alfx.d.e`')) == [
        'Either:', '', '- `B`, or', '  more', '- `c`', '* `alfx.d.e`']
