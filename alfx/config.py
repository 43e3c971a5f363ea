"""The configuration of one run: how long, how often, with how much data.

:class:`TrainerConfig` is made once a run, from the conf file, and handed to the trainer and to every
algorithm. It checks itself: a value of the wrong type, out of range or in conflict with another is a
:class:`~alfx.gin_utils.ConfError` that lists every mistake with the line of the conf. What the cadences
mean is read best in ``alfx/trainers/policy_trainer.py``.
"""

import dataclasses
import os
from typing import Any, Callable, Optional, Sequence, Union

import torch

from alfx import gin_utils
from alfx.gin_utils.value_checks import describe, problem_at, problem_of
from alfx.gin_utils.settings import setting, wrong_values

_OWNER = 'TrainerConfig'
LOGGERS = ('tensorboard', 'wandb', 'mlflow')


@gin_utils.configurable(module='alfx.algorithms.config')  # the documented place
@dataclasses.dataclass(eq=False)
class TrainerConfig:
    """What the trainer and the algorithms need to know about a run.

    An *iteration* unrolls the environments, trains, and counts as one for every interval below. A
    *summary step* is an iteration, or a minibatch with ``update_counter_every_mini_batch``.

    How long:
        root_dir: the run folder. ``~`` is expanded.
        conf_file: the conf file this configuration came from, for the record.
        ml_type: 'rl' to act in environments, 'sl' for supervised learning from a dataset.
        algorithm_ctor: makes the algorithm. Required.
        data_transformer_ctor: one or several constructors ``(observation_spec)``, applied to observations in
            the order given. Those that look into the replay buffer (frame stacks, hindsight goals) come
            first, since the buffer stores observations as the environment gave them.
        random_seed: seeds everything; None draws one and logs it.
        num_iterations: stop after so many iterations ('sl': epochs); 0 for no such limit.
        num_episodes: stop at the end of the iteration in which so many episodes of all environments have ended; 0 for
            no such limit.
        stop_at_return: stop after an evaluation with at least this mean return (summed over the dimensions of the
            reward); None for no such limit. Needs evaluate.
        num_env_steps: stop acting after so many environment steps, summed over environments; 0 for no such
            limit. A run with both limits goes on training from its replay buffer until num_iterations.

    Acting:
        unroll_length: steps of each environment in an iteration. A fraction alternates between the two
            neighbouring integers so that the mean is right.
        unroll_with_grad: keep gradients of the unroll for an on-policy part inside an off-policy algorithm.
        async_unroll: act in another process, in parallel with training, which then is on older steps. Not for
            on-policy algorithms that make no allowance for that.
        max_unroll_length: with async_unroll and unroll_length 0, at most so many steps of each environment in an
            iteration: those that are there, possibly none.
        unroll_queue_size: with async_unroll or num_ray_workers, how many steps of each environment may wait for
            training; the process that acts waits when there are so many.
        unroll_step_interval: with async_unroll, seconds from one step to the next, where they do not take longer (0: as
            fast as possible).
        unroll_parameter_update_period: with async_unroll or num_ray_workers, hand new weights to those who act every so
            many iterations.
        num_ray_workers: act in so many processes on a Ray cluster, each with ``num_parallel_environments`` environments
            of its own, in parallel with training; 0 to act here. For the same algorithms as async_unroll. Needs the
            extra ``ray``.
        ray_address: with num_ray_workers, 'host:port' of a running cluster, 'auto' for the one that this machine
            belongs to, or 'local' to start one here that ends with the run; '' for what the environment variable
            ``RAY_ADDRESS`` says, 'local' if it is not set.
        use_rollout_state: start training sequences from the recurrent state stored while acting, instead of
            from zeros.
        temporally_independent_train_step: call train_step once on ``[T * B]`` instead of T times; None lets
            the algorithm decide by whether it has state.

    Checkpoints:
        num_checkpoints: how many to write during the run.
        replay_checkpoint_megabytes: the replay buffer is part of checkpoints, the latest two, as long as what it holds
            takes no more than so many MiB (2**20 bytes). Beyond that it is left out, and a run that goes on from a
            checkpoint begins with an empty one: not exactly as if it had not stopped. 0: never part of them.
            ``ReplayBuffer.enable_checkpoint`` says so, whatever the size, where it is set.
        confirm_checkpoint_upon_crash: ask before writing one after a crash (only at a terminal).
        no_thread_env_for_conf: never make an extra environment for the sake of the written configuration. None is
            made in either case: the configuration is written without one.

    Evaluation:
        evaluate: evaluate during training.
        num_evals: how many times; replaces eval_interval.
        eval_interval: iterations between evaluations.
        epsilon_greedy: chance of sampling instead of taking the best action while evaluating.
        eval_uncertainty: evaluate uncertainty in each evaluation, and after training; of supervised learning.
        num_eval_episodes: episodes an evaluation.
        num_eval_environments: environments they run in.
        eval_video_steps: write so many steps of an episode of each evaluation as an animation into its event file; 0
            for none.
        async_eval: evaluate in a process of its own while training goes on.
        ddp_paras_check_interval: iterations between checks that all processes which train together hold the same
            weights; 0 for none. One process alone has nothing to compare.

    Summaries:
        num_summaries: how many in the whole run; replaces summary_interval.
        summary_interval: summary steps between summaries.
        summarize_first_interval: also summarise each step of the first interval.
        update_counter_every_mini_batch: count minibatches instead of iterations.
        summary_axis: what summaries are drawn over: 'env_steps', or 'global_counter' (iterations, or minibatches with
            update_counter_every_mini_batch), which also writes metrics over each step metric below ``Metrics_vs_``.
            None: 'env_steps', where these tell how far a run is: it acts, learns from no dataset, has no limit of both
            steps and iterations and counts no minibatches.
        loggers: what takes the numbers of the run besides ``progress.csv``: 'tensorboard' (event files), 'wandb',
            'mlflow' (packages of their own).
        summaries_flush_secs: write event files at least so often (seconds).
        summary_max_queue: or after so many summaries.
        metric_min_buffer_size: episodes that average metrics are taken over, at least.
        debug_summaries: also summarise what helps to find faults.
        profiling: profile the run with cProfile and log the result.
        enable_amp: automatic mixed precision: networks compute in bfloat16, or in float16 with scaled losses on GPUs
            without it; parameters, distributions, losses and statistics stay in float32. Worth it on GPUs with tensor
            cores and for large networks; on CPUs without bfloat16 instructions it is slower.
        code_snapshots: source files to record, relative to the alfx package.
        summarize_grads_and_vars: histograms of weights and gradients.
        summarize_gradient_noise_scale: the noise scale of the gradient.
        summarize_action_distributions: statistics of the action distributions.
        summarize_output: histograms and means of the outputs of all networks.

    Training of off-policy algorithms:
        initial_collect_steps: environment steps, summed over environments, before the first update.
        num_updates_per_train_iter: updates an iteration, or passes over the buffer with
            whole_replay_buffer_training.
        mini_batch_length: steps of a training sequence; None is the unroll length, which needs
            whole_replay_buffer_training.
        mini_batch_size: sequences in a minibatch; None is the number of environments.
        whole_replay_buffer_training: train on everything in the buffer instead of on samples of it.
        replay_buffer_length: steps stored for each environment.
        priority_replay: prioritised sampling.
        priority_replay_alpha: exponent of the priorities, a number or a schedule.
        priority_replay_beta: exponent of the importance weights, a number or a schedule.
        priority_replay_eps: added to every priority.
        offline_buffer_dir: one or several stored datasets to train on, by samples; see docs/offline.md. With
            unroll_length 0 they are all there is to train on.
        offline_buffer_length: at most so many steps of each of them are loaded; None for all.
        rl_train_after_update_steps: with a dataset and own experience, train on the dataset alone, and collect nothing,
            until the global counter is so large.
        rl_train_every_update_steps: with a dataset and own experience, train on the dataset alone but for those
            iterations that begin when the global counter is a multiple of this. Every iteration collects.
        offline_mini_batch_size: sequences from the datasets in a minibatch, besides ``mini_batch_size`` of own
            experience; None for as many.
        offline_loss_weight: factor of the mean loss of these, which is added to that of own experience; a number, or a
            schedule. 0 leaves them out.
        empty_cache: return unused GPU memory before each iteration.
        normalize_importance_weights_by_max: divide importance weights by their largest.
        clear_replay_buffer: with whole_replay_buffer_training, forget everything after training on it.

    Speed:
        num_threads: threads of torch; None chooses by the size of the networks.
        float32_matmul_precision: 'highest', 'high' or 'medium' as for
            ``torch.set_float32_matmul_precision``; None measures at start.
        compile: compile the update into one function, for algorithms whose update is the same operations every time.
            That takes some seconds at the start, and pays for small networks. On a GPU the function becomes a CUDA
            graph, where it can be captured. On a CPU, how SAC, DDPG, TD3 and DQN without memory act in the rollout is
            compiled, too.

    Raises:
        ConfError: a value has the wrong type, is out of range, conflicts with another, or asks for what this
            version does not offer. All mistakes are listed, each with the line of the conf.
    """

    root_dir: str = setting(may_change=True)
    conf_file: str = setting('', may_change=True)
    ml_type: str = setting('rl', choices=('rl', 'sl'))
    algorithm_ctor: Optional[Callable[..., torch.nn.Module]] = setting(None, kind=object)
    data_transformer_ctor: Union[None, Callable[..., torch.nn.Module], Sequence[Callable[..., torch.nn.Module]]] = (
        setting(None, kind=object))
    random_seed: Optional[int] = setting(None, minimum=0, maximum=2**32 - 1)
    num_iterations: int = setting(1000, minimum=0, may_change=True)
    num_env_steps: int = setting(0, minimum=0, may_change=True)
    num_episodes: int = setting(0, minimum=0, may_change=True)
    stop_at_return: Optional[float] = setting(None, may_change=True)
    unroll_length: float = setting(8, minimum=0)
    unroll_with_grad: bool = False
    async_unroll: bool = setting(False, may_change=True)
    max_unroll_length: int = setting(0, minimum=0, may_change=True)
    unroll_queue_size: int = setting(200, minimum=1, may_change=True)
    unroll_step_interval: float = setting(0, minimum=0, may_change=True)
    unroll_parameter_update_period: int = setting(10, minimum=1, may_change=True)
    use_rollout_state: bool = False
    temporally_independent_train_step: Optional[bool] = None
    num_checkpoints: int = setting(10, minimum=0, may_change=True)
    replay_checkpoint_megabytes: float = setting(256, minimum=0, may_change=True)
    confirm_checkpoint_upon_crash: bool = setting(True, may_change=True)
    no_thread_env_for_conf: bool = setting(False, may_change=True)
    evaluate: bool = setting(False, may_change=True)
    num_evals: Optional[int] = setting(None, minimum=1, may_change=True)
    eval_interval: int = setting(10, minimum=1, may_change=True)
    epsilon_greedy: float = setting(0.0, minimum=0, maximum=1, may_change=True)
    eval_uncertainty: bool = setting(False, may_change=True)
    num_eval_episodes: int = setting(10, minimum=1, may_change=True)
    num_eval_environments: int = setting(1, minimum=1, may_change=True)
    eval_video_steps: int = setting(0, minimum=0, may_change=True)
    async_eval: bool = setting(True, may_change=True)
    ddp_paras_check_interval: int = setting(0, minimum=0)
    num_summaries: Optional[int] = setting(None, minimum=1, may_change=True)
    summary_interval: int = setting(50, minimum=1, may_change=True)
    summarize_first_interval: bool = setting(True, may_change=True)
    update_counter_every_mini_batch: bool = False
    summary_axis: Optional[str] = setting(None, choices=('env_steps', 'global_counter'))
    loggers: Sequence[str] = setting(('tensorboard', ), may_change=True)
    summaries_flush_secs: float = setting(1, minimum=0, may_change=True)
    summary_max_queue: int = setting(10, minimum=1, may_change=True)
    metric_min_buffer_size: int = setting(10, minimum=1)
    debug_summaries: bool = setting(False, may_change=True)
    profiling: bool = setting(False, may_change=True)
    enable_amp: bool = False
    code_snapshots: Optional[Sequence[str]] = setting(None, may_change=True)
    summarize_grads_and_vars: bool = setting(False, may_change=True)
    summarize_gradient_noise_scale: bool = setting(False, may_change=True)
    summarize_action_distributions: bool = setting(False, may_change=True)
    summarize_output: bool = setting(False, may_change=True)
    initial_collect_steps: int = setting(0, minimum=0)
    num_updates_per_train_iter: int = setting(4, minimum=1)
    mini_batch_length: Optional[int] = setting(None, minimum=1)
    mini_batch_size: Optional[int] = setting(None, minimum=1)
    whole_replay_buffer_training: bool = True
    replay_buffer_length: int = setting(1024, minimum=1)
    priority_replay: bool = False
    priority_replay_alpha: Union[float, Callable] = setting(0.7, minimum=0)
    priority_replay_beta: Union[float, Callable] = setting(0.4, minimum=0)
    priority_replay_eps: float = setting(1e-6, minimum=0)
    offline_buffer_dir: Union[None, str, Sequence[str]] = setting(None, may_change=True)
    offline_buffer_length: Optional[int] = setting(None, minimum=1)
    rl_train_after_update_steps: int = setting(0, minimum=0)
    rl_train_every_update_steps: int = setting(1, minimum=1)
    empty_cache: bool = setting(False, may_change=True)
    normalize_importance_weights_by_max: bool = False
    clear_replay_buffer: bool = True
    num_ray_workers: int = setting(0, minimum=0, may_change=True)
    ray_address: str = setting('', may_change=True)
    offline_mini_batch_size: Optional[int] = setting(None, minimum=1)
    offline_loss_weight: Union[float, Callable] = setting(1.0, minimum=0)
    num_threads: Optional[int] = setting(None, minimum=1, may_change=True)
    float32_matmul_precision: Optional[str] = setting(None, choices=('highest', 'high', 'medium'), may_change=True)
    compile: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.root_dir, os.PathLike):
            self.root_dir = os.fspath(self.root_dir)
        self._data_transformer: Any = None
        problems = self._wrong_values() or self._conflicts() + self._missing_files()
        if problems:
            raise gin_utils.ConfError(problems)
        self.root_dir = os.path.expanduser(self.root_dir)

    @property
    def data_transformer(self) -> Any:
        """The data transformer of the run, None if the conf names none.

        The trainer makes it from ``data_transformer_ctor`` once it knows the observation spec, and sets it here.

        Raises:
            RuntimeError: the conf names one, but no trainer has set it yet.
        """
        if self._data_transformer is None and self.data_transformer_ctors():
            raise RuntimeError('TrainerConfig.data_transformer is set by the trainer once it knows the observation '
                               'spec of the environment; no trainer has used this configuration yet')
        return self._data_transformer

    @data_transformer.setter
    def data_transformer(self, transformer: Any) -> None:
        self._data_transformer = transformer

    @property
    def trains_on_whole_unrolls(self) -> bool:
        """Whether each unroll is stored for replay, trained on as a whole, and then dropped."""
        return self.whole_replay_buffer_training and self.clear_replay_buffer

    @property
    def collects(self) -> bool:
        """Whether the run acts in environments."""
        return bool(self.unroll_length or self.max_unroll_length)

    @property
    def summarizes_over_env_steps(self) -> bool:
        """Whether environment steps are the horizontal axis of summaries."""
        if self.summary_axis is not None:
            return self.summary_axis == 'env_steps'
        return (self.ml_type == 'rl' and self.collects and not self.offline_datasets()
                and not self.update_counter_every_mini_batch and not (self.num_iterations and self.num_env_steps))

    def offline_datasets(self) -> tuple[str, ...]:
        """``offline_buffer_dir`` as a tuple, empty if there is none."""
        found = self.offline_buffer_dir
        return () if found is None else (found, ) if isinstance(found, str) else tuple(found)

    @property
    def async_actor_field(self) -> str:
        """The field that lets other processes act: 'async_unroll' or 'num_ray_workers'; '' if this one does."""
        return 'async_unroll' if self.async_unroll else 'num_ray_workers' if self.num_ray_workers else ''

    def data_transformer_ctors(self) -> tuple[Callable, ...]:
        """``data_transformer_ctor`` as a tuple, empty if there is none."""
        if self.data_transformer_ctor is None:
            return ()
        if callable(self.data_transformer_ctor):
            return (self.data_transformer_ctor,)
        return tuple(self.data_transformer_ctor)

    def _wrong_values(self) -> list[gin_utils.Problem]:
        problems: list[Any] = wrong_values(self, _OWNER)
        if self.algorithm_ctor is None:
            problems.append(problem_at(_OWNER, 'algorithm_ctor', 'is not set',
                                       'name the algorithm in the conf: TrainerConfig.algorithm_ctor = @Agent'))
        else:
            problems.append(problem_of(_OWNER, 'algorithm_ctor', self.algorithm_ctor, callable))
        problems += [problem_of(_OWNER, 'loggers', name, str, choices=LOGGERS)
                     for name in ([] if isinstance(self.loggers, str) else self.loggers)]
        ctors = self.data_transformer_ctor
        several = ctors if isinstance(ctors, (list, tuple)) else () if ctors is None else (ctors,)
        for ctor in several:
            if not callable(ctor) or isinstance(ctor, torch.nn.Module):
                hint = f'write @{type(ctor).__name__} without ()' if isinstance(ctor, torch.nn.Module) else ''
                problems.append(problem_at(_OWNER, 'data_transformer_ctor',
                                           f'must hold constructors, found {describe(ctor)}', hint))
        return [problem for problem in problems if problem is not None]

    def _conflicts(self) -> list[gin_utils.Problem]:
        problems = []

        def conflict(name, message, hint):
            problems.append(problem_at(_OWNER, name, message, hint))

        if self.ml_type == 'sl' and self.num_iterations == 0:
            conflict('num_iterations', 'is 0: supervised learning needs a number of epochs', 'set it to 1 or more')
        elif self.num_iterations == 0 and self.num_env_steps == 0:
            if not self.num_episodes:
                conflict('num_iterations', 'and TrainerConfig.num_env_steps are both 0: the run would never end',
                         'set one of them')
            for name in ('num_summaries', 'num_evals'):
                if self.num_episodes and getattr(self, name) is not None:
                    conflict(name, f'= {getattr(self, name)} needs the number of iterations of the run, and '
                             f'TrainerConfig.num_episodes = {self.num_episodes} does not tell it',
                             f"set it to None and {'summary' if name == 'num_summaries' else 'eval'}_interval instead")
        if self.ml_type == 'sl' and self.num_episodes:
            conflict('num_episodes', f"= {self.num_episodes}, but TrainerConfig.ml_type is 'sl': there are none",
                     'leave it out')
        if self.stop_at_return is not None and not (self.evaluate and self.ml_type == 'rl'):
            conflict('stop_at_return', f'= {self.stop_at_return:g} is compared with evaluations, and there are none',
                     'set TrainerConfig.evaluate = True, or leave it out')
        if self.ml_type == 'rl':
            self._add_rl_conflicts(conflict)
            if self.eval_uncertainty:
                conflict('eval_uncertainty', "= True has a meaning only with TrainerConfig.ml_type = 'sl'",
                         'leave it out')
        elif self.async_actor_field:
            conflict(self.async_actor_field, f"= {getattr(self, self.async_actor_field)!r}, but TrainerConfig.ml_type is 'sl': there is "
                     'nothing to act in', 'leave it out')
        self._add_acting_conflicts(conflict)
        self._add_axis_conflicts(conflict)
        return problems

    def _add_axis_conflicts(self, conflict: Callable[[str, str, str], None]) -> None:
        if self.summary_axis == 'env_steps' and not (self.ml_type == 'rl' and self.collects):
            conflict('summary_axis', "= 'env_steps', but no environment is stepped: all summaries would be at 0",
                     "leave it out, or set it to 'global_counter'")

    def _add_acting_conflicts(self, conflict: Callable[[str, str, str], None]) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}

        def needs(condition: bool, words: str, *names: str) -> None:
            for name in names:
                if not condition and getattr(self, name) != defaults[name]:
                    conflict(name, f'= {getattr(self, name)!r} has a meaning only with {words}',
                             'set that, or leave this out')

        needs(self.async_unroll, 'TrainerConfig.async_unroll = True', 'max_unroll_length', 'unroll_step_interval')
        needs(bool(self.async_actor_field), 'TrainerConfig.async_unroll = True or TrainerConfig.num_ray_workers',
              'unroll_queue_size', 'unroll_parameter_update_period')
        needs(bool(self.num_ray_workers), 'TrainerConfig.num_ray_workers', 'ray_address')
        if self.async_unroll and self.num_ray_workers:
            conflict('num_ray_workers', f'= {self.num_ray_workers} and TrainerConfig.async_unroll = True: either Ray '
                     'workers act, or one process here does', 'leave out one of the two')
        elif self.async_unroll and self.unroll_length == 0 and self.max_unroll_length == 0:
            conflict('max_unroll_length', 'and TrainerConfig.unroll_length are both 0: nothing would be collected',
                     'set one of them')
        elif self.async_unroll and self.unroll_length and self.max_unroll_length:
            conflict('max_unroll_length', f'= {self.max_unroll_length} has a meaning only with '
                     f'TrainerConfig.unroll_length = 0; it is {self.unroll_length}', 'leave out one of the two')
        if self.async_actor_field and self.unroll_with_grad:
            conflict(self.async_actor_field, f'= {getattr(self, self.async_actor_field)!r} and TrainerConfig.unroll_with_grad = True: '
                     'gradients of the unroll do not reach the process that trains', 'leave out one of the two')

    def _add_rl_conflicts(self, conflict: Callable[[str, str, str], None]) -> None:
        if not self.collects and not self.async_unroll and not self.offline_datasets():
            conflict('unroll_length', 'is 0: no environment would ever be stepped', 'set it to 1 or more')
        self._add_offline_conflicts(conflict)
        length = self.mini_batch_length
        if self.collects and length is not None and length > self.replay_buffer_length:
            conflict('mini_batch_length', f'is {length}, longer than TrainerConfig.replay_buffer_length = '
                     f'{self.replay_buffer_length}', 'shorten the sequences or lengthen the buffer')
        if length is None and not self.whole_replay_buffer_training:
            conflict('mini_batch_length', 'is not set, but TrainerConfig.whole_replay_buffer_training = False samples '
                     'sequences', 'set the length of the sequences: 2 for one-step temporal-difference learning')
        if self.priority_replay and self.whole_replay_buffer_training:
            conflict('priority_replay', '= True has no meaning with TrainerConfig.whole_replay_buffer_training = True, '
                     'which trains on every step once', 'set whole_replay_buffer_training to False')

    def _add_offline_conflicts(self, conflict: Callable[[str, str, str], None]) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}

        def given(*names: str) -> list[str]:
            return [name for name in names if getattr(self, name) != defaults[name]]

        schedule = 'rl_train_after_update_steps', 'rl_train_every_update_steps'
        if not self.offline_datasets():
            for name in given('offline_buffer_length', 'offline_mini_batch_size', 'offline_loss_weight', *schedule):
                conflict(name, f'= {getattr(self, name)!r} has a meaning only with TrainerConfig.offline_buffer_dir',
                         'name a dataset there, or leave this out')
            return
        if self.whole_replay_buffer_training:
            conflict('whole_replay_buffer_training', '= True: from TrainerConfig.offline_buffer_dir minibatches are '
                     'sampled', 'set it to False')
        if self.use_rollout_state:
            conflict('use_rollout_state', '= True: datasets hold no states', 'set it to False')
        if self.collects:
            return
        for name in given(*schedule, 'offline_mini_batch_size', 'offline_loss_weight', 'initial_collect_steps',
                          'num_env_steps'):
            conflict(name, f'= {getattr(self, name)!r} has no meaning with TrainerConfig.unroll_length = 0, which '
                     'collects nothing', 'leave it out, or set unroll_length')
        if not self.num_iterations:
            conflict('num_iterations', 'is 0: a run that collects nothing would never end', 'set it to 1 or more')

    def _missing_files(self) -> list[gin_utils.Problem]:
        package = os.path.dirname(os.path.abspath(__file__))
        missing = [path for path in self.code_snapshots or ()
                   if not os.path.isfile(os.path.join(package, path))]
        return [problem_at(_OWNER, 'code_snapshots', f'names {path!r}, which is not in {package}',
                           "give paths relative to the alfx package, such as 'algorithms/agent.py'")
                for path in missing]
