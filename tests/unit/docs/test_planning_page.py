"""The page about planning: its program runs and prints what it says, its confs are there."""
import pathlib
import re

from alfx.gin_utils import parsing

PAGE = pathlib.Path(__file__).parents[3] / 'docs' / 'plan_with_a_model.md'


def test_the_cart_of_the_page_stabilizes(capsys):
    program = re.search(r'<!-- file: cart.py -->\n```python\n(.*?)```', PAGE.read_text(), re.DOTALL).group(1)
    exec(compile(program, 'cart.py', 'exec'), {'__name__': 'cart'})
    printed = capsys.readouterr().out.strip()
    assert f'`{printed}`' in PAGE.read_text()


def test_the_confs_of_the_page_are_shipped():
    names = re.findall(r'`((?:mbrl|pets|mbpo)_\w+)`', PAGE.read_text())
    assert len(names) >= 9
    for name in names:
        assert (pathlib.Path(parsing.CONFS) / f'{name}.gin').exists(), name
