"""Entry point of ``python -m alfx``, which runs the command ``alfx`` (:mod:`alfx.bin.command`)."""
import sys

from alfx.bin.command import main

if __name__ == '__main__':
    sys.exit(main())
