"""Searches in the process of the test, over functions or over runs simulated by a generator."""
import csv
import os

from alfx import gin_utils
from alfx.search import search_conf
from alfx.search.search_folder import SearchFolder
from alfx.search.searching import Searching
from alfx.search.study import Study

BOWL = """
import search_functions
Search.function = @bowl
Search.executor = 'inline'
Search.space = {'bowl.x': 'uniform(-10, 10)', 'bowl.y': 'log_uniform(1e-6, 1)'}
"""
# a training run is simulated by a generator; nothing is trained
TRAINING = """
TrainerConfig.algorithm_ctor = @Agent
TrainerConfig.evaluate = True
Search.space = {'TrainerConfig.unroll_length': [1, 2, 3, 4, 5, 6]}
"""


def prepared(tmp_path, text, params=()):
    """Return the search conf of a text, checked and stored in the folder of the search."""
    path = tmp_path / 'search.gin'
    path.write_text(text)
    return search_conf.prepare(gin_utils.load(str(path), params), SearchFolder(str(tmp_path / 'search')))


def search(tmp_path, text, params=(), play=None):
    """Run a search to its end and return it with its log lines."""
    lines = []
    conf = prepared(tmp_path, text, params)
    make_executor = None if play is None else lambda settings: SimulatedExecutor(play)
    searching = Searching(conf, str(tmp_path / 'search'), lines.append, make_executor)
    searching.run()
    return searching, lines


def trials(tmp_path, text=BOWL):
    """Return the trials of a search folder, by number."""
    conf = prepared(tmp_path, text)
    return Study(SearchFolder(str(tmp_path / 'search')).study_file, conf.settings, conf.space).trials()


def rows(tmp_path, name='results.csv'):
    """Return the table of results."""
    with open(tmp_path / 'search' / name, newline='') as file:
        return list(csv.DictReader(file))


class SimulatedExecutor:
    """Executor of runs simulated by a generator that yields evaluation returns and returns an exit code.

    It is called with the run; each poll takes one step of it. None instead of a return lets a poll pass.
    """

    def __init__(self, play):
        self._play = play

    def start(self, run, wants_to_stop):
        return PlayedExecution(run, self._play(run))

    def close(self):
        pass


class PlayedExecution:

    def __init__(self, run, steps):
        self._run, self._steps = run, steps
        self._code = None
        self.is_stopped = self.is_queued = False

    def poll(self):
        if self._code is None and self.is_stopped:
            self._code = 128 + 15
        if self._code is None:
            try:
                value = next(self._steps)
            except StopIteration as end:
                self._code = end.value or 0
            else:
                if value is not None:
                    self._write(value)
        return self._code

    def _write(self, value):
        path = os.path.join(self._run.root_dir, 'eval', 'progress.csv')
        os.makedirs(os.path.dirname(path), exist_ok=True)
        is_new = not os.path.exists(path)
        with open(path, 'a') as file:
            file.write('global_counter,average_return\n' if is_new else '')
            file.write(f'{sum(1 for _ in open(path))},{value}\n')

    def stop(self):
        self.is_stopped = True

    kill = stop

    def log_tail(self):
        return 'ValueError: played to fail'


def parameter(run, name='TrainerConfig.unroll_length'):
    """Return the value of a binding of a run."""
    return next(float(param.split(' = ')[1]) for param in run.params if param.startswith(f'{name} ='))
