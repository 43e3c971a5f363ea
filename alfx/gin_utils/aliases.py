"""Replacements for names that other libraries use and alfx does not have.

Most names in confs of the Agent Learning Framework exist in alfx as well. The others are looked up in :data:`INSTEAD`,
and names of parameters in Stable-Baselines3, CleanRL, RLlib and Tianshou in :data:`ELSEWHERE`, before the nearest name
is suggested, because the most similar name is not always the right one.
"""
from collections.abc import Collection

_NETWORK_CLASS = ('write {0}_ctor, or {0}_cls if the algorithm has that parameter, and the network without '
                  'parentheses: the algorithm creates its networks for its own specs')
_PACKAGE = ("load tasks of other packages by the id that they register with gymnasium: create_environment.env_load_fn "
            "= @suite_gym.load, create_environment.env_name = 'package:Id'")
_FLOW = ('write @ActorDistributionNetwork and ActorDistributionNetwork.continuous_projection_net_ctor = '
         '@MixtureProjectionNetwork for a multimodal policy, or @NormalProjectionNetwork and '
         'NormalProjectionNetwork.scale_distribution = True for a squashed one')
_ENSEMBLE = 'layers that share weights within an ensemble are not available: write {}, whose members share no weights'

INSTEAD = {
    # layers and networks
    'FCBatchEnsemble': _ENSEMBLE.format('@ParallelFC'),
    'Conv2DBatchEnsemble': _ENSEMBLE.format('@ParallelConv2D'),
    'CompositionalFC': 'write @FC, or @ParallelFC for several layers at once: sums of weights are not available',
    'CausalConv1D': 'write @FrameStacker in TrainerConfig.data_transformer_ctor to observe several past steps, or '
                    '@LSTMEncodingNetwork for a recurrent network',
    **dict.fromkeys(('TransformerBlock', 'TransformerNetwork'), 'attention is not available: write '
                    '@LSTMEncodingNetwork for a recurrent network, or import your own'),
    'SocialAttentionNetwork': 'attention is not available: write @EncodingNetwork and '
                              'EncodingNetwork.preprocessing_combiner = @NestConcat()',
    **dict.fromkeys(('LatentActorDistributionNetwork', 'RealNVPNetwork'), _FLOW),
    'SummarizeGradient': 'remove the layer and write TrainerConfig.summarize_grads_and_vars = True',
    'PeriodicReset': 'write TrainerConfig.callbacks = (@ResetNetworks(), ), and ResetNetworks.at_env_steps',
    # transformations of experience
    'cast_transformer': 'write @Cast() as input preprocessor of each network, for example '
                        'ActorDistributionNetwork.input_preprocessors = @Cast()',
    'image_scale_transformer': 'write TrainerConfig.data_transformer_ctor = @ImageScaleTransformer',
    'reward_clipping': 'write @RewardClipping in TrainerConfig.data_transformer_ctor, and RewardClipping.minmax',
    'reward_scaling': 'write @RewardScaling in TrainerConfig.data_transformer_ctor, and RewardScaling.scale',
    **dict.fromkeys(('NormalizeObservation', '*.norm_obs', '*.normalize_observation', '*.normalize_observations'),
                    'write @ObservationNormalizer in TrainerConfig.data_transformer_ctor'),
    **dict.fromkeys(('NormalizeReward', '*.norm_reward', '*.normalize_reward', '*.normalize_rewards'),
                    'write @DiscountedReturnScaling in TrainerConfig.data_transformer_ctor'),
    '*.observation_transformer': 'write TrainerConfig.data_transformer_ctor, with @ImageScaleTransformer for images '
                                 'and @FrameStacker to stack several frames',
    '*.reward_shaping_fn': 'write @RewardScaling, @RewardClipping or @RewardShifting in '
                           'TrainerConfig.data_transformer_ctor',
    # sizes
    'active_action_target_entropy': 'remove it: the default target_entropy is of the same kind, with '
                                    'calc_default_target_entropy.min_prob; or write a number',
    'flattened_size': 'remove it if it is the input size of a network, which is inferred; otherwise write the number',
    'get_states_shape': 'remove it if it is the input shape of a network, which is inferred; otherwise write '
                        '@get_observation_spec()',
    'get_vocab_size': 'write the number',
    # algorithms
    **{f'*.{name}': _NETWORK_CLASS.format(name)
       for name in ('actor_network', 'critic_network', 'q_network', 'value_network')},
    **{f'{owner}.{name}': f'write {owner}.observation_{other}, and {owner}.action_{other} for the action'
       for owner in ('CriticNetwork', 'CriticRNNNetwork', 'CriticQuantileNetwork')
       for name, other in (('input_preprocessors', 'input_processors'),
                           ('preprocessing_combiner', 'preprocessing_combiner'))},
    '*.gamma': 'the discount is a parameter of the loss: write OneStepTDLoss.gamma for critics, ActorCriticLoss.gamma '
               'or PPOLoss.gamma for actor-critics',
    'SacAlgorithm.ent_coef': 'the temperature is learned: write SacAlgorithm.initial_log_alpha, the logarithm of its '
                             'initial value, and SacAlgorithm.target_entropy',
    **dict.fromkeys(('DqnAlgorithm.n_step', 'DqnAlgorithm.n_steps'),
                    'write TrainerConfig.mini_batch_length = n + 1, and the critic loss as in rainbow.gin'),
    '*.use_parallel_network': 'remove it: the networks of an ensemble are batched automatically where possible',
    'make_ddp_performer': 'remove it: gradients are averaged over processes without DistributedDataParallel',
    'PPGAuxPhaseLoss.gamma': 'remove it: the targets of the values are the returns of PPOLoss.gamma',
    **dict.fromkeys(('load_mnist', 'load_cifar10'), 'write @load_digits, or a function of your own module'),
    **dict.fromkeys(('*.use_wandb', '*.entity', '*.project'),
                    "write TrainerConfig.loggers = ('tensorboard', 'wandb'): docs/trackers.md"),
    'BestEvalChecker': 'remove it with its parameter, and write TrainerConfig.callbacks = (@KeepBestCheckpoint(), ), '
                       'which needs TrainerConfig.evaluate = True',
    **dict.fromkeys(('*.device', '*.num_gpus'), 'remove it: choose the device on the command line, with --device=cuda'),
    # environments
    '*.sparse_reward': 'write a wrapper that adds 1 to the reward and ends the episode at the goal, in '
                       'gym_env_wrappers, and for hindsight HindsightExperienceTransformer.reward_fn',
    '*.torch_env_wrappers': 'write alf_env_wrappers',
    '*.wrap_with_process': 'remove it: create_environment.nonparallel decides whether environments run in processes',
    'suite_babyai': 'write create_environment.env_load_fn = @suite_minigrid.load, which also has the ids of BabyAI',
    **dict.fromkeys(('suite_carla', 'suite_dmc', 'suite_dmlab', 'suite_go', 'suite_highway', 'suite_mario',
                     'suite_metadrive', 'suite_procgen', 'suite_safety_gym', 'suite_socialbot'), _PACKAGE),
}
"""``Name``, ``Owner.parameter`` or ``*.parameter`` (any owner without that parameter), and the hint for each."""


