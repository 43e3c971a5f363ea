"""Search confs: confs with bindings of ``Search``. All other bindings are shared by the trials.

:func:`read` separates the two; :func:`check` tests every binding of the search space before any run starts.
"""
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from alfx import gin_utils
from alfx.config import TrainerConfig
from alfx.gin_utils import ConfError, Problem, hint_nearest, locations, static_check, stored_files, user_modules
from alfx.gin_utils.parsing import Macro, Reader, Reference, Statement, iterate_nested, substitute
from alfx.gin_utils.settings import may_change
from alfx.search import space as space_module
from alfx.search.search_folder import SearchFolder, read_text, write_text
from alfx.search.search_settings import Search

_OWNER = 'alfx.search.search_settings.Search'
_DECIDED_HERE = {'random_seed': 'each run gets its own seed; set Search.seed and Search.num_seeds instead',
                 'root_dir': 'each run gets its own folder', 'conf_file': 'each run gets its own conf'}
_MODULES = re.compile(r'(?:\w+\.)+(?=\w+\.\w+$)')


class SearchConf(NamedTuple):
    """Content of a search conf.

    Attributes:
        settings: settings of the hyperparameter search.
        space: values to try for each searched binding.
        function: ``@scopes/name`` of ``Search.function``; None to train.
        base_text: text of the conf shared by all trials.
        text: text of the whole conf, with includes and ``--conf_param`` resolved.
        location: location of ``Search.space`` for error messages.
        must_be_used: bindings of the user's conf and of the command line that each trial must use, so that an unused
            binding is found in the first run, not after the whole hyperparameter search.
    """
    settings: Search
    space: dict[str, space_module.Values]
    function: str | None
    base_text: str
    text: str
    location: str
    must_be_used: tuple[str, ...] = ()


