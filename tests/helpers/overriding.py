"""Subclasses that override methods and record their calls."""


def counting(base, *names, mixin=False):
    """Return a subclass that overrides methods, directly or in a mixin, and the list of their calls.

    The overriding methods call the inherited ones.
    """
    calls = []

    def override(name):
        def method(self, *args, **kwargs):
            calls.append(name)
            return getattr(super(owner, self), name)(*args, **kwargs)
        return method

    methods = {name: override(name) for name in names}
    owner = type('Overriding', (object, ) if mixin else (base, ), methods)
    return type('Combined', (owner, base), {}) if mixin else owner, calls
