"""Experience replay; their classes can be imported from here, and live in the modules below."""
import sys

from alfx import handing_on

__getattr__ = handing_on.from_modules(sys.modules[__name__])
