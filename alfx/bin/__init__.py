"""Programs: flags in, one call out. ``python -m alfx.bin.<name> --help`` shows an example of each."""
