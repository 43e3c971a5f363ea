"""``python -m alfx``: the command ``alfx``, see :mod:`alfx.bin.command`."""
import sys

from alfx.bin.command import main

if __name__ == '__main__':
    sys.exit(main())
