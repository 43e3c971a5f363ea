"""Importing alfx loads only what every run needs."""
import subprocess
import sys


def test_importing_alfx_loads_no_library_that_a_run_may_not_need():
    heavy = ('gymnasium', 'tensorboard', 'matplotlib', 'imageio', 'pygame', 'mujoco', 'ale_py')
    statements = f'import sys, alfx; print(*[name for name in {heavy} if name in sys.modules])'
    done = subprocess.run([sys.executable, '-c', statements], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
