"""Print a script for bash, zsh or fish that completes commands, flags, confs, classes, bindings and agents.

Examples:

  eval "$(alfx completion bash)"
  eval "$(alfx completion zsh)"
  alfx completion fish > ~/.config/fish/completions/alfx.fish

Add the line for bash or zsh to ~/.bashrc or ~/.zshrc. The script also completes the values of flags, the names for
alfx help, and bindings such as TrainerConfig.num_env_steps, as arguments and after --conf_param.
"""
import argparse
import glob
import importlib
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from alfx.bin import command, flags, help
from alfx.bin.list import CONFS
from alfx.runs import zoo

PARSER = flags.Parser(__file__, __doc__, ('bash|zsh|fish', 'the shell'))
PARSER.add('complete', 'used by the scripts: print the completions of the last of the words after --')
_SCRIPTS = {
    'bash': r'''_alfx() { local IFS=$'\n'
  COMPREPLY=($(alfx completion --complete -- "${COMP_WORDS[@]:1:$COMP_CWORD}" 2>/dev/null))
  if [[ ${COMPREPLY[0]} == *[./=] ]]; then compopt -o nospace; fi; }
complete -o default -F _alfx alfx
''',
    'zsh': r'''_alfx() { local -a found=(${(f)"$(alfx completion --complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)"})
  compadd -S '' -- ${(M)found:#*[.\/=]}; compadd -- ${found:#*[.\/=]}; (( $#found )) || _files; }
compdef _alfx alfx
''',
    'fish': '''\
complete -c alfx -a '(alfx completion --complete -- (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
'''}


def completions(words: Sequence[str]) -> list[str]:
    """Return the completions of the last of ``words``, which follow the command ``alfx``."""
    *before, word = words or ['']
    kept = ''
    if len(words) > 2 and ':' in words[-2:]:  # bash splits words at colons, and keeps the part before the last one
        *before, kept = before[:-1] if word != ':' else before
        kept, word = f'{kept}:', f'{kept}:{word.removeprefix(":")}'
    if not before:
        found = [*command.programs(), '--help', '--version']
    elif before[0] not in command.programs():
        return []
    else:
        parser = importlib.import_module(f'alfx.bin.{before[0]}').PARSER
        shown = {f'--{action.dest}': action for action in parser._actions if action.help != argparse.SUPPRESS}
        if before[-1] == '=' or word == '=':  # bash splits off '=' as a word
            before, word = [*before, ''][:-2 if before[-1] == '=' else -1], word.removeprefix('=')
        flag, equals, value = word.partition('=') if word.startswith('-') else ('', '', word)
        name = '--' + (flag or before[-1]).lstrip('-').replace('-', '_')
        if flag and not equals:
            return [text for text in shown if text.startswith(name) and text != '--arguments']
        action = shown.get(name)
        if action is None or action.type is flags.boolean or action.nargs is not None:
            action = shown.get('--arguments')
        found = [f'{flag}{equals}{text}' for text in _values(action.metavar if action else '', value)]
    return sorted({text.removeprefix(kept) for text in found if text.startswith(word)})


def _values(kinds: str, word: str) -> Iterator[str]:
    """Yield values of the kinds that a flag or argument shows to the user: ``CONF``, ``KEY=VALUE``, ``a|b``, ..."""
    for kind in kinds.replace(' | ', ' ').replace('[', '').replace(']', '').split():
        if kind in ('CONF', 'SEARCH'):
            folder = CONFS if kind == 'CONF' else os.path.join(os.path.dirname(CONFS), 'searches')
            yield from (os.path.basename(path).removesuffix('.gin') for path in glob.glob(f'{folder}/*.gin'))
        elif kind == 'CLASS':
            yield from [*command.programs(), *_names(help.entries())]
        elif kind == 'AGENT' and word:
            yield from (f'{zoo.PREFIX}{name}' for name in zoo.names())
        elif kind == 'KEY=VALUE' and word:
            yield from _bindings(word)
        elif '|' in kind:
            yield from kind.split('|')
    if kinds != 'CLASS' and (' ' in kinds or '|' not in kinds):
        yield from (f'{path}/' if os.path.isdir(path) else path for path in glob.glob(f'{glob.escape(word)}*'))


def _names(known: Sequence[help.Entry]) -> list[str]:
    """Return the shortest unambiguous names of classes and functions."""
    count = Counter(entry.selector.rsplit('.', 1)[-1] for entry in known)
    return ['.'.join(parts[-1 if count[parts[-1]] == 1 else -2:]) for parts in (x.selector.split('.') for x in known)]


def _bindings(word: str) -> Iterator[str]:
    """Yield names of classes followed by a dot, or the parameters of the class that ``word`` names."""
    scope, slash, name = word.rpartition('/')
    known = help.entries()
    yield from (f'{scope}{slash}{text}.' for text in _names(known))
    owner = name.rpartition('.')[0]
    found = help.matching(owner, known) if owner else []
    described = help.described(found[0]) if len(found) == 1 else None
    yield from (f'{scope}{slash}{owner}.{text}=' for text in (described.parameters if described else ()))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the script or the completions, and return the exit code."""
    args = PARSER.read(sys.argv[1:] if arguments is None else arguments)
    if args.complete:
        print('\n'.join(completions(args.arguments)))
    elif len(args.arguments) != 1 or args.arguments[0] not in _SCRIPTS:
        PARSER.error(f'expected one of {", ".join(_SCRIPTS)}')
    else:
        sys.stdout.write(_SCRIPTS[args.arguments[0]])
    return 0


if __name__ == '__main__':
    flags.run(lambda _: main(), PARSER, argument='*')
