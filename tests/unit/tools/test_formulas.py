"""Formulas in docstrings become LaTeX in the pages; other blocks stay code blocks."""
import contextlib
import fractions
import random
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def formulas(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / 'tools'))
    import formulas
    return formulas


@pytest.mark.parametrize('text, latex', [
    ("f = g(s, a) + gamma h(s') - log pi(a | s)", r"f = g(s, a) + \gamma \, h(s') - \log \pi(a \mid s)"),
    ("min_i Q'_i(s[t+1], a')", r"\min_i Q'_i(s_{t+1}, a')"),
    ('d_k^2 + L_F[t] = beta2^t', r'd_k^2 + L_{F, t} = \beta_2^t'),
    ('w = w_before - td_lambda * loss_d', r'w = w_{\mathrm{before}} - \mathrm{td\_lambda} \cdot \mathrm{loss}_d'),
    ('i* = argmin_i usage[i]', r'i^* = \arg\min_i \mathrm{usage}_i'),
    ('x[t]^T C^(-1) x[t] = y', r'x_t^T \, C^{- 1} \, x_t = y'),
    ('x^d_k = y^-T', r'x^{d_k} = y^{-T}'),
    ('x = 1e-6 + 2e3', r'x = 10^{-6} + 2 \cdot 10^{3}'),
    ('x <= sqrt(v + eps)', r'x \le \sqrt{v + \mathrm{eps}}'),
    ('log(alpha) += tanh(x)', r'\log(\alpha) \mathrel{+}= \tanh(x)'),
    ('J(a[0..H-1]) = 1 ... R', r'J(a_{0, \ldots, H-1}) = 1 \ldots R'),
    ('x = min(y, max)', r'x = \min(y, \mathrm{max})')])
def test_names_indices_and_functions(formulas, text, latex):
    assert formulas.to_latex(text) == latex


@pytest.mark.parametrize('text, latex', [
    ('r = |x - 1(u < 0)| u^2', r'r = \lvert x - \mathbf{1}(u < 0) \rvert \, u^2'),
    ('r = a |x| |y|', r'r = a \, \lvert x \rvert \, \lvert y \rvert'),
    ('loss = ||x - sg[z_e]||^2', r'\mathrm{loss} = \lVert x - \mathrm{sg}[z_e] \rVert^2'),
    ('KL(q(z|x) || N(0, 1)) = y', r'\mathrm{KL}(q(z \mid x) \,\|\, \mathcal{N}(0, 1)) = y'),
    ("a' ~ pi(. | s)", r"a' \sim \pi(\cdot \mid s)"),
    ('E_{a ~ pi}[Q(a)]', r'\mathbb{E}_{a \sim \pi}[Q(a)]'),
    ('E_D[ x . y ] - E|x|', r'\mathbb{E}_D[x \cdot y] - \mathbb{E}\lvert x \rvert')])
def test_bars_dots_and_expectations(formulas, text, latex):
    assert formulas.to_latex(text) == latex


@pytest.mark.parametrize('text, latex', [
    ('sum_{s < t} x[s]', r'\sum_{s < t} x_s'),
    ('sum_{k=1..n} x_k', r'\sum_{k = 1}^{n} x_k'),
    ('sum_pixels log sum_k m_k', r'\sum_{\mathrm{pixels}} \log \sum_k m_k'),
    ('L = mean (x - y)^2', r'L = \mathop{\mathrm{mean}} \, (x - y)^2'),
    ('L = (sum_k x_k)', r'L = \left( \sum_k x_k \right)')])
def test_sums_and_means(formulas, text, latex):
    assert formulas.to_latex(text) == latex


@pytest.mark.parametrize('text, latex', [
    ('x = a * b / c * d', r'x = a \cdot \frac{b}{c} \cdot d'),
    ('x = (a - b) / (c + d)', r'x = \frac{a - b}{c + d}'),
    ('x = (a, b) / (c d)', r'x = \frac{(a, b)}{c \, d}'),
    ('x = 2 t y^t / z', r'x = \frac{2 \, t \, y^t}{z}'),
    ('x = sum_k y_k / z_k', r'x = \sum_k \frac{y_k}{z_k}'),
    ('x = f(a / b)', r'x = f\left( \frac{a}{b} \right)'),
    ('x = 1/2 y + 1/M z', r'x = \tfrac{1}{2} \, y + \frac{1}{M} \, z'),
    ('x = y / mean|z|', r'x = \frac{y}{\mathop{\mathrm{mean}} \lvert z \rvert}')])
def test_fractions(formulas, text, latex):
    assert formulas.to_latex(text) == latex


