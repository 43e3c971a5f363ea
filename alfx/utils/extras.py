"""What to type for packages that are missing."""
import importlib.metadata
import re
import shlex


def pip_install(extra: str) -> str:
    """The command that installs what an extra of alfx names, in the versions that it may have.

    It names the packages, as no package index has alfx itself.
    """
    try:
        required = importlib.metadata.requires('alfx') or []
    except importlib.metadata.PackageNotFoundError:  # alfx is run from its sources
        required = []
    found = [line.partition(';')[0].strip() for line in required
             if re.search(rf'''extra == ["']{re.escape(extra)}["']''', line)]
    return f"pip install {shlex.join(found) if found else f'-e .[{extra}]'}"
