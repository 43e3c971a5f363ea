"""The page about the search: its program runs and prints what it says."""
import pathlib
import re

PAGE = pathlib.Path(__file__).parents[3] / 'docs' / 'search_with_a_model.md'


def test_the_game_on_the_page_matches_its_comment(capsys):
    program = re.search(r'<!-- file: nim.py -->\n```python\n(.*?)```', PAGE.read_text(), re.DOTALL).group(1)
    exec(compile(program, 'nim.py', 'exec'), {'__name__': 'nim'})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == 'take [2, 3, 1]'
    assert any(line.startswith('├─ take 1: visits') for line in lines)
