"""The package re-exports the names of its modules."""
import subprocess
import sys

import pytest

import alfx.algorithms
import alfx.networks
from alfx.networks import encoding_networks, network


def test_a_network_can_be_imported_from_the_package():
    from alfx.networks import CriticNetwork, EncodingNetwork, Network, TemporalPool
    assert EncodingNetwork is encoding_networks.EncodingNetwork and Network is network.Network
    assert CriticNetwork.__module__ == 'alfx.networks.critic_networks' and TemporalPool.__name__ == 'TemporalPool'


def test_an_unknown_name_in_the_package_raises():
    with pytest.raises(AttributeError, match="'alfx.networks' has no attribute 'EncodngNetwork'"):
        alfx.networks.EncodngNetwork
    with pytest.raises(ImportError):
        from alfx.networks import torch  # noqa: F401


def test_importing_the_package_imports_no_network_module():
    done = subprocess.run([sys.executable, '-c', 'import alfx, alfx.networks, sys; '
                           'sys.exit(any(name.startswith("alfx.networks.") for name in sys.modules))'], timeout=120)
    assert done.returncode == 0


def test_other_packages_export_their_classes_lazily():
    from alfx.algorithms import Agent, SacAlgorithm
    from alfx.experience_replayers import ReplayBuffer
    assert Agent.__module__ == 'alfx.algorithms.agent' and SacAlgorithm.__name__ == 'SacAlgorithm'
    assert ReplayBuffer.__module__ == 'alfx.experience_replayers.replay_buffer'
    with pytest.raises(AttributeError, match="'alfx.algorithms' has no attribute 'Agnt'"):
        alfx.algorithms.Agnt
