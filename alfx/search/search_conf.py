"""A search conf: a conf with bindings of ``Search``, the rest of which is what the trials have in common.

:func:`read` takes both apart; :func:`check` tries every binding of the space before anything runs.
"""
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from alfx import gin_utils
from alfx.config import TrainerConfig
from alfx.gin_utils import ConfError, Problem, locations, static_check
from alfx.gin_utils.conf_error import hint_nearest
from alfx.gin_utils.parsing import Macro, Reader, Reference, Statement, iterate_nested, substitute
from alfx.gin_utils.settings import may_change
from alfx.search import space as space_module
from alfx.search.search_folder import SearchFolder, read_text, write_text
from alfx.search.search_settings import Search

_OWNER = 'alfx.search.search_settings.Search'
_DECIDED_HERE = {'random_seed': 'each run gets its own seed; Search.seed and Search.num_seeds decide on them',
                 'root_dir': 'each run gets its own folder', 'conf_file': 'each run gets its own conf'}
_MODULES = re.compile(r'(?:\w+\.)+(?=\w+\.\w+$)')


class SearchConf(NamedTuple):
    """What a search conf says.

    Attributes:
        settings: of the search.
        space: for each binding that is searched, its values.
        function: ``@scopes/name`` of ``Search.function``; None to train.
        base_text: the rest as a conf of its own: what trials have in common.
        text: all of it as one conf, includes and ``--conf_param`` resolved.
        location: where the space is written, as a message shows it.
        must_be_used: those bindings of the user's own conf, and of the command line, that each trial has to use: one of
            which nobody makes use would be found out after the search only.
    """
    settings: Search
    space: dict[str, space_module.Values]
    function: str | None
    base_text: str
    text: str
    location: str
    must_be_used: tuple[str, ...] = ()


def read(conf: gin_utils.Conf) -> SearchConf:
    """Take apart the conf that is loaded.

    Args:
        conf: what was loaded.

    Raises:
        ConfError: ``Search`` has mistakes, or there is none in the conf.
    """
    own = {binding.name: binding for binding in conf.bindings if binding.selector == _OWNER}
    if not own:
        raise ConfError(f'{os.path.basename(conf.conf_file)} does not say what to search: it binds nothing of Search',
                        "add Search.space = {'ppo/Adam.lr': 'log_uniform(1e-5, 1e-2)'}, for example")
    scoped = next((binding for binding in own.values() if binding.scope), None)
    if scoped is not None:
        raise ConfError(f'{scoped.text}: Search has no scopes', 'remove it', scoped.location)
    macros = {binding.scope: binding.value for binding in conf.bindings if binding.selector == 'gin.macro'}
    values = {name: substitute(binding.value, macros) for name, binding in own.items()}
    settings = Search(**values)
    location = own['space'].location if 'space' in own else ''
    base = [binding for binding in conf.bindings if binding.selector != _OWNER]
    base = _without_macros_of(own.values(), base)
    space = _read_space(settings.space, location)
    return SearchConf(settings, space, _function(settings.function), _text(conf.imports, base),
                      _text(conf.imports, conf.bindings), location, _always_used(conf, base, space))


def _always_used(conf: gin_utils.Conf, base: Iterable[locations.Binding],
                 space: dict[str, space_module.Values]) -> tuple[str, ...]:
    """What the user binds himself; nothing if what is chosen may decide what is made, and so what is used."""
    if any(isinstance(values, space_module.Choice) and not all(map(_is_number, values.texts))
           for values in space.values()):
        return ()
    own = [binding for binding in base if binding.file in ('', conf.conf_file) and binding.selector != 'gin.macro']
    searched = {_full_name_if_there_is_one(key) for key in space}
    names = [locations.line(binding).partition(' = ')[0] for binding in own if not binding.is_for_evaluation]
    return tuple(name for name in names if name not in searched)


def _full_name_if_there_is_one(key: str) -> str:
    try:
        return full_name(key)
    except (ValueError, KeyError, IndexError):  # reported where the space is checked
        return key


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _text(imports: Sequence[str], bindings: Iterable[locations.Binding]) -> str:
    return '\n'.join([*imports, *(locations.line(binding) for binding in bindings)]) + '\n'


