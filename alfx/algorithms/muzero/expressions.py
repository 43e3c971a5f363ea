"""Functions given as strings in a conf, such as ``"lambda info: info.extra['value'].sqrt().sum(dim=0)"``.

A conf is data: training from an untrusted run folder must not execute its code. This module parses the string and
interprets it; Python never evaluates it. It supports arithmetic, fields of named tuples, elements of dictionaries and
sequences, and the tensor methods listed below.
"""
import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

_METHODS = frozenset((
    'abs', 'amax', 'amin', 'clamp', 'clamp_max', 'clamp_min', 'clip', 'detach', 'exp', 'expm1', 'float', 'log', 'log1p',
    'max', 'mean', 'median', 'min', 'pow', 'prod', 'sigmoid', 'sqrt', 'square', 'std', 'sum', 'tanh', 'var'))
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: operator.pow}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
_ALLOWED = ('expected "lambda NAME: ..." of numbers, + - * / **, fields of tuples, elements by constant index or key, '
            f'and the tensor methods {", ".join(sorted(_METHODS))}')

_MOST = 1e18  # limit for the result of an operation on numbers

Evaluator = Callable[[dict[str, Any]], Any]


class ExpressionError(ValueError):
    """The string is not a function that this module supports."""


def function_from_text(text: str, where: str) -> Callable[..., Any]:
    """Create the function that ``text`` describes.

    Args:
        text: ``'lambda NAME, ...: EXPRESSION'``.
        where: name of the argument, for error messages.

    Raises:
        ExpressionError: the string is not a lambda, or uses unsupported expressions.
    """
    try:
        parsed = ast.parse(text.strip(), mode='eval').body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError(f'{where}: {text[:200]!r} cannot be parsed ({error}); {_ALLOWED}') from None
    if not isinstance(parsed, ast.Lambda):
        raise ExpressionError(f'{where}: {text!r} is not a lambda; {_ALLOWED}')
    names, arguments = [argument.arg for argument in parsed.args.args], parsed.args
    if any((arguments.posonlyargs, arguments.vararg, arguments.kwonlyargs, arguments.kwarg, arguments.defaults)):
        raise ExpressionError(f'{where}: {text!r} has arguments other than plain names; {_ALLOWED}')
    try:
        return _Function(_Parser(text, where, names).evaluator(parsed.body), names)
    except RecursionError:
        raise ExpressionError(f'{where}: {text[:200]!r} has too many nested operations; {_ALLOWED}') from None


class _Function:
    """Callable returned by :func:`function_from_text`."""

    def __init__(self, evaluator: Evaluator, names: Sequence[str]):
        self._evaluator, self._names = evaluator, names

    def __call__(self, *arguments: Any) -> Any:
        return self._evaluator(dict(zip(self._names, arguments, strict=True)))


