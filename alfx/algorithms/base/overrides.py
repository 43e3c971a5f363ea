"""Detection of overridden methods, so that faster equivalents do not bypass them."""


def is_overridden(cls: type, name: str) -> bool:
    """Return whether a class outside of alfx defines the attribute ``name`` of ``cls``."""
    modules = (base.__module__ for base in cls.__mro__ if name in vars(base))
    return not next(modules, 'alfx.').startswith('alfx.')