def _without_macros_of(own: Iterable[locations.Binding], base: list[locations.Binding]) -> list[locations.Binding]:
    """``base`` without the macros that only ``Search`` uses."""
    def used_by(bindings: Iterable[locations.Binding]) -> set[str]:
        return {leaf.name for binding in bindings for leaf in iterate_nested(binding.value) if isinstance(leaf, Macro)}
    dropped = used_by(own) - used_by(base)
    return [binding for binding in base if binding.selector != 'gin.macro' or binding.scope not in dropped]


def _function(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, Reference) or value.evaluate:
        raise ConfError(f'Search.function must be a reference to a function, found {value!r}', 'write @name')
    return repr(value)


def _read_space(space: dict, location: str) -> dict[str, space_module.Values]:
    found, problems = {}, []
    for key, value in space.items():
        try:
            if not isinstance(key, str):
                raise ConfError(f'expected the name of a binding in quotes, found {key!r}')
            found[key] = space_module.parse(value)
        except ConfError as error:
            problems.append(Problem(location, f'Search.space[{key!r}]: {error.problems[0].message}',
                                    error.problems[0].hint))
    if problems:
        raise ConfError(problems)
    return found


def prepare(conf: gin_utils.Conf, folder: SearchFolder) -> SearchConf:
    """Read the loaded conf, check it, and record it in the folder of the search; gin is empty afterwards.

    Args:
        conf: what was loaded.
        folder: if it holds a search already, the conf has to be that of this search.

    Raises:
        ConfError: there are mistakes, or the search in the folder is another one.
    """
    try:
        search = read(conf)
    finally:
        gin_utils.clear()
    if os.path.abspath(conf.conf_file) == folder.conf_file:  # it does not tell what the user has included
        search = search._replace(must_be_used=())
    stored = read_text(folder.conf_file)
    if stored is not None and os.path.isfile(folder.study_file):  # a search that has begun
        check_same_search(stored, search, folder.root_dir)
    write_text(folder.base_file, search.base_text)
    for file in conf.modules if stored is None else ():  # runs find them beside the file
        write_text(os.path.join(os.path.dirname(folder.base_file), file.name), file.text)
    check(search, folder.base_file)
    write_text(folder.conf_file, search.text)
    return search


def check(conf: SearchConf, base_file: str) -> None:
    """Look up every binding of the space and try its extreme values, without building anything.

    Args:
        conf: what was read.
        base_file: path of a file that holds ``conf.base_text``.

    Raises:
        ConfError: there are mistakes; all are listed.
    """
    reader = Reader()
    reader.read_text(conf.base_text)
    base = [statement for statement in reader.statements if statement.kind != 'import']
    problems = [problem for key, values in conf.space.items() for problem in _problems_of(key, values, base, conf)]
    if not problems:
        problems = _problems_of_pairs(conf, base)
    if not problems and conf.function is None:
        problems = _problems_of_values(conf, base_file)
    if problems:
        raise ConfError(list(dict.fromkeys(problems)))


def _problems_of(key: str, values: space_module.Values, base: list[Statement], conf: SearchConf) -> list[Problem]:
    probes = [probe for text in values.probes() for probe in _read_probe(key, text)]
    if not probes:
        return [Problem(conf.location, f'Search.space: {key!r} is no binding', "write 'scope/Name.parameter', or the "
                        'name of a macro')]
    if probes[0].kind == 'macro':
        return _problems_of_macro(key, base, conf.location)
    refused = _refused(probes[0])
    if refused:
        return [Problem(conf.location, f'Search.space: {key} cannot be searched: {refused}')]
    problems = []
    for probe in probes:
        probe = probe._replace(location=conf.location)
        _, found = static_check.check([*base, probe], gin_utils.import_configurables())
        problems += [problem._replace(message=f'Search.space: {problem.message}') for problem in found
                     if problem.location == conf.location]
    return problems


def _read_probe(key: str, text: str) -> list[Statement]:
    reader = Reader()
    reader.read_text(f'{key} = {text}')
    one = len(reader.statements) == 1 and not reader.problems and reader.statements[0].text == key
    return reader.statements if one else []


