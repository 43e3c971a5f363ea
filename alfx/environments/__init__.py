"""Environments: gymnasium vector environments in, batched :class:`~alfx.data_structures.TimeStep` out.

Start at :mod:`alfx.environments.utils` (``create_environment``), which creates an environment. The interface is in
:mod:`alfx.environments.alf_environment`; :mod:`alfx.environments.gym_vector_environment` adapts gymnasium to it.
"""
