"""Random damage to the files of a small run and a small dataset, and all functions that read them."""
import contextlib
import glob
import hashlib
import io
import json
import os
import random
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator

import numpy as np
import torch

from alfx import context, gin_utils
from alfx.checkpoints import files
from alfx.config import TrainerConfig
from alfx.offline import dataset_checks, dataset_folder, dataset_sources, dataset_statistics
from alfx.offline.dataset_episodes import Episodes
from alfx.reports import collecting, comparing, page
from alfx.runs import building, forking, playing, run_files
from alfx.trainers.policy_trainer import RLTrainer
from alfx.utils import random_state

PARAMS = (
    'TrainerConfig.num_env_steps = 0', 'TrainerConfig.num_iterations = 3', 'TrainerConfig.unroll_length = 8',
    'TrainerConfig.initial_collect_steps = 16', 'TrainerConfig.num_updates_per_train_iter = 1',
    'TrainerConfig.mini_batch_size = 4', 'TrainerConfig.replay_buffer_length = 100', 'QNetwork.fc_layer_params = (4,)',
    'TrainerConfig.num_checkpoints = 3', 'TrainerConfig.summary_interval = 1', 'TrainerConfig.random_seed = 1',
    'TrainerConfig.num_threads = 1', 'TrainerConfig.evaluate = True', 'TrainerConfig.num_evals = 1',
    'TrainerConfig.num_eval_episodes = 1', 'TrainerConfig.num_eval_environments = 1',
    'TrainerConfig.async_eval = False', 'create_environment.num_parallel_environments = 1')
STRANGE = ('null', 'true', '-1', '0', '1e999', 'NaN', '3.5', '99999999999999999999', '1' + '0' * 400, '"x"', '""',
           '[]', '{}', '[[[]]]', '"\\ud800"', '1_000', '0x10', '\x00', 'é', '"', "'", '\\', '[' * 2000, '2000000000')
VALUES = (None, True, -1, 0, 2**70, float('nan'), float('inf'), 3.5, 'x', '', [], {}, (), [[]], torch.zeros(0),
          torch.zeros(3, 3), torch.zeros(()), torch.tensor([float('nan')]), torch.zeros(1).expand(10**10),
          torch.full((4, ), 2**40), 2000000000, {'x': 1}, torch.zeros(2, dtype=torch.complex64))


def make(folder: str) -> tuple[str, str]:
    """Create a run that has ended and a dataset, and return their paths."""
    run, data = os.path.join(folder, 'run'), os.path.join(folder, 'data')
    train('dqn_cart_pole', PARAMS, run)
    with open(os.path.join(run, 'train', 'branch.json'), 'w', encoding='utf8') as file:
        json.dump({'run': '/elsewhere', 'step': 3, 'set': []}, file)
    episodes = Episodes({'': np.zeros((12, 4), np.float32)}, {'': np.zeros(10, np.int64)}, np.ones(10, np.float32),
                        np.ones(10, np.float32), np.array([4, 6]))
    leaf = {'shape': [], 'dtype': 'float32'}
    dataset_folder.write(data, episodes, {
        'env_name': 'CartPole-v1', 'reference_returns': [0.0, 10.0], 'action_bounds': {'': [-1.0, 1.0]},
        'specs': {'observation': {'': {'shape': [4], 'dtype': 'float32'}}, 'reward': {'': leaf},
                  'action': {'': {'shape': [], 'dtype': 'int64', 'minimum': 0, 'maximum': 1}}}})
    return run, data


def files_of(folder: str) -> list[str]:
    """Return the paths of all files in a folder, relative to it."""
    return sorted(os.path.relpath(path, folder) for path in glob.glob(os.path.join(folder, '**'), recursive=True)
                  if os.path.isfile(path) and not path.endswith('train.lock'))


def train(conf: str | None, params: tuple[str, ...], run: str) -> None:
    """Train in this process, or resume the run."""
    context.reset()
    with gin_utils.loaded(conf, params, run) as loaded, random_state.preserved(), run_files.created_folder(run):
        trainer = RLTrainer(TrainerConfig(root_dir=run, conf_file=loaded.conf_file))
        gin_utils.write_conf(run, loaded, ['train'])
        trainer.train()


def play(run: str) -> None:
    """Load the conf and the latest checkpoint as ``alfx evaluate`` does."""
    context.reset()
    with gin_utils.loaded(None, (), run, same_run=False), random_state.preserved():
        env, algorithm = playing.make_policy(run, 1)
        env.close()
        playing.load_for_play(run, algorithm)


def report(run: str) -> None:
    """Read the files of a report and a comparison."""
    run_files.run_folders(run)
    if not os.path.exists(os.path.join(run, 'progress.csv')):  # the commands check this
        return
    page.render(collecting.collect([run]), 'title')
    comparing.paired_differences([comparing.read_run(run)], 'final return')


def show(run: str) -> None:
    """Load the stored conf."""
    with gin_utils.loaded(None, (), run, same_run=False) as conf:
        list(gin_utils.flat_lines(conf))


def fork(run: str) -> None:
    """Fork the run."""
    forking.branch(run, 'latest', (), f'{run}-fork')


