"""Replacements for names that confs of the Agent Learning Framework use and alfx does not have.

Most names of such confs exist in alfx as well. The others are looked up in one table, :data:`INSTEAD`, before the
nearest name is suggested, because the most similar name is not always the right one.
"""

__all__ = ['INSTEAD', 'instead_of', 'instead_of_parameter']

_NETWORK_CLASS = ('write {0}_ctor, or {0}_cls if the algorithm has that parameter, and the network without '
                  'parentheses: the algorithm creates its networks for its own specs')
_PACKAGE = ("load tasks of other packages by the id that they register with gymnasium: create_environment.env_load_fn "
            "= @suite_gym.load, create_environment.env_name = 'package:Id'")
_FLOW = ('write @ActorDistributionNetwork and ActorDistributionNetwork.continuous_projection_net_ctor = '
         '@MixtureProjectionNetwork for a policy of several modes, or @NormalProjectionNetwork and '
         'NormalProjectionNetwork.scale_distribution = True for a squashed one')
_ENSEMBLE = 'layers that share weights within an ensemble are not available: write {}, whose members share no weights'

INSTEAD = {
    # layers and networks
    'FCBatchEnsemble': _ENSEMBLE.format('@ParallelFC'),
    'Conv2DBatchEnsemble': _ENSEMBLE.format('@ParallelConv2D'),
    'CompositionalFC': 'write @FC, or @ParallelFC for several layers at once: sums of weights are not available',
    'CausalConv1D': 'write @FrameStacker in TrainerConfig.data_transformer_ctor to observe several past steps, or '
                    '@LSTMEncodingNetwork for a recurrent network',
    'TransformerBlock': 'attention is not available: write @LSTMEncodingNetwork for a recurrent network, or import '
                        'your own layer',
    'TransformerNetwork': 'attention is not available: write @LSTMEncodingNetwork for a recurrent network, or import '
                          'your own network',
    'SocialAttentionNetwork': 'attention is not available: write @EncodingNetwork and '
                              'EncodingNetwork.preprocessing_combiner = @NestConcat()',
    'LatentActorDistributionNetwork': _FLOW,
    'RealNVPNetwork': _FLOW,
    'SummarizeGradient': 'remove the layer and write TrainerConfig.summarize_grads_and_vars = True',
    'PeriodicReset': 'remove it: parameters are never reset during a run',
    # transformations of experience
    'cast_transformer': 'write @Cast() as input preprocessor: EncodingNetwork.input_preprocessors = @Cast()',
    'image_scale_transformer': 'write TrainerConfig.data_transformer_ctor = @ImageScaleTransformer; its parameters '
                               'are ImageScaleTransformer.fields, ImageScaleTransformer.min and '
                               'ImageScaleTransformer.max',
    'reward_clipping': 'write @RewardClipping in TrainerConfig.data_transformer_ctor, and RewardClipping.minmax',
    'reward_scaling': 'write @RewardScaling in TrainerConfig.data_transformer_ctor, and RewardScaling.scale',
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
    '*.actor_network': _NETWORK_CLASS.format('actor_network'),
    '*.critic_network': _NETWORK_CLASS.format('critic_network'),
    '*.q_network': _NETWORK_CLASS.format('q_network'),
    '*.value_network': _NETWORK_CLASS.format('value_network'),
    '*.gamma': 'the discount is a parameter of the loss: write OneStepTDLoss.gamma for critics, ActorCriticLoss.gamma '
               'or PPOLoss.gamma for actor-critics',
    '*.use_parallel_network': 'remove it: the networks of an ensemble are batched automatically where possible',
    # environments
    '*.torch_env_wrappers': 'write alf_env_wrappers',
    '*.wrap_with_process': 'remove it: create_environment.nonparallel decides whether environments run in processes',
    'suite_babyai': 'write create_environment.env_load_fn = @suite_minigrid.load, which also has the ids of BabyAI',
    'suite_procgen': _PACKAGE,
    **dict.fromkeys(('suite_carla', 'suite_dmc', 'suite_dmlab', 'suite_go', 'suite_highway', 'suite_mario',
                     'suite_metadrive', 'suite_safety_gym', 'suite_socialbot'), _PACKAGE),
}
"""``Name``, ``Owner.parameter`` or ``*.parameter`` (any owner without that parameter), and the hint for each."""


def instead_of(selector: str) -> str:
    """Return the hint for a configurable or module that does not exist; '' if the table has none."""
    return next((INSTEAD[part] for part in reversed(selector.split('.')) if part in INSTEAD), '')


def instead_of_parameter(owner: str, name: str) -> str:
    """Return the hint for a parameter that ``owner`` does not have; '' if the table has none."""
    return INSTEAD.get(f'{owner}.{name}') or INSTEAD.get(f'*.{name}', '')
