"""Start a language server, which shows errors and help while you write a conf in an editor.

Example:

  alfx lsp

Editors start this command and talk to it over the standard streams; docs/editor.md has the settings of several editors.
Without --import_modules no code of your own modules is executed, and names that such a module may define are not
reported.
"""
from alfx.bin import flags
from alfx.bin.flags import FLAGS

PARSER = flags.Parser(__file__, __doc__)
PARSER.add('import_modules', 'import the modules that confs import, so that the names in them are known')
PARSER.add('stdio', 'ignored; some editors add it')


def main() -> int:
    """Run the server until the editor ends it, and return the exit code."""
    import alfx
    from alfx.utils.extras import pip_install
    try:
        from alfx.language_server import server
    except ModuleNotFoundError as error:
        raise alfx.gin_utils.ConfError(f'the language server needs pygls, which cannot be imported: {error}',
                                       pip_install('lsp')) from error
    server.serve(FLAGS.import_modules)
    return 0


if __name__ == '__main__':
    flags.run(main, PARSER)
