"""Metrics that are logged during a run; see :mod:`alfx.metrics.metrics`."""

from alfx.metrics.metrics import (AverageDiscountedReturnMetric, AverageEnvInfoMetric, AverageEpisodeLengthMetric,
                                  AverageEpisodicAggregationMetric, AverageReturnMetric, AverageRewardMetric,
                                  EnvironmentSteps, EpisodicStartAverageDiscountedReturnMetric, MetricBuffer,
                                  NumberOfEpisodes, StepMetric, update_metrics)

__all__ = ['AverageDiscountedReturnMetric', 'AverageEnvInfoMetric', 'AverageEpisodeLengthMetric',
           'AverageEpisodicAggregationMetric', 'AverageReturnMetric', 'AverageRewardMetric', 'EnvironmentSteps',
           'EpisodicStartAverageDiscountedReturnMetric', 'MetricBuffer', 'NumberOfEpisodes', 'StepMetric',
           'update_metrics']
