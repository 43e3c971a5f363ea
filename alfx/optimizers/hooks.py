"""Hooks before and after the step of an optimizer that does not use torch's own step."""
import types
from collections.abc import Callable
from typing import Any

import torch


class LazyHooks:
    """Mixin that wraps ``step`` for hooks only when a hook is registered; ``torch.optim`` wraps every ``step``.

    List it before the torch optimizer among the base classes of a class that defines ``step``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if 'step' in cls.__dict__:
            cls.__dict__['step'].hooked = True  # keeps torch from wrapping the step

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Register ``hook(optimizer, args, kwargs)``, called before every step, as in torch."""
        self._enable_hooks()
        return super().register_step_pre_hook(hook)  # type: ignore[misc]

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        """Register ``hook(optimizer, args, kwargs)``, called after every step, as in torch."""
        self._enable_hooks()
        return super().register_step_post_hook(hook)  # type: ignore[misc]

    def _enable_hooks(self) -> None:
        """Use torch's wrapped step from now on."""
        wrapped = torch.optim.Optimizer.profile_hook_step(type(self).step)  # type: ignore[attr-defined]
        vars(self)['step'] = types.MethodType(wrapped, self)
