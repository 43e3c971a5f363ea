"""Former names of classes, methods and modules, which keep working for two minor versions with one warning each."""
import importlib
import importlib.abc
import importlib.machinery
import warnings
from types import ModuleType
from typing import Any

_LAST_VERSION = '0.10'

METHODS = {
    'own_traits': 'own_capabilities', 'update_variant': 'graph_key', 'prediction_variant': 'prediction_graph_key',
    'batch_shares': 'batch_sources', 'columns_beside': 'demonstration_batch', 'connect': 'on_parts_built',
    'complete_unroll': 'postprocess_unroll', 'what_is_updated': 'optimized_parameters',
    'acting_part': 'policy_algorithm', 'play_step': 'fast_predict_step', 'honours_action_mask': 'supports_action_mask',
    'traits': 'capabilities',
}
"""Former names of methods and properties of algorithms that users override or call."""

FIELDS = {'fixed_update': 'traceable_update', 'fixed_prediction': 'traceable_prediction',
          'completes_unrolls': 'postprocesses_unrolls'}
"""Former names of capabilities."""

MODULES = {
    'alfx.traits': 'alfx.engine.capabilities', 'alfx.trainers.playing': 'alfx.runs.playing',
    'alfx.trainers.policy': 'alfx.runs.policy', 'alfx.trainers.exporting': 'alfx.runs.exporting',
    'alfx.trainers.run_files': 'alfx.runs.run_files', 'alfx.trainers.building': 'alfx.runs.building',
    'alfx.trainers.evaluator': 'alfx.runs.evaluator', 'alfx.trainers.curves': 'alfx.reports.curves',
    'alfx.trainers.comparing': 'alfx.reports.comparing', 'alfx.trainers.random_state': 'alfx.utils.random_state',
    'alfx.engine.mixing': 'alfx.engine.batch_sources', 'alfx.utils.dist_transforms': 'alfx.distributions.transforms',
    'alfx.utils.particle_vi': 'alfx.algorithms.particles.particle_vi',
    'alfx.utils.datagen': 'alfx.environments.datagen',
    'alfx.algorithms.intrinsic_reward': 'alfx.algorithms.intrinsic.intrinsic_reward',
    'alfx.algorithms.exploration_noise': 'alfx.algorithms.base.exploration_noise',
    'alfx.algorithms.policy_loss_addons': 'alfx.algorithms.composition.policy_loss_addons',
}
"""Former names of modules that the documentation has mentioned or that users are likely to import."""

CLASSES = {'Traits': 'Capabilities', 'Share': 'BatchSource'}
"""Former names of classes in these modules."""

_warned = set[str]()


def warn_renamed(old: str, new: str) -> None:
    """Warn, once for each name, that ``old`` is called ``new`` now."""
    if old not in _warned:
        _warned.add(old)
        warnings.warn(f'{old} has been renamed to {new}; the old name works up to alfx {_LAST_VERSION}', FutureWarning,
                      stacklevel=3)


def _former_name(old: str, new: str) -> property:
    """Return a property under a former name that returns the attribute of the present name."""
    def get(self: Any) -> Any:
        warn_renamed(f'{type(self).__name__}.{old}', new)
        overriding = [cls for cls in type(self).__mro__ if old in vars(cls) and vars(cls).get(new) is vars(cls)[old]]
        # A class that overrides the former name has reached this property with super().
        return getattr(super(overriding[-1], self) if overriding else self, new)
    return property(get, doc=f'Former name of ``{new}``.')


def keep_former_methods(cls: type) -> type:
    """Let methods and properties of ``cls`` be called by their former names; a class decorator."""
    for old, new in METHODS.items():
        setattr(cls, old, _former_name(old, new))
    return cls


def adopt_former_methods(cls: type) -> None:
    """Give methods that ``cls`` defines under former names their present names; for ``__init_subclass__``."""
    for old, new in METHODS.items():
        if old in vars(cls) and new not in vars(cls):
            warn_renamed(f'{cls.__name__}.{old}', new)
            setattr(cls, new, vars(cls)[old])


class _FormerModule(importlib.abc.Loader):
    """Loads a module of :data:`MODULES` by its former name."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        warn_renamed(spec.name, MODULES[spec.name])
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        present = importlib.import_module(MODULES[module.__name__])
        vars(module).update({name: value for name, value in vars(present).items() if not name.startswith('__')})
        for old, new in CLASSES.items():
            if hasattr(present, new):
                setattr(module, old, getattr(present, new))


def find_former_module(name: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module with a former name, ``None`` for any other name."""
    return importlib.machinery.ModuleSpec(name, _FormerModule()) if name in MODULES else None
