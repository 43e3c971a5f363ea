"""The site has every page, and the page about tags has every tag that is written by default."""
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[3]


def test_every_page_is_in_the_navigation_or_in_the_table_of_algorithms():
    named = re.findall(r'^ +- .*: (\S+\.md)$', (ROOT / 'mkdocs.yml').read_text(), re.MULTILINE)
    table = (ROOT / 'docs/algorithms.md').read_text()
    named += re.findall(r'^\| \[\w+\]\((algorithms/\w+\.md)\) ', table, re.MULTILINE)
    assert sorted(named) == sorted(str(path.relative_to(ROOT / 'docs')) for path in (ROOT / 'docs').rglob('*.md'))


def test_every_tag_of_learning_is_explained():
    sources = '\n'.join(path.read_text() for path in (ROOT / 'alfx').rglob('*.py'))
    written = set(re.findall(r"summary(?:_\w+)?\(?\.\w+\(f?'((?:train|model|imagined|time|ray_rollout)/\w+)", sources))
    run_summary = (ROOT / 'alfx/trainers/run_summary.py').read_text()
    written |= {f'train/{name}' for name in re.findall(r"found\[f?'(\w+)", run_summary)}
    assert {'train/approx_kl', 'train/values', 'train/learning_rate', 'time/unroll'} <= written
    page = (ROOT / 'docs/what_tags_mean.md').read_text()
    assert sorted(tag for tag in written if f'`{tag}' not in page) == []
