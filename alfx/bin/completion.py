"""Print a script for bash or zsh that completes commands, options and conf names.

Examples:

  eval "$(alfx completion bash)"
  eval "$(alfx completion zsh)"

Add the line for your shell to ~/.bashrc or ~/.zshrc.
"""
import argparse
import re
import sys
from collections.abc import Sequence

from alfx.bin import command
from alfx.bin.list import CONFS

_SCRIPT = '''\
_alfx() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} options confs
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{commands} --help --version" -- "$word"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{options}
  esac
  case "$word" in
    -*) COMPREPLY=($(compgen -W "$options --help" -- "$word")) ;;
    *)
      case "${{COMP_WORDS[1]}}" in
        train|check|show) confs=$(cd {confs} && echo *.gin) ;;
        help) confs="{commands}" ;;
      esac
      COMPREPLY=($(compgen -W "${{confs//.gin/}}" -- "$word") $(compgen -f -- "$word")) ;;
  esac
}}
complete -o filenames -F _alfx alfx
'''


def options_of(program: str) -> list[str]:
    """Return the options of a program, read from its source code and from the functions that define shared options."""
    shared = {}
    for module in ('flags', 'policy_flags', 'ranks'):
        for name, body in re.findall(r'^def (define_\w+)\(.*?\n(.*?)(?=^\S|\Z)', command.source(module),
                                     re.MULTILINE | re.DOTALL):
            shared[f'{module}.{name}'] = body
    return sorted(set(_options_in(command.source(program), shared)))


def _options_in(text: str, shared: dict[str, str]) -> list[str]:
    found = re.findall(r"(?:DEFINE_\w+\(|_define\()'(\w+)'", text)
    found += [name.removeprefix('--') for name in re.findall(r"add_argument\('(--[\w-]+)'", text)]
    for called, arguments in re.findall(r'(\w+\.define_\w+)\(([^)]*)\)', text):
        if called in shared:
            options = _options_in(shared[called], shared)
            found += [name for name in options if name != 'root_dir' or arguments != 'root_dir=False']
    return [name for name in found if name not in ('gin_file', 'gin_param')]


def script(shell: str) -> str:
    """Return the completion script for a shell, ``bash`` or ``zsh``."""
    names = command.programs()
    lines = [f"    {name}) options=\"{' '.join(f'--{option}' for option in options_of(name))}\" ;;" for name in names]
    text = _SCRIPT.format(commands=' '.join(names), options='\n'.join(lines), confs=f"'{CONFS}'")
    return text if shell == 'bash' else f'autoload -U +X bashcompinit && bashcompinit\n{text}'


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the script and return the exit code."""
    assert __doc__
    parser = argparse.ArgumentParser(prog='alfx completion', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('shell', choices=('bash', 'zsh'))
    sys.stdout.write(script(parser.parse_args(arguments).shell))
    return 0


if __name__ == '__main__':
    command.prepare_streams()
    sys.exit(main())