ELSEWHERE = {
    name: target
    for target, names in {
        'Adam.lr': 'learning_rate lr policy_lr q_lr actor_lr critic_lr',
        'Adam.gradient_clipping': 'max_grad_norm grad_clip grad_clip_norm', 'PPOLoss.gamma': 'discount_factor discount',
        'PPOLoss.importance_ratio_clipping': 'clip_range clip_coef clip_param clip_ratio eps_clip clip_eps e_clip',
        'PPOLoss.value_clipping': 'clip_range_vf vf_clip_param clip_vloss value_clip',
        'PPOLoss.entropy_regularization': 'ent_coef entropy_coef entropy_coeff entropy_cost entropy_bonus',
        'PPOLoss.td_loss_weight': 'vf_coef vf_loss_coeff value_coef value_loss_coef',
        'PPOLoss.normalize_advantages': 'normalize_advantage norm_adv advantage_normalization',
        'PPOLoss.td_lambda': 'gae_lambda lambda_ lam',
        'TrainerConfig.num_env_steps': 'total_timesteps total_steps timesteps_total num_timesteps max_timesteps steps '
                                       'max_steps total_env_steps n_timesteps step_per_epoch timesteps num_frames',
        'TrainerConfig.unroll_length': 'n_steps num_steps rollout_length rollout_fragment_length train_freq '
                                       'train_frequency step_per_collect n_step',
        'TrainerConfig.num_updates_per_train_iter': 'n_epochs num_epochs num_epoch update_epochs num_sgd_iter '
                                                    'gradient_steps repeat_per_collect utd_ratio',
        'TrainerConfig.mini_batch_size': 'batch_size minibatch_size num_minibatches train_batch_size '
                                         'train_batch_size_per_learner sgd_minibatch_size',
        'TrainerConfig.replay_buffer_length': 'buffer_size replay_size replay_buffer_size memory_size capacity',
        'TrainerConfig.initial_collect_steps': 'learning_starts start_steps warmup_steps start_timesteps '
                                              'random_timesteps',
        'TrainerConfig.random_seed': 'seed random_state', 'TrainerConfig.num_episodes': 'total_episodes',
        'TrainerConfig.num_checkpoints': 'checkpoint_interval checkpoint_freq checkpoint_frequency save_freq '
                                         'save_interval save_every',
        'TrainerConfig.eval_interval': 'eval_freq evaluation_interval eval_every',
        'TrainerConfig.num_eval_episodes': 'n_eval_episodes eval_episodes evaluation_duration episode_per_test '
                                           'num_test_episodes',
        'TrainerConfig.summary_interval': 'log_interval log_freq log_every', 'TrainerConfig.root_dir': 'logdir log_dir',
        'create_environment.env_name': 'env_id env environment game task load.env_name',
        'create_environment.num_parallel_environments': 'n_envs num_envs num_workers num_env_runners training_num '
                                                        'num_envs_per_env_runner num_env env_num num_cpus',
        'suite_gym.load.max_episode_steps': 'max_episode_steps time_limit max_episode_length load.max_steps '
                                            'create_environment.max_steps',
        'suite_gym.load.gym_env_wrappers': 'create_environment.wrappers env_wrappers',
        'SacAlgorithm.num_critic_replicas': 'n_critics num_critics', 'SacAlgorithm.target_update_tau': 'tau polyak',
        'RewardScaling.scale': 'reward_scale', 'FrameStacker.stack_size': 'frame_stack num_stack n_stack framestack',
        'TrainerConfig.stop_at_return': 'early_stopping stop_reward reward_threshold',
        'suite_gym.load.env_args': 'env_kwargs env_config make_kwargs create_environment.env_args',
        'SacAlgorithm.target_update_period': 'target_update_interval target_network_frequency target_update_freq',
        'Td3Algorithm.target_noise': 'policy_noise target_policy_noise', 'Td3Algorithm.noise_clip': 'target_noise_clip',
        'Td3Algorithm.exploration_noise': 'act_noise action_noise expl_noise',
        'Td3Algorithm.policy_update_period': 'policy_delay policy_freq policy_frequency',
        'DqnAlgorithm.rollout_epsilon_greedy': 'exploration_fraction exploration_final_eps exploration_initial_eps '
                                               'start_e end_e epsilon_start epsilon_decay DqnAlgorithm.epsilon',
        'ActorDistributionNetwork.fc_layer_params': 'net_arch hidden_sizes hidden_dims hidden_dim hidden_layers '
                                                    'hidden_units fcnet_hiddens policy_kwargs',
        'ActorDistributionNetwork.activation': 'activation_fn fcnet_activation',
    }.items() for name in names.split()
}
"""Name of a parameter in other libraries, and the parameter of alfx."""


def instead_of(selector: str) -> str:
    """Return the hint for a configurable or module that does not exist; '' if the table has none."""
    return next((INSTEAD[part] for part in reversed(selector.split('.')) if part in INSTEAD), '')


def instead_of_parameter(owner: str, name: str, known: Collection[str] = ()) -> str:
    """Return the hint for a parameter that ``owner`` does not have; '' if the tables have none.

    Args:
        owner: name of the class or factory.
        name: name of the parameter, as written.
        known: parameters that ``owner`` has.
    """
    hint = INSTEAD.get(f'{owner}.{name}') or INSTEAD.get(f'*.{name}', '')
    target = ELSEWHERE.get(f'{owner}.{name}') or ELSEWHERE.get(name, '')
    if hint or not target:
        return hint
    own = target.rpartition('.')[2]
    return f"did you mean '{own}'?" if own in known else f'alfx calls it {target}'