def full_name(key: str) -> str:
    """A binding of the space as ``conf/operative.gin`` writes it; a macro is called by its name."""
    probe = _read_probe(key, '0')[0]
    if probe.kind == 'macro':
        return key
    scope = f'{probe.scope}/' if probe.scope else ''
    return f'{scope}{static_check.resolve(probe.selector).selector}.{probe.name}'


def unused(conf: SearchConf, root_dir: str) -> list[str]:
    """The bindings of the space that the run in a folder has not used."""
    text = read_text(os.path.join(root_dir, 'conf', 'operative.gin')) or ''
    left_over = {line.partition(' = ')[0] for line in text.partition('# Not used so far:')[2].splitlines()}
    return [key for key in conf.space if full_name(key) in left_over]


def _refused(probe: Statement) -> str:
    try:
        owner = static_check.resolve(probe.selector).wrapped
    except (ValueError, KeyError):  # reported with the nearest name where the names are checked
        return ''
    if owner is Search:
        return 'it belongs to the search itself'
    return _DECIDED_HERE.get(probe.name, '') if owner is TrainerConfig else ''


def _problems_of_macro(key: str, base: list[Statement], location: str) -> list[Problem]:
    used = {leaf.name for statement in base for leaf in iterate_nested(statement.value) if isinstance(leaf, Macro)}
    if key in used:
        return []
    return [Problem(location, f'Search.space: nothing in the conf uses a macro %{key}',
                    hint_nearest(key, sorted(used)) or "a binding is written 'Name.parameter'")]


def _problems_of_pairs(conf: SearchConf, base: list[Statement]) -> list[Problem]:
    """Two names of the same binding."""
    seen: dict[tuple[str, str, str], str] = {}
    problems = []
    for key, values in conf.space.items():
        probe = _read_probe(key, values.probes()[0])[0]
        if probe.kind == 'macro':
            continue
        same = (probe.scope, static_check.resolve(probe.selector).selector, probe.name)
        if same in seen:
            problems.append(Problem(conf.location, f'Search.space: {seen[same]} and {key} are the same binding'))
        seen[same] = key
    return problems


def _problems_of_values(conf: SearchConf, base_file: str) -> list[Problem]:
    """What ``TrainerConfig`` says of the conf as it is, and with each extreme value in turn."""
    try:
        with gin_utils.loaded(base_file):
            config = TrainerConfig(root_dir='unused')
    except ConfError as error:
        return list(error.problems)
    if conf.settings.measured_in == 'evaluation' and not config.evaluate:
        return [Problem('', 'Search.measured_in is \'evaluation\', but the conf does not evaluate',
                        'add TrainerConfig.evaluate = True and TrainerConfig.num_evals = 10, or measure in training')]
    problems = []
    for key, values in conf.space.items():
        for text in values.probes() if key.split('.')[-2:-1] == ['TrainerConfig'] else ():
            try:
                with gin_utils.loaded(base_file, [f'{key} = {text}']):
                    TrainerConfig(root_dir='unused')
            except ConfError as error:
                problems += [problem._replace(location=conf.location, message=f'Search.space: {problem.message}')
                             for problem in error.problems]
    return problems


def check_same_search(old_text: str, conf: SearchConf, root_dir: str) -> None:
    """Check that a search folder belongs to a conf.

    Args:
        old_text: the conf that the search was started with.
        conf: the conf to go on with; what :class:`Search` marks may differ.
        root_dir: the folder, for the message.

    Raises:
        ConfError: it belongs to another one; what differs is listed.
    """
    old, new = _bindings_of(old_text), _bindings_of(conf.text)
    free = {f'{_OWNER}.{name}' for name in may_change(Search)}
    problems = [f'{_MODULES.sub("", key)} is {new.get(key, "not set")}, but the search in {root_dir} has '
                f'{old.get(key, "not set")}' for key in dict.fromkeys([*old, *new])
                if old.get(key) != new.get(key) and key not in free]
    if problems:
        raise ConfError([Problem('', problem) for problem in problems[:-1]]
                        + [Problem('', problems[-1], 'use another root_dir, or leave --conf out to go on')])


def _bindings_of(text: str) -> dict[str, str]:
    reader = Reader()
    reader.read_text(text)
    return {statement.text: repr(statement.value) for statement in reader.statements}