class _Parser:
    """Converter of parsed nodes to functions of the arguments."""

    def __init__(self, text: str, where: str, names: Sequence[str]):
        self._text, self._where, self._names = text, where, names

    def evaluator(self, node: ast.expr) -> Evaluator:
        """Return the function that ``node`` describes.

        Raises:
            ExpressionError: the node is not supported.
        """
        method = getattr(self, f'_{type(node).__name__.lower()}', None)
        if method is None:
            raise self._refused(node)
        return method(node)

    def _refused(self, node: ast.AST) -> ExpressionError:
        found = ast.get_source_segment(self._text.strip(), node) or type(node).__name__
        return ExpressionError(f'{self._where}: {found!r} in {self._text!r} is not supported; {_ALLOWED}')

    def _constant(self, node: ast.Constant) -> Evaluator:
        value = node.value
        if not isinstance(value, (int, float, str)):
            raise self._refused(node)
        return lambda _: value

    def _name(self, node: ast.Name) -> Evaluator:
        name = node.id
        if name not in self._names:
            raise self._refused(node)
        return lambda given: given[name]

    def _binop(self, node: ast.BinOp) -> Evaluator:
        function = _BINARY.get(type(node.op))
        if function is None:
            raise self._refused(node)
        left, right = self.evaluator(node.left), self.evaluator(node.right)
        return self._folded(node, lambda given: _applied(function, _number(left(given)), _number(right(given))))

    def _folded(self, node: ast.expr, evaluator: Evaluator) -> Evaluator:
        """Compute an operation on constants once, so that its error is raised when the conf is read."""
        if any(isinstance(part, ast.Name) for part in ast.walk(node)):
            return evaluator
        try:
            value = evaluator({})
        except ExpressionError as error:
            raise ExpressionError(f'{self._where}: {self._text!r}: {error}') from None
        return lambda _: value

    def _unaryop(self, node: ast.UnaryOp) -> Evaluator:
        function = _UNARY.get(type(node.op))
        if function is None:
            raise self._refused(node)
        operand = self.evaluator(node.operand)
        return lambda given: function(_number(operand(given)))

    def _attribute(self, node: ast.Attribute) -> Evaluator:
        owner, field = self.evaluator(node.value), node.attr
        if field.startswith('_'):
            raise self._refused(node)

        def look_up(given: dict[str, Any]) -> Any:
            record = owner(given)
            if field not in getattr(type(record), '_fields', ()):
                raise ExpressionError(f'{self._where}: {field!r} in {self._text!r}: expected a named tuple with this '
                                      f'field, found {type(record).__name__}')
            return getattr(record, field)

        return look_up

    def _subscript(self, node: ast.Subscript) -> Evaluator:
        owner, index = self.evaluator(node.value), node.slice
        if isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.USub):
            index = index.operand
            sign = -1
        else:
            sign = 1
        if not isinstance(index, ast.Constant) or not isinstance(index.value, (int, str)):
            raise self._refused(node)
        key = -index.value if sign < 0 and isinstance(index.value, int) else index.value

        def look_up(given: dict[str, Any]) -> Any:
            collection = owner(given)
            if not isinstance(collection, (Mapping, Sequence, Tensor)):
                raise ExpressionError(f'{self._where}: [{key!r}] in {self._text!r}: expected a collection, found '
                                      f'{type(collection).__name__}')
            try:
                return collection[key]  # type: ignore[index]
            except (KeyError, IndexError):
                have = sorted(collection) if isinstance(collection, Mapping) else f'{len(collection)} elements'
                raise ExpressionError(f'{self._where}: [{key!r}] in {self._text!r}: found {have}') from None

        return look_up

    def _call(self, node: ast.Call) -> Evaluator:
        method = node.func
        if not isinstance(method, ast.Attribute) or method.attr not in _METHODS or any(
                keyword.arg is None for keyword in node.keywords):
            raise self._refused(node)
        owner, name = self.evaluator(method.value), method.attr
        arguments = [self.evaluator(argument) for argument in node.args]
        keywords = {str(keyword.arg): self.evaluator(keyword.value) for keyword in node.keywords}

        def call(given: dict[str, Any]) -> Any:
            tensor = owner(given)
            if not isinstance(tensor, Tensor):
                raise ExpressionError(f'{self._where}: .{name}() in {self._text!r}: expected a tensor, found '
                                      f'{type(tensor).__name__}')
            return getattr(tensor, name)(*(_number(f(given)) for f in arguments),
                                         **{key: _number(f(given)) for key, f in keywords.items()})

        return call


def _applied(function: Callable[[Any, Any], Any], x: Any, y: Any) -> Any:
    """Apply an operator; numbers are computed in floating point first, because integers could fill the memory."""
    if isinstance(x, Tensor) or isinstance(y, Tensor):
        return function(x, y)
    try:
        value = function(float(x), float(y))
    except ArithmeticError as error:
        value = error
    if not isinstance(value, float) or not abs(value) <= _MOST:
        raise ExpressionError(f'expected a real number of at most {_MOST:.0e}, found {value}')
    return function(x, y)


def _number(value: Any) -> Any:
    """Return ``value`` if it is a number or a tensor; a string times a number could fill the memory."""
    if not isinstance(value, (int, float, Tensor)):
        raise ExpressionError(f'expected a number or a tensor, found {type(value).__name__}')
    return value
