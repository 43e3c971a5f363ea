"""Experience replay; their classes can be imported from here, and live in the modules below."""
import sys

from alfx.utils import lazy_exports

__getattr__ = lazy_exports.from_modules(sys.modules[__name__])
