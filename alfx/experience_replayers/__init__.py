"""Experience replay. The classes of the modules below can be imported from this package."""
import sys

from alfx.utils import lazy_exports

__getattr__ = lazy_exports.from_modules(sys.modules[__name__])
