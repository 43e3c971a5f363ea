"""Stored experience: episodes in files, what they have to be like, and the replay buffer that they become.

A dataset is :class:`~alfx.offline.dataset_episodes.Episodes` and what is known of them;
:mod:`~alfx.offline.dataset_sources` reads one
from wherever it lies, :mod:`~alfx.offline.dataset_folder` is the format of our own, :mod:`~alfx.offline.recorder`
makes new ones. For training, each dataset becomes a ring of an ordinary replay buffer: :mod:`~alfx.offline.buffer`.
"""
