"""Stored experience: episodes in files, their checks, and the replay buffer that holds them for training.

A dataset consists of :class:`~alfx.offline.dataset_episodes.Episodes` and metadata.
:mod:`~alfx.offline.dataset_sources` reads datasets of all formats, :mod:`~alfx.offline.dataset_folder` is alfx's own
format, and :mod:`~alfx.offline.recorder` records new datasets. For training, each dataset becomes a ring of an ordinary
replay buffer: :mod:`~alfx.offline.buffer`.
"""
