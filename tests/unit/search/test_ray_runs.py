"""Trials on a Ray cluster, with and without a shared folder."""
import os
import signal
import time
import types

import pytest
from search_tools import BOWL, rows, search

from alfx.search import ray_runs
from alfx.search.ray_runs import RemoteRun, pack, unpack
from alfx.search.run_process import Run
from alfx.search.search_settings import Search
from alfx.trainers.acting import ray_cluster

pytestmark = pytest.mark.processes


def run_folder(root_dir, files):
    for name, text in files.items():
        path = os.path.join(root_dir, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'w') as file:
            file.write(text)
    return root_dir


def files_of(root_dir):
    return {os.path.relpath(os.path.join(folder, name), root_dir): open(os.path.join(folder, name)).read()
            for folder, _, names in os.walk(root_dir) for name in names}


FILES = {'progress.csv': 'a\n1\n', 'eval/progress.csv': 'b\n2\n', 'train/algorithm/ckpt-1': 'weights'}


def test_files_packed_on_one_machine_are_unpacked_on_another(tmp_path):
    source, target = str(tmp_path / 'source' / 'seed_0'), str(tmp_path / 'target' / 'seed_0')
    run_folder(source, FILES)
    (tmp_path / 'source' / 'seed_0.log').write_text('output')
    unpack(pack(source), target)
    assert files_of(target) == FILES and (tmp_path / 'target' / 'seed_0.log').read_text() == 'output'
    run_folder(source, {'progress.csv': 'a\n1\n2\n', 'train/algorithm/ckpt-1': 'other'})
    unpack(pack(source, ('progress.csv', )), target)
    assert files_of(target) == {**FILES, 'progress.csv': 'a\n1\n2\n'}


def test_a_file_outside_of_the_run_folder_is_rejected(tmp_path):
    run_folder(str(tmp_path / 'a' / 'seed_1'), FILES)
    with pytest.raises(ValueError, match='is not a file of the run folder seed_0'):
        unpack(pack(str(tmp_path / 'a' / 'seed_1')), str(tmp_path / 'b' / 'seed_0'))


class PlayedExecution:
    """A process that has ended once `code` is set."""

    def __init__(self, run):
        self.run, self.code = run, None
        self.is_stopped = False

    def poll(self):
        return self.code

    def stop(self):
        self.is_stopped = True

    def log_tail(self):
        return 'the end'


def remote_run(tmp_path, token):
    """A run on a machine with or without access to the folder of the search."""
    root_dir = run_folder(str(tmp_path / 'search' / 'seed_0'), FILES)
    (tmp_path / 'token').write_text('same')
    run = Run(0, 0, root_dir, str(tmp_path / 'base.gin'), ('a.b = 1', ), 7)
    return RemoteRun(run._asdict(), 'a.b = 2\n', str(tmp_path / 'token'), token, pack(root_dir), PlayedExecution)


def test_a_machine_with_access_to_the_search_folder_uses_it_directly(tmp_path):
    remote = remote_run(tmp_path, 'same')
    assert remote._execution.run.root_dir == str(tmp_path / 'search' / 'seed_0')
    remote._execution.code = 0
    assert remote.poll() == (0, 'the end', b'')


def test_another_machine_works_in_its_own_folder_and_sends_new_files(tmp_path, monkeypatch):
    remote = remote_run(tmp_path, 'another')
    run = remote._execution.run
    assert run.root_dir != str(tmp_path / 'search' / 'seed_0') and files_of(run.root_dir) == FILES
    with open(run.base_file) as file:
        assert file.read() == 'a.b = 2\n'
    assert remote.poll() == (None, '', b'')
    run_folder(run.root_dir, {'eval/progress.csv': 'b\n2\n3\n', 'train/algorithm/ckpt-2': 'more'})
    target = str(tmp_path / 'target' / 'seed_0')
    code, _, archive = remote.poll()
    unpack(archive, target)
    assert code is None and files_of(target) == {'progress.csv': 'a\n1\n', 'eval/progress.csv': 'b\n2\n3\n'}
    assert remote.poll()[2] == b''
    monkeypatch.setattr(ray_runs, '_COPY_SECONDS', 0.0)
    unpack(remote.poll()[2], target)
    assert files_of(target)['train/algorithm/ckpt-2'] == 'more'
    remote.stop()
    remote._execution.code = 143
    run_folder(run.root_dir, {'train/algorithm/ckpt-3': 'last'})
    code, log_tail, archive = remote.poll()
    unpack(archive, target)
    assert (code, log_tail) == (143, 'the end') and files_of(target)['train/algorithm/ckpt-3'] == 'last'
    assert not os.path.exists(os.path.dirname(run.root_dir)), 'nothing is left on the other machine'


