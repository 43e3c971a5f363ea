"""Make the datasets of the shipped confs: train their policies, and record them.

    python tools/make_datasets.py pendulum                          # all levels of a task
    python tools/make_datasets.py pendulum/replay cart_pole/expert  # some levels
    python tools/make_datasets.py --list

Datasets are made with the commands `alfx.bin.train`, `record` and `dataset`. They are written to FOLDER/TASK/LEVEL; the
default folder is `data` in the project folder, where the shipped confs expect them. Existing datasets are reused, and
interrupted training is resumed. The levels (Fu et al. 2020, arXiv:2004.07219):

    random         uniformly random actions
    medium         episodes of the first checkpoint with a score of at least 40
    replay         everything that the learner collected before this checkpoint
    expert         a trained policy, with its exploration noise
    medium-expert  half medium, half expert
    demos          about ten episodes of the expert without noise
    tcn            the expert with noise that lasts for two steps, for causal imitation

The score is 0 for the return of the random policy and 100 for the return of the expert without noise. Both returns are
stored in FOLDER/TASK/references.json and in each dataset.
"""
import argparse
import csv
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alfx import gin_utils
from alfx.offline import dataset_folder as dataset_folder
from alfx.utils.checkpoint_utils import Checkpointer

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / 'data'
MEDIUM = 40.0  # score of the medium checkpoint
EPISODES = 20  # per evaluation


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Recipe of the datasets of a task.

    Attributes:
        expert: conf of the policy whose score is 100.
        num_steps: number of steps of all levels but replay and demos.
        demo_steps: number of steps of the demonstrations.
        learner: conf of the policy whose replay buffer is recorded. It acts in one environment and keeps all collected
            steps. None if there is no such conf; there are fewer levels then.
        learner_params: bindings that override the conf of the learner.
        learner_epsilon: probability that the recorded learner samples its action instead of taking the most likely one.
        expert_params: bindings that override the conf of the expert.
        noise: standard deviation of the action noise of `expert`, in units of half the action range, for a policy that
            does not explore.
        expert_candidates: number of last checkpoints among which the expert is selected by evaluation, since the last
            one may be worse.
        correlated_noise: standard deviation of the noise of `tcn`, in units of half the action range; 0 for no such
            level.
    """

    expert: str
    num_steps: int
    demo_steps: int
    learner: str | None = None
    learner_params: tuple[str, ...] = ()
    learner_epsilon: float = 1.0
    expert_params: tuple[str, ...] = ()
    noise: float = 0.0
    expert_candidates: int = 1
    correlated_noise: float = 0.0

    def is_one_run(self) -> bool:
        """Return whether one run provides both the learner and the expert."""
        return (self.expert, self.expert_params) == (self.learner, self.learner_params)

    def levels(self) -> tuple[str, ...]:
        """Return the levels of the task."""
        learned = ('medium', 'replay', 'medium-expert') if self.learner else ()
        return ('random', *learned, 'expert', 'demos', *(('tcn', ) if self.correlated_noise else ()))


_ONE_ENVIRONMENT = 'create_environment.num_parallel_environments = 1'
_LONG = (_ONE_ENVIRONMENT, 'TrainerConfig.num_checkpoints = 50', 'TrainerConfig.compile = True')
_LEARNING = (*_LONG, 'sac/Adam.lr = 3e-4', 'SacAlgorithm.random_initial_actions = False',
             'TrainerConfig.initial_collect_steps = 10000')  # of the datasets behind docs/results.md
_LANDING = (_ONE_ENVIRONMENT, 'TrainerConfig.unroll_length = 4', 'TrainerConfig.replay_buffer_length = 300000',
            'TrainerConfig.num_checkpoints = 50')
RECIPES = {
    # fewer updates than in the conf, so that the learner collects more steps on its way
    'pendulum': Recipe('sac_pendulum', 40000, 2000, 'sac_pendulum',
                       ('TrainerConfig.unroll_length = 4', 'TrainerConfig.num_env_steps = 40000',
                        'TrainerConfig.replay_buffer_length = 40000', 'TrainerConfig.num_checkpoints = 80'),
                       correlated_noise=0.5),
    'mountain_car_continuous': Recipe('sac_mountain_car_continuous', 50000, 1000, 'sac_mountain_car_continuous',
                                      (_ONE_ENVIRONMENT, 'TrainerConfig.unroll_length = 32',
                                       'TrainerConfig.replay_buffer_length = 50000',
                                       'TrainerConfig.num_checkpoints = 50')),
    'cart_pole': Recipe('ppo_cart_pole', 50000, 5000, 'dqn_cart_pole', ('TrainerConfig.num_checkpoints = 50', ),
                        learner_epsilon=0.1),
    'corridor': Recipe('ppo_count_corridor', 10000, 24),
    'point_maze': Recipe('waypoints_point_maze', 200000, 6000, noise=0.5),  # needs the extra robotics
    # one long run provides both the learner and the expert
    'lunar_lander_continuous': Recipe('sac_lunar_lander_continuous', 200000, 3000, 'sac_lunar_lander_continuous',
                                      _LANDING, expert_params=_LANDING, expert_candidates=5),
    'half_cheetah': Recipe('sac_half_cheetah', 300000, 10000, 'sac_half_cheetah', _LEARNING, expert_params=_LEARNING,
                           expert_candidates=5),
    'hopper': Recipe('sac_hopper', 300000, 10000, 'sac_hopper', _LONG, expert_params=_LONG, expert_candidates=5),
}


def run_program(arguments: Sequence[str], log: Path, threads: int = 1) -> str:
    """Run a Python module in the project folder; return its standard output, and append all output to ``log``.

    Raises:
        RuntimeError: the program failed; the message contains the end of the log.
    """
    environment = {**os.environ, 'OMP_NUM_THREADS': str(threads),
                   'PYTHONPATH': os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))}
    with log.open('a') as file:
        done = subprocess.run([sys.executable, '-m', *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=file, text=True, env=environment, check=False, cwd=ROOT)
        file.write(done.stdout)
    if done.returncode:
        tail = '\n'.join(log.read_text().splitlines()[-8:])
        raise RuntimeError(f'{" ".join(arguments)} ended with code {done.returncode}:\n{tail}')
    return done.stdout


class Maker:
    """Maker of the datasets of one task.

    Args:
        task: name of the task in RECIPES.
        folder: root of FOLDER/TASK/LEVEL.
        seed: random seed of training and recording.
    """

    def __init__(self, task: str, folder: Path, seed: int = 0):
        self._task, self._recipe, self._seed = task, RECIPES[task], seed
        self._folder = folder / task
        self._runs = self._folder / 'runs'
        self._done: set[Path] = set()
        self._runs.mkdir(parents=True, exist_ok=True)

    def make(self, level: str) -> None:
        """Make a dataset, with the runs and datasets that it needs, unless it exists."""
        if dataset_folder.is_dataset(str(self._folder / level)):
            return
        print(f'{self._task}/{level}', flush=True)
        getattr(self, '_make_' + level.replace('-', '_'))()

    def _make_random(self) -> None:
        self._dataset('convert', [self._random()], 'random')

    def _make_medium(self) -> None:
        self._record(self._folder / 'medium', self._recipe.num_steps,
                     ['--root_dir', str(self._learner()), '--checkpoint_step', str(self._medium_step()),
                      '--epsilon_greedy', str(self._recipe.learner_epsilon), *self._reference_flag()])

    def _make_replay(self) -> None:
        run, step = self._learner(), self._medium_step()
        with (run / 'progress.csv').open() as file:
            steps = max(int(float(row['env_steps'])) for row in csv.DictReader(file)
                        if int(float(row['global_counter'])) <= step)
        self._dataset('convert', [run], 'replay', steps)

    def _make_medium_expert(self) -> None:
        for level in ('medium', 'expert'):
            self.make(level)
        self._dataset('mix', [self._folder / 'medium', self._folder / 'expert'], 'medium-expert',
                      self._recipe.num_steps // 2)

    def _make_expert(self) -> None:
        noise = ['--noise', str(self._recipe.noise)] if self._recipe.noise else []
        self._record_expert('expert', self._recipe.num_steps, 'sampled', noise)

    def _make_demos(self) -> None:
        self._record_expert('demos', self._recipe.demo_steps, 'greedy', num_environments=1)

    def _make_tcn(self) -> None:
        self._record_expert('tcn', self._recipe.num_steps, 'greedy',
                            ['--correlated_noise', str(self._recipe.correlated_noise)])

    def _record_expert(self, level: str, num_steps: int, mode: str, further: Sequence[str] = (),
                       num_environments: int = 8) -> None:
        reference = self._reference_flag()
        self._record(self._folder / level, num_steps, [
            '--root_dir', str(self._expert()), '--checkpoint_step', str(self._known().get('expert_step', 'latest')),
            '--mode', mode, *further, *reference], num_environments)

    def _random(self) -> Path:
        """Return the recording of random actions, made before the reference returns are known."""
        path = self._runs / 'random'
        if not dataset_folder.is_dataset(str(path)):
            self._record(path, self._recipe.num_steps, ['--conf', self._recipe.expert, '--mode', 'random'])
        return path

    def _expert(self) -> Path:
        if self._recipe.is_one_run():
            return self._learner()
        return self._trained('expert', self._recipe.expert, self._recipe.expert_params)

    def _learner(self) -> Path:
        assert self._recipe.learner is not None, 'levels() has no level that needs a learner'
        return self._trained('learner', self._recipe.learner, self._recipe.learner_params)

    def _trained(self, name: str, conf: str, params: Sequence[str]) -> Path:
        """Train a run to its end, and return its folder."""
        run = self._runs / name
        if run in self._done:
            return run
        self._run('train', '--conf', conf, '--root_dir', str(run), *(
            part for param in (*params, f'TrainerConfig.random_seed = {self._seed}')
            for part in ('--conf_param', param)))
        self._done.add(run)
        return run

    def _record(self, path: Path, num_steps: int, further: Sequence[str], num_environments: int = 8) -> None:
        self._run('record', '--dataset', str(path), '--num_steps', str(num_steps), '--random_seed', str(self._seed),
                  '--num_environments', str(num_environments), *further)

    def _dataset(self, command: str, sources: Sequence[Path], level: str, num_steps: int | None = None) -> None:
        self._run('dataset', command, *map(str, sources), '--output', str(self._folder / level),
                  *self._reference_flag(), *(['--num_steps', str(num_steps)] if num_steps else []))

    def _run(self, program: str, *arguments: str) -> str:
        return run_program([f'alfx.bin.{program}', *arguments], self._folder / 'log.txt')

    def _reference_flag(self) -> list[str]:
        """Return the flag with the returns of the random policy and of the expert."""
        known = self._known()
        if 'random' not in known:
            random = str(self._random())
            known['random'] = json.loads(self._run('dataset', 'show', random, '--json'))[random]['return_mean']
            expert = self._expert()
            steps = self._steps(expert)[-self._recipe.expert_candidates:]
            known['expert'], known['expert_step'] = max(
                (self._evaluation(expert, str(step))['average_return'], step) for step in steps)
            self._remember(known)
        return [f'--reference_returns={known["random"]},{known["expert"]}']

    def _medium_step(self) -> int:
        """Return the step of the first checkpoint of the learner with a score of MEDIUM, found by bisection.

        Raises:
            RuntimeError: the final score is lower.
        """
        known, run = self._known(), self._learner()
        if 'medium_step' in known:
            return known['medium_step']
        flag = self._reference_flag()

        def score(step: int) -> float:
            return self._evaluation(run, str(step), flag)['normalized_score']

        steps = self._steps(run)
        if self._recipe.is_one_run():  # later checkpoints may be worse than the expert
            steps = [x for x in steps if x <= self._known().get('expert_step', x)]
        low, high, reached = 0, len(steps) - 1, score(steps[-1])
        if reached < MEDIUM:
            raise RuntimeError(f'{run}: expected a final score of at least {MEDIUM:g}, found {reached:.1f}; train '
                               'for longer')
        while low < high:
            middle = (low + high) // 2
            found = score(steps[middle])
            if found >= MEDIUM:
                high, reached = middle, found
            else:
                low = middle + 1
        self._remember({**self._known(), 'medium_step': steps[high], 'medium_score': reached})
        return steps[high]

    @staticmethod
    def _steps(run: Path) -> list[int]:
        """Return the steps of the checkpoints of a run."""
        return sorted(Checkpointer(str(run / 'train' / 'algorithm')).steps())

    def _evaluation(self, run: Path, step: str, further: Sequence[str] = ()) -> dict[str, Any]:
        return json.loads(self._run('evaluate', '--root_dir', str(run), '--mode', 'greedy', '--json', '-',
                                    '--checkpoint_step', step, '--random_seed', str(self._seed), '--num_episodes',
                                    str(EPISODES), '--num_environments', str(EPISODES), *further))['greedy']

    def _known(self) -> dict[str, Any]:
        path = self._folder / 'references.json'
        return json.loads(path.read_text()) if path.exists() else {}

    def _remember(self, known: dict[str, Any]) -> None:
        path = self._folder / 'references.json'
        new = path.with_suffix('.new')
        new.write_text(json.dumps(known, indent=1) + '\n')
        new.replace(path)


def names_of(name: str) -> list[tuple[str, str]]:
    """Return task and level of each dataset of a name: `TASK` for all levels, or `TASK/LEVEL`.

    Raises:
        ConfError: unknown task or level.
    """
    task, _, level = name.partition('/')
    if task not in RECIPES:
        raise gin_utils.ConfError(f'{name}: no recipe for {task}', f'choose from {", ".join(RECIPES)}')
    levels = RECIPES[task].levels()
    if level and level not in levels:
        raise gin_utils.ConfError(f'{name}: no level {level} of {task}', f'choose from {", ".join(levels)}')
    return [(task, x) for x in ([level] if level else levels)]


def make(names: Sequence[str], folder: Path, seed: int = 0) -> None:
    """Make the datasets of several names; see :func:`names_of`."""
    requested = [x for name in names for x in names_of(name)]
    makers = {task: Maker(task, folder.resolve(), seed) for task, _ in requested}
    for task, level in requested:
        makers[task].make(level)


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('names', nargs='*', metavar='NAME', help='TASK or TASK/LEVEL')
    parser.add_argument('--folder', type=Path, default=FOLDER, help='root folder of the datasets')
    parser.add_argument('--seed', type=int, default=0, help='random seed of training and recording')
    parser.add_argument('--list', action='store_true', help='list tasks and levels')
    args = parser.parse_args()
    if args.list or not args.names:
        for task, recipe in RECIPES.items():
            print(f'{task}: {", ".join(recipe.levels())}')
        return 0
    try:
        make(args.names, args.folder, args.seed)
    except (gin_utils.ConfError, RuntimeError) as error:
        print(f'{type(error).__name__}: {error}', file=sys.stderr)
        return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
