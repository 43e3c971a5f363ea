"""Trust in the loaded conf: an untrusted conf cannot make this program import modules.

A conf can run code through the names in it: ``import my_module``, an environment ``'my_module:Id-v0'``. A conf loaded
as untrusted may do neither, and everything else that reaches beyond alfx and gymnasium asks this module first.
"""
from alfx.gin_utils.conf_error import ConfError

_HINT = 'if you trust this conf, remove --untrusted'
_trusted = True


def set_trusted(flag: bool) -> None:
    """Set whether the loaded conf is trusted; called by ``clear`` and ``load``."""
    global _trusted
    _trusted = flag


def is_trusted() -> bool:
    """Return whether the loaded conf is trusted, which is the default."""
    return _trusted


def may_import(module: str) -> bool:
    """Return whether the loaded conf may import ``module``."""
    return _trusted or module.split('.')[0] == 'alfx'


def require_trust(what: str) -> None:
    """Raise an error if the loaded conf is untrusted.

    Args:
        what: noun and name of the requested object, for the message.

    Raises:
        ConfError: the conf is untrusted.
    """
    if not _trusted:
        raise ConfError(f'{what} is not part of alfx or gymnasium and is not allowed with --untrusted', _HINT)
