"""What confs written for the Agent Learning Framework name and alfx does not have, and what to write here.

Most of the names of such a conf are names here too. What is not is looked up in one table, :data:`INSTEAD`, before the
nearest name is proposed: a name that is similar is not always what is meant.
"""

__all__ = ['INSTEAD', 'instead_of', 'instead_of_parameter']

_NETWORK_CLASS = ('write {0}_ctor, or {0}_cls of an algorithm that has this one, and the network without parentheses: '
                  'an algorithm makes its networks itself, for its specs')
_PACKAGE = ("load tasks of other packages by the id that they register with gymnasium: create_environment.env_load_fn "
            "= @suite_gym.load, create_environment.env_name = 'package:Id'")
_FLOW = ('write @ActorDistributionNetwork and ActorDistributionNetwork.continuous_projection_net_ctor = '
         '@MixtureProjectionNetwork for a policy of several modes, or @NormalProjectionNetwork and '
         'NormalProjectionNetwork.scale_distribution = True for a squashed one')
_ENSEMBLE = 'layers that share weights within an ensemble are not offered: write {}, of which each member has its own'

INSTEAD = {
    # layers and networks
    'FCBatchEnsemble': _ENSEMBLE.format('@ParallelFC'),
    'Conv2DBatchEnsemble': _ENSEMBLE.format('@ParallelConv2D'),
    'CompositionalFC': 'write @FC, or @ParallelFC for several at once: sums of weights are not offered',
    'CausalConv1D': 'write @FrameStacker in TrainerConfig.data_transformer_ctor to see a number of past steps, or '
                    '@LSTMEncodingNetwork to remember',
    'TransformerBlock': 'attention is not offered: write @LSTMEncodingNetwork to remember, or import a layer of yours',
    'TransformerNetwork': 'attention is not offered: write @LSTMEncodingNetwork to remember, or import a network of '
                          'yours',
    'SocialAttentionNetwork': 'attention is not offered: write @EncodingNetwork and '
                              'EncodingNetwork.preprocessing_combiner = @NestConcat()',
    'LatentActorDistributionNetwork': _FLOW,
    'RealNVPNetwork': _FLOW,
    'SummarizeGradient': 'leave the layer out and write TrainerConfig.summarize_grads_and_vars = True',
    'PeriodicReset': 'leave it out: no parameters begin anew in the course of a run',
    # what is done to experience
    'cast_transformer': 'write @Cast() as input preprocessor: EncodingNetwork.input_preprocessors = @Cast()',
    'image_scale_transformer': 'write TrainerConfig.data_transformer_ctor = @ImageScaleTransformer, which has '
                               'ImageScaleTransformer.fields, ImageScaleTransformer.min and ImageScaleTransformer.max',
    'reward_clipping': 'write @RewardClipping in TrainerConfig.data_transformer_ctor, and RewardClipping.minmax',
    'reward_scaling': 'write @RewardScaling in TrainerConfig.data_transformer_ctor, and RewardScaling.scale',
    '*.observation_transformer': 'write TrainerConfig.data_transformer_ctor, with @ImageScaleTransformer for images '
                                 'and @FrameStacker to see several of them',
    '*.reward_shaping_fn': 'write @RewardScaling, @RewardClipping or @RewardShifting in '
                           'TrainerConfig.data_transformer_ctor',
    # sizes
    'active_action_target_entropy': 'leave it out: without a target_entropy there is one of the same kind, with '
                                    'calc_default_target_entropy.min_prob; or write a number',
    'flattened_size': 'leave it out where a network takes its input: it knows the size; or write the number',
    'get_states_shape': 'leave it out where a network takes its input: it knows the shape; or write '
                        '@get_observation_spec()',
    'get_vocab_size': 'write the number',
    # algorithms
    '*.actor_network': _NETWORK_CLASS.format('actor_network'),
    '*.critic_network': _NETWORK_CLASS.format('critic_network'),
    '*.q_network': _NETWORK_CLASS.format('q_network'),
    '*.value_network': _NETWORK_CLASS.format('value_network'),
    '*.gamma': 'the discount belongs to the loss: write OneStepTDLoss.gamma for critics, ActorCriticLoss.gamma or '
               'PPOLoss.gamma for actor-critics',
    '*.use_parallel_network': 'leave it out: the networks of an ensemble are computed at once where that can be done',
    # environments
    '*.torch_env_wrappers': 'write alf_env_wrappers',
    '*.wrap_with_process': 'leave it out: create_environment.nonparallel says whether environments have processes',
    'suite_babyai': 'write create_environment.env_load_fn = @suite_minigrid.load, whose ids include those of BabyAI',
    'suite_procgen': _PACKAGE,
    **dict.fromkeys(('suite_carla', 'suite_dmc', 'suite_dmlab', 'suite_go', 'suite_highway', 'suite_mario',
                     'suite_metadrive', 'suite_safety_gym', 'suite_socialbot'), _PACKAGE),
}
"""``Name``, ``Owner.parameter`` or ``*.parameter`` (of whatever owner that does not have it) -> what to do."""


def instead_of(selector: str) -> str:
    """What to write in place of a configurable, or of a module, that there is not; '' if this is not known."""
    return next((INSTEAD[part] for part in reversed(selector.split('.')) if part in INSTEAD), '')


def instead_of_parameter(owner: str, name: str) -> str:
    """What to write in place of a parameter that ``owner`` does not have; '' if this is not known."""
    return INSTEAD.get(f'{owner}.{name}') or INSTEAD.get(f'*.{name}', '')