def read_dataset(path: str) -> None:
    """Read and check a dataset as ``alfx dataset show`` and ``alfx dataset check`` do."""
    dataset = dataset_sources.read(path)
    dataset_checks.check_consistent(dataset)
    dataset_statistics.lines(dataset)
    with gin_utils.loaded('dqn_cart_pole', ()):
        env = building.create_eval_environment(TrainerConfig(root_dir='', random_seed=1), 1)
        env.close()
    dataset_checks.fitted(dataset, env.observation_spec(), env.action_spec(), env.reward_spec())
    dataset_sources.reference_returns([path])


RUN_READERS: tuple[Callable[[str], None], ...] = (
    lambda run: train(None, (), run), play, report, show, fork, read_dataset)


def damage(path: str, kind: str, r: random.Random) -> None:
    """Damage a file."""
    with open(path, 'rb') as file:
        data = file.read()
    os.remove(path)
    if kind == 'folder':
        os.mkdir(path)
    elif kind == 'pipe':
        os.mkfifo(path)
    elif kind == 'link':
        os.symlink('nowhere', path)
    elif kind == 'huge':
        with open(path, 'wb') as file:
            file.write(data)
            file.truncate(300 * 2**20)
    elif kind != 'missing':
        with open(path, 'wb') as file:
            file.write(_BYTES[kind](data, r))


def _truncate(data: bytes, r: random.Random) -> bytes:
    return data[:r.randrange(len(data) + 1)]


def _flip(data: bytes, r: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(r.choice((1, 1, 5))):
        if changed:
            changed[r.randrange(len(changed))] ^= 1 << r.randrange(8)
    return bytes(changed)


def _replace(data: bytes, r: random.Random) -> bytes:
    start = r.randrange(len(data) + 1)
    return data[:start] + r.randbytes(r.randrange(1, 20)) + data[start + r.randrange(20):]


def _text(data: bytes, r: random.Random) -> bytes:
    return r.choice(('', 'hello', '\n' * 50, 'a,b\n1,2\n', '{', '[1, 2]', '{"a": 1}', 'null', 'x' * 100_000)).encode()


def _token(data: bytes, r: random.Random) -> bytes:
    """Replace a number or a string by something of another type."""
    matches = list(re.finditer(rb'"[^"]*"|\[[^\[\]]*\]|\{[^{}]*\}|-?\d[\d.e+-]*|null|true|false|\w+', data[:100_000]))
    if not matches:
        return _replace(data, r)
    match = r.choice(matches)
    return data[:match.start()] + r.choice(STRANGE).encode('utf8', 'surrogatepass') + data[match.end():]


def _repeat(data: bytes, r: random.Random) -> bytes:
    lines = data.splitlines(keepends=True) or [b'']
    return b''.join(lines[:1] * r.choice((1, 3)) + [r.choice(lines)] * r.choice((0, 2)) + lines[1:])


def _contents(data: bytes, r: random.Random) -> bytes:
    """Change a value inside of a file with a checksum, and write the correct checksum."""
    try:
        content = torch.load(io.BytesIO(data), weights_only=True)
    except Exception:  # noqa: BLE001 - another kind of file
        return _token(data, r)
    holder, key = _random_place(content, r)
    if isinstance(holder, dict) and r.random() < 0.3:
        del holder[key]
    else:
        holder[key] = r.choice(VALUES)
    buffer = io.BytesIO()
    files.save(buffer, content)
    return buffer.getvalue()


def _random_place(content, r: random.Random):
    holder, key = {'content': content}, 'content'
    while isinstance(holder[key], (dict, list)) and holder[key] and r.random() < 0.85:
        holder = holder[key]
        key = r.choice(list(holder)) if isinstance(holder, dict) else r.randrange(len(holder))
    return (content, r.choice(list(content))) if holder is not content and 'content' in holder else (holder, key)


def _compress(data: bytes, r: random.Random) -> bytes:
    """Compress the records of a checkpoint, and write the correct checksum."""
    buffer = io.BytesIO()
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return _replace(data, r)
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, 'w', zipfile.ZIP_DEFLATED) as new:
        for record in old.infolist():
            new.writestr(record.filename, old.read(record))
    body = buffer.getvalue()
    return body + b'\nalfx-sha256:' + hashlib.sha256(body).hexdigest().encode()


_BYTES = {'truncate': _truncate, 'flip': _flip, 'replace': _replace, 'text': _text, 'token': _token, 'repeat': _repeat,
          'contents': _contents, 'compress': _compress}
KINDS = ('truncate', 'flip', 'replace', 'text', 'token', 'token', 'token', 'repeat', 'contents', 'contents', 'contents',
         'compress', 'folder', 'pipe', 'link', 'huge', 'missing')


@contextlib.contextmanager
def copied(folder: str, target: str) -> Iterator[str]:
    """Copy a folder, and remove the copy and its fork at the end."""
    shutil.copytree(folder, target)
    try:
        yield target
    finally:
        for path in (target, f'{target}-fork'):
            shutil.rmtree(path, ignore_errors=True)
