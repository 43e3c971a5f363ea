"""Functions written as text: their results, and rejected text."""
from typing import NamedTuple

import pytest
import torch

from alfx.algorithms.muzero.expressions import ExpressionError, function_from_text
from alfx.data_structures import LossInfo

LOSS = LossInfo(loss=torch.tensor([[1.0, 2.0], [3.0, 4.0]]), extra={'value': torch.tensor([[4.0, 9.0], [16.0, 0.0]])})


def test_the_documented_priority_sums_the_roots_of_the_value_losses():
    function = function_from_text("lambda loss_info: loss_info.extra['value'].sqrt().sum(dim=0)", 'priority')
    assert function(LOSS).tolist() == [6.0, 3.0]


@pytest.mark.parametrize('text, expected', [
    ('lambda x: x.loss[0]', [1.0, 2.0]), ('lambda x: -x.loss[-1] + 2 * x.loss[0] ** 2', [-1.0, 4.0]),
    ('lambda x: (x.loss / 2 - 0.5).clamp(min=0.0, max=1.0).amax(0)', [1.0, 1.0]),
    ('lambda x: x.loss.mean(dim=0, keepdim=False)', [2.0, 3.0])])
def test_arithmetic_fields_elements_and_methods(text, expected):
    assert function_from_text(text, 'f')(LOSS).tolist() == expected


def test_several_arguments():
    assert function_from_text('lambda a, b: a - b', 'f')(5, 3) == 2


@pytest.mark.parametrize('text', [
    "__import__('os').system('true')", "lambda x: __import__('os')", 'lambda x: x.__class__', 'lambda x: open',
    'lambda x: x.loss.__len__()', "lambda x: x.loss.save('f')", 'lambda x: [y for y in x]', 'lambda x: (lambda: x)()',
    'lambda *x: x', 'lambda x=1: x', "lambda x: f'{x}'", 'lambda x: x.loss.numpy()', 'lambda x: x if x else x',
    'lambda', 'lambda x: x[x]', 'lambda x: x.loss.apply_(x)', 'lambda x: x.loss.sum(**x)', '1 + 1', 'lambda x: 1 @ 2'])
def test_anything_else_is_rejected_before_it_is_called(text):
    with pytest.raises(ExpressionError, match='^priority_func: '):
        function_from_text(text, 'priority_func')


class Record(NamedTuple):
    name: str = 'a'

    def act(self) -> None:
        raise AssertionError('it was called')

    @property
    def effect(self) -> None:
        raise AssertionError('it was read')


@pytest.mark.parametrize('text, argument', [
    ('lambda x: x.effect', Record()), ('lambda x: x.name * 1000000', Record()), ('lambda x: x.name.sum()', Record()),
    ("lambda x: x['b']", {'a': 1}), ('lambda x: x[3]', [1]), ('lambda x: x.loss', 3)])
def test_invalid_expressions_raise_when_called(text, argument):
    with pytest.raises(ExpressionError):
        function_from_text(text, 'f')(argument)


@pytest.mark.parametrize('text', [
    'lambda x: x.loss * 9**9**9', 'lambda x: 2 ** 10 ** 10', 'lambda x: -(10 ** 400) + x', 'lambda x: (-8) ** 0.5',
    'lambda x: 1 / (1 - 1)', 'lambda x: 1e300 * 1e300', 'lambda x: ' + '-' * 100_000 + 'x', 'lambda x: \0',
    'lambda x: ' + '(' * 5000 + 'x' + ')' * 5000, 'lambda x: ' + '1+' * 20_000 + 'x'])
def test_absurd_numbers_and_nesting_are_rejected_when_read(text):
    with pytest.raises(ExpressionError, match='^priority_func: '):
        function_from_text(text, 'priority_func')


def test_operations_on_arguments_are_bounded_when_called():
    with pytest.raises(ExpressionError, match='at most 1e\\+18'):
        function_from_text('lambda x: x ** x ** x', 'f')(9)
