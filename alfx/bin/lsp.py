"""Start a language server, which shows errors and help while you write a conf in an editor.

Example:

  alfx lsp

Editors start this command and talk to it over the standard streams; docs/editor.md has the settings of several editors.
Without --import_modules no code of your own modules is executed, and names that such a module may define are not
reported.
"""
import argparse
import sys
from collections.abc import Sequence

from alfx.utils.extras import pip_install


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server until the editor ends it, and return the exit code."""
    parser = argparse.ArgumentParser(prog='alfx lsp', description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--import_modules', '--import-modules', action='store_true',
                        help='import the modules that confs import, so that the names in them are known')
    parser.add_argument('--stdio', action='store_true', help='ignored; some editors add it')
    args = parser.parse_args(arguments)
    try:
        from alfx.language_server import server
    except ModuleNotFoundError as error:
        print(f'ConfError: the language server needs pygls, which cannot be imported: {error}\n  {pip_install("lsp")}',
              file=sys.stderr)
        return 2
    server.serve(args.import_modules)
    return 0


if __name__ == '__main__':
    sys.exit(main())
