"""Command line programs. ``python -m alfx.bin.<name> --help`` shows the options and examples."""
