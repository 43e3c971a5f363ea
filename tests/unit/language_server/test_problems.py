"""Mistakes in confs and their locations."""
import pytest

from alfx.language_server.problems import mistakes

BASE = "include 'sac_pendulum.gin'\n"


@pytest.fixture
def found(tmp_path, monkeypatch):
    """Return a function that returns (line, marked text, message) of each mistake of a conf."""
    monkeypatch.chdir(tmp_path)

    def of(text, **others):
        path = str(tmp_path / 'new.gin')
        lines = text.split('\n')
        texts = {str(tmp_path / f'{name}.gin'): other for name, other in others.items()}
        return [(line, lines[line][start:end], message)
                for line, start, end, message in mistakes(path, {**texts, path: text})]

    return of


@pytest.mark.parametrize('line, marked, message', [
    ('Adam.lrr = 1.0', 'lrr', "Adam has no parameter 'lrr'\ndid you mean 'lr'?"),
    ('Adm.lr = 1.0', 'Adm', "there is no configurable 'Adm'\ndid you mean 'Adam'?"),
    ('x = (1,\n     @Adm())', 'Adm', "there is no configurable '@Adm'"),
    ('Adam.lr = %rat  # %rat', 'rat', "macro '%rat' is not defined"),
    ("Adam.lr = 'fast'  # text", "'fast'", 'Adam.lr expects float'),
    ('Adam.lr = fast', 'fast', 'syntax error: cannot read the value fast'),
    ("include 'nothing.gin'", 'nothing.gin', "include 'nothing.gin': there is no such file"),
    ('  Adam.lr = (1', '  Adam.lr = (1', 'syntax error: '),
    ('x = 1\nAdam.lr =', '', 'syntax error: '),
])
def test_a_mistake_is_marked_at_its_word_or_value(found, line, marked, message):
    (number, text, problem), = found(BASE + line)
    assert problem.startswith(message)
    assert text == marked.strip() or not marked
    assert number >= 1


def test_a_correct_conf_has_no_mistakes(found):
    assert found(BASE) == []
    assert found('') == []


def test_text_in_memory_replaces_files_on_disk(found, tmp_path):
    (tmp_path / 'base.gin').write_text('Adam.lrr = 1.0\n')
    (_, text, message), = found("include 'base.gin'\n")
    assert text == 'base.gin' and message.startswith("base.gin:1: Adam has no parameter 'lrr'")
    assert found("include 'base.gin'\n", base=BASE) == []


def test_a_mistake_in_an_indirect_include_is_shown_at_the_include(found, tmp_path):
    (tmp_path / 'outer.gin').write_text("include 'inner.gin'\n")
    (tmp_path / 'inner.gin').write_text('Adam.lr = (\n')
    (line, text, message), = found(BASE + "include 'outer.gin'\n")
    assert (line, text) == (1, 'outer.gin') and message.startswith('inner.gin:')


def test_names_of_modules_that_are_not_imported_are_not_reported(found, tmp_path):
    (tmp_path / 'my_module.py').write_text('raise SystemExit\n')
    assert found('import my_module\nMyClass.x = 1\nf.x = @MyOther()\n') == []
    assert found('import alfx.nest\nMyClass.x = 1\n') != []
    assert found("import my_module\nAdam.lrr = 1.0\n")[0][1] == 'lrr'


def test_names_by_path_are_reported_if_their_package_is_missing(found):
    assert [text for _, text, _ in found('x = @torch.nn.Softplus()\ny = @no_package.Softplus()\n')] == [
        'no_package.Softplus']
    assert [text for _, text, _ in found('suite_gim.load.env_name = 1\n')] == ['suite_gim.load']
