"""Whether the conf that is loaded may make this program import modules: that of a stranger may not.

What a conf names is code: ``import my_module``, an environment ``'my_module:Id-v0'``. In a conf that is loaded as
untrusted both are refused, and whatever else would reach beyond alfx and gymnasium asks here first.
"""
from alfx.gin_utils.conf_error import ConfError

__all__ = ['is_trusted', 'may_import', 'require_trust', 'set_trusted']

_HINT = 'if you know where it comes from, leave out --untrusted'
_trusted = True


def set_trusted(flag: bool) -> None:
    """Say whether the loaded conf is trusted; ``clear`` and ``load`` do."""
    global _trusted
    _trusted = flag


def is_trusted() -> bool:
    """Whether the loaded conf is trusted. It is unless it was loaded otherwise."""
    return _trusted


def may_import(module: str) -> bool:
    """Whether the loaded conf may have ``module`` imported."""
    return _trusted or module.split('.')[0] == 'alfx'


def require_trust(what: str) -> None:
    """Refuse something that the loaded conf asks for, unless the conf is trusted.

    Args:
        what: a noun with the name of the thing, for the message.

    Raises:
        ConfError: it is not.
    """
    if not _trusted:
        raise ConfError(f'{what} is not part of alfx or gymnasium and is not used with --untrusted', _HINT)
