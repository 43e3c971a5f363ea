"""Former names work, with one warning each."""
import importlib
import subprocess
import sys
import warnings

import pytest
from helpers.dqn_agents import make_agent

from alfx import gin_utils
from alfx.algorithms.data_transformer import RewardBySource, SqilReward
from alfx.algorithms.dqn_algorithm import DqnAlgorithm
from alfx.engine.capabilities import Capabilities
from alfx.utils import renamed


@pytest.fixture(autouse=True)
def no_warnings_yet(monkeypatch):
    monkeypatch.setattr(renamed, '_warned', set())


@pytest.mark.parametrize('old, new', renamed.MODULES.items())
def test_a_module_can_be_imported_by_its_former_name(old, new, monkeypatch):
    monkeypatch.delitem(sys.modules, old, raising=False)
    with pytest.warns(FutureWarning, match=f'{old} has been renamed to {new}'):
        module = importlib.import_module(old)
    present = importlib.import_module(new)
    public = [name for name in vars(present) if not name.startswith('_')]
    assert public and all(getattr(module, name) is getattr(present, name) for name in public)


def test_former_names_of_classes_in_former_modules():
    program = ('from alfx.traits import Traits; from alfx.engine.mixing import Share; '
               'print(Traits.__name__, Share.__name__)')
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True)
    assert done.stdout == 'Capabilities BatchSource\n' and done.stderr.count('FutureWarning') == 2


def test_any_other_missing_module_raises_as_usual():
    with pytest.raises(ModuleNotFoundError, match='alfx.trainers.nothing'):
        importlib.import_module('alfx.trainers.nothing')


def test_overridden_methods_of_former_names_are_called():
    with pytest.warns(FutureWarning, match='own_traits has been renamed to own_capabilities'):
        class Old(DqnAlgorithm):
            def own_traits(self):
                return super().own_traits()._replace(fixed_update=False)

            def batch_shares(self, share):
                self.received = share
                return [share]

    agent = make_agent(algorithm_cls=Old)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        assert not agent.policy.capabilities.traceable_update
        assert agent.policy.capabilities.traceable_prediction
        for _ in range(3):
            agent.train_iter()
    assert agent.policy.received.batch_size == 8
    assert len({str(x.message) for x in caught}) == len(caught)


@pytest.mark.parametrize('old, new', renamed.METHODS.items())
def test_methods_can_be_called_by_former_names(old, new):
    policy = make_agent().policy
    if not hasattr(policy, new):
        with pytest.warns(FutureWarning), pytest.raises(AttributeError):
            getattr(policy, old)
        return
    with pytest.warns(FutureWarning, match=f'{old} has been renamed to {new}'):
        assert getattr(policy, old) == getattr(policy, new)


def test_fields_can_be_replaced_by_former_names():
    with pytest.warns(FutureWarning, match='fixed_update has been renamed to traceable_update'):
        capabilities = Capabilities()._replace(fixed_update=True)
    assert type(capabilities) is Capabilities and capabilities.traceable_update


def test_a_conf_may_bind_a_class_by_its_former_name(tmp_path):
    conf = tmp_path / 'old.gin'
    conf.write_text("include 'sqil_pendulum.gin'\nTrainerConfig.data_transformer_ctor = @RewardBySource\n"
                    'RewardBySource.offline = 2.0\n')
    with gin_utils.loaded(str(conf), []), pytest.warns(FutureWarning, match='SqilReward'):
        transformer = RewardBySource()
    assert isinstance(transformer, SqilReward) and transformer._offline == 2.0
