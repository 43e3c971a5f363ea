"""A report on runs: :mod:`collecting` reads the run folders, :mod:`page` writes the page, :mod:`figure` its curves."""