def test_fractions_keep_the_value_of_an_expression(formulas):
    draw = random.Random(0)

    def expression(depth):
        if depth == 0:
            return draw.choice('xyz')
        left, right = expression(depth - 1), expression(draw.randrange(depth))
        sign = draw.choice('+-*/^')
        text = f'{left} {sign} {right}' if sign != '^' else f'({left})^2'
        return draw.choice([text, f'({text})'])

    def value(text):
        for old, new in ((r'\left', ''), (r'\right', ''), (r'\cdot', '*'), (r'\frac', ''), ('^', '**'), ('}{', ')/('),
                         ('{', '(('), ('}', '))'), (')/(', '))/((')):
            text = text.replace(old, new)
        return eval(text, {name: fractions.Fraction(top, 7) for name, top in zip('xyz', (17, -5, 9))})

    converted = 0
    for _ in range(500):
        text = expression(4)
        latex = formulas.to_latex(f'r = {text}')
        with contextlib.suppress(ZeroDivisionError):
            assert latex is None or value(latex.removeprefix('r = ')) == value(text), text
            converted += latex is not None
    assert converted > 200


def test_words_labels_and_comments(formulas):
    assert formulas.to_latex('b = 1, or 0 if s > 8') == r'b = 1, \text{ or } 0 \text{ if } s > 8'
    assert formulas.to_latex('minimize  x^2 = y') == r'\text{minimize} \quad x^2 = y'
    assert formulas.to_latex('y = x,  x = 0 without a step        z = 1') == (
        r'y = x, \quad x = 0 \text{ without a step} \qquad z = 1')
    assert formulas.to_latex('max over x of  x^2 = y') == r'\text{max over } x \text{ of } x^2 = y'
    assert formulas.to_latex('y = x          (eq. 3, and 5 there)') == r'y = x \quad \text{(eq. 3, and 5 there)}'


def test_lines_are_aligned_at_their_first_relation(formulas):
    assert formulas.to_latex('''
        pi       maximizes  E[f] = 0       (eq. 1)
        g(s, a)  ->  x
    ''') == (r'\begin{aligned}' '\n'
             r'\pi & \;\text{maximizes}\; \mathbb{E}[f] = 0 && \text{(eq. 1)} \\' '\n'
             r'g(s, a) & \to x' '\n'
             r'\end{aligned}')


def test_lines_are_aligned_after_their_labels(formulas):
    assert formulas.to_latex('''
        read:   x = y
        write:  y = x      content
                z = x
    ''') == (r'\begin{aligned}' '\n'
             r'& \text{read:} && x = y \\' '\n'
             r'& \text{write:} && y = x && \text{content} \\' '\n'
             r'& && z = x' '\n'
             r'\end{aligned}')


@pytest.mark.parametrize('block', [
    'Sac.gamma = 0.99', 'Trainer.ctor = [@A, @B]', 'gamma = 0.99', "x = 'y'",
    'for _ in range(n):\n    x = y', 'x = f(y).z', 'f(x=1, y=2)', 'x = y  # comment', 'x = y[1:]', 'x = `y`',
    'alfx train --conf sac', '$ cat x', 'a    b    c\nd    e    f', '| a | b |', 'x[0]   x[1]   ...  x[T]',
    'train the model on the mean of x', 'root/conf/\n  x.gin   the conf', 'and/or = x',
    'loss = call(all)', 'x = y\n\nz = x', ''])
def test_confs_code_and_tables_are_no_formulas(formulas, block):
    assert formulas.to_latex(block) is None


@pytest.mark.parametrize('text', [
    'x = a / b c', 'x = a / b / c', 'x = log y / z', 'x = log sum_k y_k / z', 'x = y / sum z', 'x = a /b', 'x = (a',
    'x = a)', 'x = |a', 'x = a +', 'x = * a', 'x = a^b^c', 'x = log_p', 'x = f(y)[i]', 'x = one-step + y', 'x == y'])
def test_ambiguous_or_incomplete_formulas_stay_code(formulas, text):
    assert formulas.to_latex(text) is None


def test_only_formulas_among_code_blocks_are_replaced(formulas):
    lines = ['Text:', '', '    x = y', '', '- item', '', '    paragraph x = y', '', '1. step:', '', '       y = x', '',
             '   and', '', 'Code:', '', '    A.b = 1', '', '    x = y', '', '```', '', '    x = y', '```', 'no block:',
             '    x = y']
    assert list(formulas.convert_blocks(lines)) == [
        'Text:', '', '```math', 'x = y', '```', '', '- item', '', '    paragraph x = y', '', '1. step:', '',
        '   ```math', '   y = x', '   ```', '', *lines[12:]]


def test_formulas_of_the_pages_are_closed_and_work_on_github():
    pages = '\n'.join(path.read_text() for path in sorted((ROOT / 'docs').rglob('*.md')))
    found = re.findall(r'^ *```math\n(.*?)\n *```$', pages, re.MULTILINE | re.DOTALL)
    assert len(found) == len(re.findall('```math', pages)) > 30
    for latex in found:
        assert not re.search(r'\\(?:operatorname|mbox|phantom|def|newcommand)(?![a-z])', latex), 'not allowed by GitHub'
        plain = re.sub(r'\\[{}]', '', latex)
        assert plain.count('{') == plain.count('}'), latex
        assert len(re.findall(r'\\left(?![a-z])', latex)) == len(re.findall(r'\\right(?![a-z])', latex)), latex
        assert latex.count(r'\begin{aligned}') == latex.count(r'\end{aligned}') == int('&' in latex), latex
