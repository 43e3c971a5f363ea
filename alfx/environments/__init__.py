"""Environments: gymnasium vector environments in, batched :class:`~alfx.data_structures.TimeStep` out.

Start at :mod:`alfx.environments.utils` (``create_environment``) for how one is made, at
:mod:`alfx.environments.alf_environment` for what it promises, and at
:mod:`alfx.environments.gym_vector_environment` for how gymnasium is turned into it.
"""
