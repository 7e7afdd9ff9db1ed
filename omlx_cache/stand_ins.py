"""Shadow a module's method by a function, under the hooks of accelerate, and take it away again.

accelerate hooks a module by an instance attribute, and keeps what stood there for later:

    module.forward = hooked            calls module._old_forward
    module._old_forward = the method

A stand-in takes the innermost of these places, whichever came first. So hooks can be added,
exchanged and removed while a model is patched, and what is there on `withdraw` stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

_UNDER_HOOK = {"forward": "_old_forward"}


@dataclass(frozen=True)
class StandIn:
    """A function that stands where a method of a module stood.

    Attributes:
        module: whose method it is.
        name: of the method.
        function: what stands there, called with ``module`` first.
        before: the instance attribute that it replaced; None where there was none.
    """

    module: nn.Module
    name: str
    function: Callable
    before: Any

    @classmethod
    def put(cls, module: nn.Module, name: str, function: Callable) -> StandIn:
        """Let ``function`` stand in for ``module.name``."""
        hidden = _UNDER_HOOK.get(name, name)
        place = hidden if hidden in module.__dict__ else name
        stand_in = cls(module, name, function, module.__dict__.get(place))
        module.__dict__[place] = MethodType(function, module)
        return stand_in

    def original(self) -> Callable:
        """Return the method that is shadowed, bound."""
        # Not a bound method: torch 2.11 can trace none that is made here.
        return self.before if self.before is not None else partial(self._method(), self.module)

    def check(self) -> None:
        """Check that `withdraw` would take nothing of others away.

        Raises:
            RuntimeError: another function has replaced or wrapped this one.
        """
        found = self.module.__dict__.get(self.name)
        function = getattr(found, "__func__", None)
        is_method = function is not None and function is self._method()  # a hook took it away
        if self._place() is None and found is not None and not is_method:
            kind = type(self.module).__name__
            raise RuntimeError(
                f"omlx_cache.unpatch: {kind}.{self.name} must be as patch left it, or under a hook "
                f"of accelerate, got {found!r}, set after patch; set it back first (or call "
                f"del model.{self.name} on that {kind}), then unpatch"
            )

    def withdraw(self) -> None:
        """Put back what stood there; a hook around it stays."""
        place = self._place()
        if place is None:
            return
        if self.before is not None:
            self.module.__dict__[place] = self.before
        elif place == self.name:
            del self.module.__dict__[place]
        else:  # accelerate calls it
            self.module.__dict__[place] = MethodType(self._method(), self.module)

    def _method(self) -> Any:
        return getattr(type(self.module), self.name, None)  # not every model makes masks

    def _place(self) -> str | None:
        """Return the instance attribute that holds the function now; None where none does."""
        places = (self.name, _UNDER_HOOK.get(self.name, self.name))
        attributes = self.module.__dict__
        held = (p for p in places if getattr(attributes.get(p), "__func__", None) is self.function)
        return next(held, None)
