"""Configuration of a run: its length, its data, its intervals.

:class:`TrainerConfig` is created once per run, from the conf file, and passed to the trainer and to every algorithm. It
is validated when created: values of a wrong type, out of range or in conflict with others raise a
:class:`~alfx.gin_utils.ConfError` that lists every mistake with its line of the conf.
``alfx/trainers/policy_trainer.py`` shows what the intervals mean.
"""

import dataclasses
import os
from typing import Any, Callable, Optional, Sequence, Union

import torch

from alfx import gin_utils
from alfx.gin_utils.settings import setting, wrong_values
from alfx.gin_utils.value_checks import describe, problem_at, problem_of
from alfx.summary.trackers import TRACKERS

_OWNER = 'TrainerConfig'


@gin_utils.configurable(module='alfx.algorithms.config')  # the documented place
@dataclasses.dataclass(eq=False)
class TrainerConfig:
    """Configuration of a run for the trainer and the algorithms.

    An *iteration* collects an unroll, trains on it or on stored data, and counts as one for every interval below. A
    *summary step* is an iteration, or an update with ``update_counter_every_mini_batch``.

    Run:
        root_dir: run folder. ``~`` is expanded.
        conf_file: conf file that this configuration came from; only recorded.
        ml_type: 'rl' acts in environments, 'sl' is supervised learning from a dataset.
        algorithm_ctor: constructor of the algorithm. Required by trainers, see :meth:`required_algorithm_ctor`.
        data_transformer_ctor: a constructor, called with ``observation_spec=``, or a list of constructors, whose
            transformers are applied in this order. The replay buffer stores observations as the environment returned
            them, so transformers that read it (frame stacks, hindsight goals) have to be first.
        random_seed: seeds all random number generators and environments. None draws a seed and logs it.
        num_iterations: stop after this number of iterations ('sl': epochs); 0 for no limit.
        num_episodes: stop at the end of the iteration in which this number of episodes has ended, summed over
            environments; 0 for no limit.
        callbacks: objects whose hooks are called during the run, such as ``(@KeepBestCheckpoint(), @EpisodeLog())``, or
            their classes; see docs/callbacks.md.
        stop_at_return: stop after an evaluation whose mean return, summed over the dimensions of the reward, is at
            least this; None for no limit. Needs evaluate.
        num_env_steps: stop acting after this number of environment steps, summed over environments; 0 for no limit.
            With both limits, an algorithm with a replay buffer continues to train until num_iterations.

    Collecting:
        unroll_length: steps of each environment in an iteration. A fraction alternates between the two nearest integers
            so that the mean is right.
        unroll_with_grad: record gradients while acting, for an on-policy part of an off-policy algorithm.
        use_rollout_state: start training sequences from the recurrent state stored while acting, instead of zeros.
        async_unroll: act in a separate process, in parallel with training. The actor then uses older parameters than
            the learner, so on-policy algorithms that do not correct for this raise an error.
        max_unroll_length: with async_unroll and unroll_length 0, the maximum number of steps of each environment in an
            iteration. The iteration takes the steps available, possibly none.
        unroll_queue_size: with async_unroll or num_ray_workers, the number of steps of each environment that may wait
            for training. Actors wait while the queue is full.
        unroll_step_interval: with async_unroll, seconds from one step to the next, unless steps take longer; 0 for as
            fast as possible.
        unroll_parameter_update_period: with async_unroll or num_ray_workers, iterations between two transfers of the
            weights to the actors.
        num_ray_workers: act in this number of processes on a Ray cluster, in parallel with training, each with
            ``num_parallel_environments`` environments; 0 to act in this process. Supports the same algorithms as
            async_unroll and needs the extra ``ray``.
        ray_address: with num_ray_workers, 'host:port' of a running cluster, 'auto' for the cluster of this machine, or
            'local' to start one here that ends with the run. '' uses the environment variable ``RAY_ADDRESS``, or
            'local' if it is not set.

    Replay:
        initial_collect_steps: environment steps, summed over environments, before the first update.
        replay_buffer_length: steps stored for each environment; with clear_replay_buffer, one unroll is stored
            instead.
        whole_replay_buffer_training: train on everything in the buffer instead of on samples.
        clear_replay_buffer: with whole_replay_buffer_training, clear the buffer after training on it.
        priority_replay: sample sequences in proportion to their priorities.
        priority_replay_alpha: exponent of the priorities, a number or a schedule. 0 samples uniformly.
        priority_replay_beta: exponent of the importance weights, a number or a schedule. 1 corrects fully for the
            non-uniform sampling.
        priority_replay_eps: added to every priority, so that every sequence can be sampled.
        normalize_importance_weights_by_max: divide the importance weights by the largest of the minibatch.
        offline_buffer_dir: one stored dataset or several to sample training data from; see docs/offline.md. With
            unroll_length 0 the run trains on them alone.
        offline_buffer_length: maximum number of steps to load of each dataset; None for all.
        rl_train_after_update_steps: with a dataset, train on it alone, and collect nothing, until the global counter
            reaches this value.
        rl_train_every_update_steps: with a dataset, train on collected data as well only in iterations that begin when
            the global counter is a multiple of this. Every iteration collects.
        offline_mini_batch_size: sequences from the datasets in a minibatch, in addition to ``mini_batch_size``
            sequences of collected data; None for the same number.
        offline_loss_weight: factor of the mean loss on the datasets, which is added to the loss on collected data; a
            number or a schedule. 0 ignores the datasets.

    Updates:
        num_updates_per_train_iter: updates in an iteration, or passes over the buffer with
            whole_replay_buffer_training.
        mini_batch_length: steps of a training sequence. None uses the unroll length and needs
            whole_replay_buffer_training.
        mini_batch_size: sequences in a minibatch; None uses the number of environments.
        temporally_independent_train_step: call train_step once on ``[T * B]`` steps instead of T times. None does so if
            the algorithm has no recurrent state.
        update_counter_every_mini_batch: count updates instead of iterations, so that each update can be summarized.
        ddp_paras_check_interval: with several processes, iterations between two checks that all hold the same weights;
            0 for none.

    Evaluation:
        evaluate: evaluate during training.
        num_evals: evaluations in the whole run; replaces eval_interval.
        eval_interval: iterations between two evaluations.
        epsilon_greedy: probability of sampling an action, instead of taking the best one, while evaluating.
        eval_uncertainty: also evaluate uncertainty, in each evaluation and after training; only for supervised
            learning.
        num_eval_episodes: episodes of an evaluation.
        num_eval_environments: environments that an evaluation runs in parallel.
        eval_video_steps: length in steps of a video of each evaluation, written to its event file; 0 for none.
        async_eval: evaluate in a separate process while training continues. Callbacks that react to evaluations need
            them in the training process; with such callbacks this has no effect.

    Logging:
        num_summaries: summaries in the whole run; replaces summary_interval.
        summary_interval: summary steps between two summaries.
        summarize_first_interval: also write a summary at each step of the first interval.
        summary_axis: horizontal axis of summaries: 'env_steps', or 'global_counter' for iterations (updates with
            update_counter_every_mini_batch). The latter also writes the metrics against each step metric,
            below ``Metrics_vs_``. None chooses 'env_steps' if the run acts, uses no dataset, does not limit both steps
            and iterations, and does not count updates.
        loggers: loggers besides ``progress.csv``: 'tensorboard' (event files), 'wandb', 'mlflow' (separate packages).
        summaries_flush_secs: flush event files after this number of seconds.
        summary_max_queue: also flush event files after this number of summaries.
        metric_min_buffer_size: minimum number of episodes that average metrics are computed over.
        debug_summaries: write more summaries, for debugging.
        summarize_grads_and_vars: write histograms of weights and gradients.
        summarize_gradient_noise_scale: write the noise scale of the gradient.
        summarize_action_distributions: write statistics of the action distributions.
        summarize_output: write histograms and means of the outputs of all networks.
        code_snapshots: source files to store as text, relative to the alfx package.
        profiling: profile the run with cProfile and write the result into the run folder.

    Checkpoints:
        num_checkpoints: checkpoints to keep, spread over the run; of those written every two minutes, two are kept.
        replay_checkpoint_megabytes: save the replay buffer in the latest two checkpoints if its contents take at most
            this many MiB (2**20 bytes); 0 never saves it. A run resumed without its contents starts with an empty
            buffer and does not repeat exactly. ``ReplayBuffer.enable_checkpoint`` overrides this where it is set.
        save_environment_state: save the state of the environments, so that a resumed run continues in the middle of its
            episodes. False starts new episodes instead. The state of an environment that alfx does not know is verified
            once per run by another process, which constructs it and repeats some steps.
        environment_checkpoint_megabytes: save the state of the environments only if it takes at most this many MiB.
        confirm_checkpoint_upon_crash: ask before writing a checkpoint after a crash (only at a terminal).
        no_thread_env_for_conf: never create an extra environment to write the configuration. No environment is ever
            created for this, so the value has no effect.

    Speed:
        num_threads: threads of torch; None chooses by the size of the networks.
        float32_matmul_precision: 'highest', 'high' or 'medium' as for ``torch.set_float32_matmul_precision``; None
            measures and chooses at the start.
        compile: compile the update into one function; the algorithm has to execute the same operations in every update.
            Compiling takes a few seconds at first and pays off for small networks. On a GPU the function becomes a CUDA
            graph if it can be captured. On a CPU the rollout policy of SAC, DDPG, TD3 and DQN is compiled as well,
            unless it is recurrent.
        enable_amp: automatic mixed precision: networks compute in bfloat16, or in float16 with scaled losses on GPUs
            without bfloat16; parameters, distributions, losses and statistics stay in float32. It pays off on GPUs with
            tensor cores and for large networks; on CPUs without bfloat16 instructions it has no effect.
        empty_cache: release unused GPU memory before each iteration.

    Raises:
        ConfError: a value has the wrong type, is out of range, conflicts with another, or asks for something that this
            version does not support. All mistakes are listed, each with its line of the conf.
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
    callbacks: Sequence[Any] = setting((), may_change=True)
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
    eval_interval: int = setting(10, minimum=0, may_change=True)
    epsilon_greedy: float = setting(0.0, minimum=0, maximum=1, may_change=True)
    eval_uncertainty: bool = setting(False, may_change=True)
    num_eval_episodes: int = setting(10, minimum=1, may_change=True)
    num_eval_environments: int = setting(1, minimum=1, may_change=True)
    eval_video_steps: int = setting(0, minimum=0, may_change=True)
    async_eval: bool = setting(True, may_change=True)
    ddp_paras_check_interval: int = setting(0, minimum=0)
    num_summaries: Optional[int] = setting(None, minimum=1, may_change=True)
    summary_interval: int = setting(50, minimum=0, may_change=True)
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
    save_environment_state: bool = setting(True, may_change=True)
    environment_checkpoint_megabytes: float = setting(32, minimum=0, may_change=True)

    def __post_init__(self) -> None:
        if isinstance(self.root_dir, os.PathLike):
            self.root_dir = os.fspath(self.root_dir)
        self._data_transformer: Any = None
        problems = self._wrong_values() or self._conflicts() + self._missing_files()
        if problems:
            raise gin_utils.ConfError(problems)
        self.root_dir = os.path.expanduser(self.root_dir)

    def freeze(self) -> None:
        """Reject changes from now on; the trainer calls this when training starts.

        By then parts of the run have been built from the configuration, so a later change would take effect only in
        part.
        """
        self.__dict__['_is_frozen'] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if '_is_frozen' in self.__dict__:
            raise AttributeError(f'TrainerConfig.{name} cannot be changed to {value!r} once training has started; '
                                 'set it in the conf, or before the trainer is created')
        super().__setattr__(name, value)

    @property
    def data_transformer(self) -> Any:
        """Data transformer of the run; None if the conf names none.

        The trainer creates it from ``data_transformer_ctor`` once it knows the observation spec, and sets it here.

        Raises:
            RuntimeError: the conf names a transformer, but no trainer has set it yet.
        """
        if self._data_transformer is None and self.data_transformer_ctors():
            raise RuntimeError('TrainerConfig.data_transformer is set by the trainer once it knows the observation '
                               'spec, which no trainer has done yet; without a trainer, set it to '
                               'create_data_transformer(config.data_transformer_ctors(), observation_spec)')
        return self._data_transformer

    @data_transformer.setter
    def data_transformer(self, transformer: Any) -> None:
        self._data_transformer = transformer

    @property
    def trains_on_whole_unrolls(self) -> bool:
        """Return whether each unroll is stored, trained on as a whole, and then dropped."""
        return self.whole_replay_buffer_training and self.clear_replay_buffer

    def require_collection(self, owner: str) -> None:
        """Raise ``ConfError`` if the run collects no experience, because ``owner`` learns from nothing else."""
        if not self.collects:
            raise gin_utils.ConfError([problem_at('TrainerConfig', 'unroll_length', f'= 0, but {owner} learns only '
                                                  'from collected experience', f'set it to 1, or remove {owner}')])

    @property
    def collects(self) -> bool:
        """Return whether the run acts in environments."""
        return bool(self.unroll_length or self.max_unroll_length)

    @property
    def summarizes_over_env_steps(self) -> bool:
        """Return whether environment steps are the horizontal axis of summaries."""
        if self.summary_axis is not None:
            return self.summary_axis == 'env_steps'
        return (self.ml_type == 'rl' and self.collects and not self.offline_datasets()
                and not self.update_counter_every_mini_batch and not (self.num_iterations and self.num_env_steps))

    def offline_datasets(self) -> tuple[str, ...]:
        """Return ``offline_buffer_dir`` as a tuple; empty if there is none."""
        found = self.offline_buffer_dir
        return () if found is None else (found, ) if isinstance(found, str) else tuple(found)

    @property
    def async_actor_field(self) -> str:
        """Field that enables asynchronous actors: 'async_unroll' or 'num_ray_workers'; '' if this process acts."""
        return 'async_unroll' if self.async_unroll else 'num_ray_workers' if self.num_ray_workers else ''

    def required_algorithm_ctor(self) -> Callable[..., Any]:
        """Return ``algorithm_ctor``.

        Raises:
            ConfError: it is not set.
        """
        if self.algorithm_ctor is None:
            raise gin_utils.ConfError([problem_at(
                _OWNER, 'algorithm_ctor', 'is not set',
                'name the algorithm in the conf: TrainerConfig.algorithm_ctor = @Agent')])
        return self.algorithm_ctor

    def data_transformer_ctors(self) -> tuple[Callable, ...]:
        """Return ``data_transformer_ctor`` as a tuple; empty if there is none."""
        if self.data_transformer_ctor is None:
            return ()
        if callable(self.data_transformer_ctor):
            return (self.data_transformer_ctor,)
        return tuple(self.data_transformer_ctor)

    def _wrong_values(self) -> list[gin_utils.Problem]:
        problems: list[Any] = [
            problem_at(_OWNER, name, 'must be an int >= 1, found int 0', f'set it, or TrainerConfig.{number}')
            for name, number in (('summary_interval', 'num_summaries'), ('eval_interval', 'num_evals'))
            if getattr(self, name) == 0 and getattr(self, number) is None]
        problems += wrong_values(self, _OWNER)
        if self.algorithm_ctor is not None:
            problems.append(problem_of(_OWNER, 'algorithm_ctor', self.algorithm_ctor, callable))
        problems += [problem_of(_OWNER, 'loggers', name, str, choices=('tensorboard', *TRACKERS))
                     for name in ([] if isinstance(self.loggers, str) else self.loggers)]
        ctors = self.data_transformer_ctor
        several = ctors if isinstance(ctors, (list, tuple)) else () if ctors is None else (ctors,)
        for ctor in several:
            if not callable(ctor) or isinstance(ctor, torch.nn.Module):
                hint = f'write @{type(ctor).__name__} without ()' if isinstance(ctor, torch.nn.Module) else ''
                problems.append(problem_at(_OWNER, 'data_transformer_ctor',
                                           f'must contain constructors, found {describe(ctor)}', hint))
        return [problem for problem in problems if problem is not None]

    def _conflicts(self) -> list[gin_utils.Problem]:
        problems = []

        def conflict(name, message, hint):
            problems.append(problem_at(_OWNER, name, message, hint))

        if self.ml_type == 'sl' and self.num_iterations == 0:
            conflict('num_iterations', 'is 0, but supervised learning needs a number of epochs', 'set it to 1 or more')
        elif self.num_iterations == 0 and self.num_env_steps == 0 and not self.num_episodes:
            conflict('num_iterations', 'and TrainerConfig.num_env_steps are both 0: the run would never end',
                     'set one of them')
        for name in ('num_summaries', 'num_evals'):
            if self.num_episodes and getattr(self, name) is not None:
                conflict(name, f'= {getattr(self, name)} needs the number of iterations of the run, which '
                         f'is not known with TrainerConfig.num_episodes = {self.num_episodes}',
                         f"set it to None and {'summary' if name == 'num_summaries' else 'eval'}_interval instead")
        if self.ml_type == 'sl' and self.num_episodes:
            conflict('num_episodes', f"= {self.num_episodes}, but TrainerConfig.ml_type = 'sl' has no episodes",
                     'leave it out')
        if self.stop_at_return is not None and not (self.evaluate and self.ml_type == 'rl'):
            conflict('stop_at_return', f'= {self.stop_at_return:g} needs evaluations, but the run has none',
                     'set TrainerConfig.evaluate = True, or leave it out')
        if self.ml_type == 'rl':
            self._add_rl_conflicts(conflict)
            if self.eval_uncertainty:
                conflict('eval_uncertainty', "= True has no effect without TrainerConfig.ml_type = 'sl'",
                         'leave it out')
        elif self.async_actor_field:
            conflict(self.async_actor_field, f'= {getattr(self, self.async_actor_field)!r}, but '
                     "TrainerConfig.ml_type = 'sl' has no environments", 'leave it out')
        self._add_acting_conflicts(conflict)
        if self.summary_axis == 'env_steps' and not (self.ml_type == 'rl' and self.collects):
            conflict('summary_axis', "= 'env_steps', but no environment is stepped: all summaries would be at 0",
                     "leave it out, or set it to 'global_counter'")
        return problems

    def _add_acting_conflicts(self, conflict: Callable[[str, str, str], None]) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}

        def needs(condition: bool, requirement: str, *names: str) -> None:
            for name in names:
                if not condition and getattr(self, name) != defaults[name]:
                    conflict(name, f'= {getattr(self, name)!r} has no effect without {requirement}',
                             f'set {requirement}, or leave {name} out')

        needs(self.async_unroll, 'TrainerConfig.async_unroll = True', 'max_unroll_length', 'unroll_step_interval')
        needs(bool(self.async_actor_field), 'TrainerConfig.async_unroll = True or TrainerConfig.num_ray_workers',
              'unroll_queue_size', 'unroll_parameter_update_period')
        needs(bool(self.num_ray_workers), 'TrainerConfig.num_ray_workers', 'ray_address')
        if self.async_unroll and self.num_ray_workers:
            conflict('num_ray_workers', f'= {self.num_ray_workers} and TrainerConfig.async_unroll = True: expected '
                     'only one of them', 'leave out one of the two')
        elif self.async_unroll and self.unroll_length == 0 and self.max_unroll_length == 0:
            conflict('max_unroll_length', 'and TrainerConfig.unroll_length are both 0: nothing would be collected',
                     'set one of them')
        elif self.async_unroll and self.unroll_length and self.max_unroll_length:
            conflict('max_unroll_length', f'= {self.max_unroll_length} has no effect without '
                     f'TrainerConfig.unroll_length = 0, found {self.unroll_length}', 'leave out one of the two')
        if self.async_actor_field and self.unroll_with_grad:
            conflict(self.async_actor_field, f'= {getattr(self, self.async_actor_field)!r} and '
                     'TrainerConfig.unroll_with_grad = True: gradients cannot be sent from the actors to the learner',
                     'leave out one of the two')

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
                     'sequences', 'set it to the length of the sequences, 2 for one-step temporal-difference learning')
        if self.priority_replay and self.whole_replay_buffer_training:
            conflict('priority_replay', '= True has no effect with TrainerConfig.whole_replay_buffer_training = True, '
                     'which trains on every step once', 'set whole_replay_buffer_training to False')

    def _add_offline_conflicts(self, conflict: Callable[[str, str, str], None]) -> None:
        defaults = {field.name: field.default for field in dataclasses.fields(self)}

        def given(*names: str) -> list[str]:
            return [name for name in names if getattr(self, name) != defaults[name]]

        schedule = 'rl_train_after_update_steps', 'rl_train_every_update_steps'
        if not self.offline_datasets():
            for name in given('offline_buffer_length', 'offline_mini_batch_size', 'offline_loss_weight', *schedule):
                conflict(name, f'= {getattr(self, name)!r} has no effect without TrainerConfig.offline_buffer_dir',
                         f'set offline_buffer_dir, or leave {name} out')
            return
        if self.whole_replay_buffer_training:
            conflict('whole_replay_buffer_training', '= True: minibatches are sampled from '
                     'TrainerConfig.offline_buffer_dir', 'set it to False')
        if self.use_rollout_state:
            conflict('use_rollout_state', '= True: datasets contain no recurrent states', 'set it to False')
        if self.collects:
            return
        for name in given(*schedule, 'offline_mini_batch_size', 'offline_loss_weight', 'initial_collect_steps',
                          'num_env_steps'):
            conflict(name, f'= {getattr(self, name)!r} has no effect with TrainerConfig.unroll_length = 0, which '
                     'collects nothing', 'leave it out, or set unroll_length')
        if not self.num_iterations:
            conflict('num_iterations', 'is 0: a run that collects nothing would never end', 'set it to 1 or more')

    def _missing_files(self) -> list[gin_utils.Problem]:
        package = os.path.dirname(os.path.abspath(__file__))
        missing = [path for path in self.code_snapshots or () if not os.path.isfile(os.path.join(package, path))]
        return [problem_at(_OWNER, 'code_snapshots', f'names {path!r}, which is not in {package}',
                           "give paths relative to the alfx package, such as 'algorithms/agent.py'")
                for path in missing]
