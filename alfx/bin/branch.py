"""Former name of :mod:`alfx.bin.fork`, for ``python -m alfx.bin.branch``."""
import runpy

if __name__ == '__main__':
    runpy.run_module('alfx.bin.fork', run_name='__main__', alter_sys=True)
