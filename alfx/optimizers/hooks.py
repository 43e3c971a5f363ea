"""Hooks around the step of an optimizer that does not use torch's own step."""
import types
from collections.abc import Callable
from typing import Any

import torch


class HookedOnRequest:
    """``torch.optim`` wraps every ``step`` for hooks and its profiler; here that happens once somebody asks for a hook.

    Put it in front of the torch optimizer among the bases of a class that defines ``step``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if 'step' in cls.__dict__:
            cls.__dict__['step'].hooked = True  # torch leaves a step alone that says so

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Have ``hook(optimizer, args, kwargs)`` called before every step, as in torch."""
        self._enable_hooks()
        return super().register_step_pre_hook(hook)  # type: ignore[misc]

    def register_step_post_hook(self, hook: Callable[..., Any]) -> Any:
        """Have ``hook(optimizer, args, kwargs)`` called after every step, as in torch."""
        self._enable_hooks()
        return super().register_step_post_hook(hook)  # type: ignore[misc]

    def _enable_hooks(self) -> None:
        """From now on, step as every optimizer of torch does."""
        wrapped = torch.optim.Optimizer.profile_hook_step(type(self).step)  # type: ignore[attr-defined]
        vars(self)['step'] = types.MethodType(wrapped, self)