def descends_from_this_test(pid):
    while pid not in (0, 1, os.getpid()):
        with open(f'/proc/{pid}/stat') as file:
            pid = int(file.read().rpartition(')')[2].split()[1])
    return pid == os.getpid()


def has_ended(pid):
    try:
        with open(f'/proc/{pid}/stat') as file:
            return file.read().rpartition(')')[2].split()[0] in 'ZX'
    except FileNotFoundError:
        return True


def test_an_existing_cluster_is_not_used(monkeypatch):
    addresses = []
    monkeypatch.delenv('RAY_ADDRESS', raising=False)
    ray = types.SimpleNamespace(is_initialized=lambda: False, init=lambda address, **options: addresses.append(address),
                                cluster_resources=dict, shutdown=lambda: None,
                                remote=lambda **options: lambda actor: actor)
    monkeypatch.setattr(ray_cluster, 'import_ray', lambda wanted_by: ray)
    for address in (None, 'auto'):
        ray_runs.RayExecutor(Search(space={'x': [1]}, executor='ray', ray_address=address))
    assert addresses == ['local', 'auto']


@pytest.mark.slow
def test_ray_runs_trials_concurrently_and_replaces_lost_workers(tmp_path, monkeypatch):
    ray = pytest.importorskip('ray')
    folder = os.path.dirname(os.path.abspath(__file__))
    monkeypatch.delenv('RAY_ADDRESS', raising=False)
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join([folder, os.environ.get('PYTHONPATH', '')]))
    text = BOWL.replace("'inline'", "'ray'") + 'Search.num_trials = 3\nSearch.num_parallel = 3\n'
    text += f"bowl.journal = '{tmp_path}/journal'\nSearch.cpus_per_run = 0.25\nbowl.gate = '{tmp_path}/gate'\n"
    killed = []

    def kill_one(self):
        """SIGKILL to one of the workers when all runs have begun."""
        journal = tmp_path / 'journal'
        if not killed and journal.exists() and journal.read_text().count('begin') == 3:
            killed.append(ray.get(self._pid))
            assert descends_from_this_test(killed[0]), 'nothing else may be killed'
            runs = [int(line.split()[-1]) for line in journal.read_text().splitlines()]
            os.kill(killed[0], signal.SIGKILL)
            while not any(has_ended(run) for run in runs):
                time.sleep(0.02)
            (tmp_path / 'gate').touch()
        return poll(self)
    poll, start = ray_runs.RayExecution.poll, ray_runs.RayExecution.__init__

    def with_pid(self, executor, actor, run):
        assert executor.connection.is_own_cluster
        start(self, executor, actor, run)
        self._pid = actor.pid.remote()
    monkeypatch.setattr(RemoteRun, 'pid', lambda self: os.getpid(), raising=False)
    monkeypatch.setattr(ray_runs.RayExecution, '__init__', with_pid)
    monkeypatch.setattr(ray_runs.RayExecution, 'poll', kill_one)
    search(tmp_path, text)
    assert killed
    found = rows(tmp_path)
    assert [row['state'] for row in found] == ['complete'] * 3
    started = [line.split()[1] for line in (tmp_path / 'journal').read_text().splitlines() if line.startswith('begin')]
    assert len(started) == 4 and len(set(started)) == 3, 'the run whose worker was lost was started again'
    assert not ray.is_initialized()