def read(conf: gin_utils.Conf) -> SearchConf:
    """Separate the bindings of ``Search`` in the loaded conf from the conf shared by the trials.

    Args:
        conf: the loaded conf.

    Raises:
        ConfError: the bindings of ``Search`` have errors or are missing.
    """
    own = {binding.name: binding for binding in conf.bindings if binding.selector == _OWNER}
    if not own:
        raise ConfError(f'{os.path.basename(conf.conf_file)} is not a search conf: it has no binding of Search',
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
    """Return the bindings of the user's conf that every trial must use.

    The result is empty if the search space contains choices that are not numbers, because they may decide which
    bindings are used.
    """
    if any(isinstance(values, space_module.Choice) and not all(map(_is_number, values.texts))
           for values in space.values()):
        return ()
    own = [binding for binding in base if binding.file in ('', conf.conf_file) and binding.selector != 'gin.macro']
    searched = {_full_name_if_valid(key) for key in space}
    names = [locations.line(binding).partition(' = ')[0] for binding in own if not binding.is_for_evaluation]
    return tuple(name for name in names if name not in searched)


def _full_name_if_valid(key: str) -> str:
    try:
        return full_name(key)
    except (ValueError, KeyError, IndexError):  # reported when the space is checked
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
    """Return ``base`` without the macros that only ``Search`` uses."""
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
    """Read and check the loaded conf, and write it to the search folder. The gin configuration is cleared.

    Args:
        conf: the loaded conf.
        folder: search folder; if it already contains a hyperparameter search, the conf must belong to it.

    Raises:
        ConfError: the conf has errors, or the folder contains a different hyperparameter search.
    """
    try:
        search = read(conf)
    finally:
        gin_utils.clear()
    if os.path.abspath(conf.conf_file) == folder.conf_file:  # its includes are already resolved
        search = search._replace(must_be_used=())
    stored = read_text(folder.conf_file)
    is_started = os.path.isfile(folder.study_file)
    if stored is not None and is_started:
        check_same_search(stored, search, folder.root_dir)
        changed = user_modules.changed_since(os.path.dirname(folder.base_file), conf.modules)
        if changed:
            raise ConfError(f'{", ".join(changed)}: changed since the hyperparameter search in {folder.root_dir} began',
                            'restore the file, use another --root_dir, or omit --conf to resume with the old version')
    write_text(folder.base_file, search.base_text)
    for file in () if is_started else conf.modules:
        for conf_file in (folder.base_file, folder.path('best.gin')):  # which import them from their folders
            path = os.path.join(os.path.dirname(conf_file), file.name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            stored_files.write(path, file.content)
    check(search, folder.base_file)
    write_text(folder.conf_file, search.text)
    return search


def check(conf: SearchConf, base_file: str) -> None:
    """Check every binding of the search space with its extreme values, without building anything.

    Args:
        conf: the search conf.
        base_file: path of a file with the text ``conf.base_text``.

    Raises:
        ConfError: the conf has errors; all are listed.
    """
    reader = Reader()
    reader.read_text(conf.base_text)
    base = [statement for statement in reader.statements if statement.kind != 'import']
    problems = [problem for key, values in conf.space.items() for problem in _problems_of(key, values, base, conf)]
    if not problems:
        problems = _problems_of_pairs(conf)
    if not problems and conf.function is None:
        problems = _problems_of_values(conf, base_file)
    if problems:
        raise ConfError(list(dict.fromkeys(problems)))


def _problems_of(key: str, values: space_module.Values, base: list[Statement], conf: SearchConf) -> list[Problem]:
    probes = [probe for text in values.probes() for probe in _read_probe(key, text)]
    if not probes:
        return [Problem(conf.location, f'Search.space: {key!r} is not the name of a binding', "write "
                        "'scope/Name.parameter', or the name of a macro")]
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
    names = [statement.text.replace('suite_gym.load', 'load') for statement in reader.statements]
    one = names == [key.replace('suite_gym.load', 'load')] and not reader.problems
    return reader.statements if one else []


def full_name(key: str) -> str:
    """Return the full name of a binding of the space, as in ``conf/operative.gin``, or the name of a macro."""
    probe = _read_probe(key, '0')[0]
    if probe.kind == 'macro':
        return key
    scope = f'{probe.scope}/' if probe.scope else ''
    return f'{scope}{static_check.resolve(probe.selector).selector}.{probe.name}'


def unused(conf: SearchConf, root_dir: str) -> list[str]:
    """Return the bindings of the space that the run in a folder has not used."""
    text = read_text(os.path.join(root_dir, 'conf', 'operative.gin')) or ''
    left_over = {line.partition(' = ')[0] for line in text.partition('# Not used so far:')[2].splitlines()}
    return [key for key in conf.space if full_name(key) in left_over]


def _refused(probe: Statement) -> str:
    owner = getattr(static_check.find(probe.selector), 'wrapped', None)  # unknown names are reported elsewhere
    if owner is Search:
        return 'it is a setting of the hyperparameter search'
    return _DECIDED_HERE.get(probe.name, '') if owner is TrainerConfig else ''


def _problems_of_macro(key: str, base: list[Statement], location: str) -> list[Problem]:
    used = {leaf.name for statement in base for leaf in iterate_nested(statement.value) if isinstance(leaf, Macro)}
    if key in used:
        return []
    return [Problem(location, f'Search.space: the conf does not use the macro %{key}',
                    hint_nearest(key, sorted(used)) or "write a binding as 'Name.parameter'")]


def _problems_of_pairs(conf: SearchConf) -> list[Problem]:
    """Return problems with bindings that the space contains twice, under different names."""
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
    """Return the problems that ``TrainerConfig`` finds in the base conf, and with each extreme value in turn."""
    try:
        with gin_utils.loaded(base_file):
            config = TrainerConfig(root_dir='unused')
    except ConfError as error:
        return list(error.problems)
    if conf.settings.measured_in == 'evaluation' and not config.evaluate:
        return [Problem('', "Search.measured_in is 'evaluation', but the conf does not evaluate",
                        "add TrainerConfig.evaluate = True and TrainerConfig.num_evals = 10, or set "
                        "Search.measured_in = 'training'")]
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
        old_text: text of the conf that the hyperparameter search was started with.
        conf: conf to resume with; settings that :class:`Search` marks as changeable may differ.
        root_dir: search folder, for the message.

    Raises:
        ConfError: the folder belongs to a different conf; all differences are listed.
    """
    old, new = _bindings_of(old_text), _bindings_of(conf.text)
    free = {f'{_OWNER}.{name}' for name in may_change(Search)}
    problems = [f'{_MODULES.sub("", key)} is {new.get(key, "not set")}, but the hyperparameter search in {root_dir} '
                f'has {old.get(key, "not set")}' for key in dict.fromkeys([*old, *new])
                if old.get(key) != new.get(key) and key not in free]
    if problems:
        raise ConfError([Problem('', problem) for problem in problems[:-1]]
                        + [Problem('', problems[-1], 'use another --root_dir, or omit --conf to resume the '
                                   'hyperparameter search')])


def _bindings_of(text: str) -> dict[str, str]:
    reader = Reader()
    reader.read_text(text)
    return {statement.text: repr(statement.value) for statement in reader.statements}
