"""Install commands for missing optional packages."""
import importlib.metadata
import re
import shlex


def pip_install(extra: str) -> str:
    """Return the command that installs the packages of an extra of alfx, in the supported versions.

    It lists the packages, because alfx itself is not on a package index.
    """
    try:
        required = importlib.metadata.requires('alfx') or []
    except importlib.metadata.PackageNotFoundError:  # alfx is run from its sources
        required = []
    found = [line.partition(';')[0].strip() for line in required
             if re.search(rf'''extra == ["']{re.escape(extra)}["']''', line)]
    return f"pip install {shlex.join(found) if found else f'-e .[{extra}]'}"
