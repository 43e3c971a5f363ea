"""What to type for packages that are missing names packages that there are."""
import importlib.metadata

from alfx.utils.extras import pip_install


def test_the_packages_of_an_extra_are_named_and_not_alfx(monkeypatch):
    monkeypatch.setattr(importlib.metadata, 'requires', lambda _: [
        'torch>=2.6', 'ale-py>=0.10.1; extra == "atari"', "mujoco<3.4,>=3.1; extra == 'mujoco'"])
    assert pip_install('mujoco') == "pip install 'mujoco<3.4,>=3.1'"
    assert pip_install('atari') == "pip install 'ale-py>=0.10.1'"


def test_without_metadata_the_extra_of_the_sources_is_named(monkeypatch):
    def missing(_):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, 'requires', missing)
    assert pip_install('ray') == 'pip install -e .[ray]'
