"""What the source of an attention module says about how it attends.

An attention module of transformers calls its attention function with arguments of its own
choosing, stores under a number of its own choosing, and may rotate its queries or not. All of that
is written in its ``forward`` and nowhere else, so it is read there, once, when a model is patched::

    if self.use_rope:                                                    # a condition
        query, key = apply_rotary_pos_emb(query, key, cos, sin)          # rotates
    key, value = cache.update(key, value, self.layer_idx)                # stores under its number
    attention_interface(self, query, key, value, mask, softcap=...)      # asks for softcap
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

from torch import nn

_INTERFACE = "attention_interface"
"""What modules of transformers call the attention function that they have looked up."""

Condition = tuple[CodeType, bool]
"""An expression, and the truth value that it must have."""


@dataclass(frozen=True)
class AttentionSource:
    """What ``forward`` of an attention class does.

    Attributes:
        arguments: keyword arguments that it names when it calls the attention function.
        stores_by_layer_idx: whether it stores as ``cache.update(key, value, self.layer_idx)``.
        rotations: for each call of a rotary function, the conditions that lead to it.
        normalizes_rotated: whether it normalizes anything between rotating and attending.
    """

    arguments: frozenset[str]
    stores_by_layer_idx: bool
    rotations: tuple[tuple[Condition, ...], ...]
    normalizes_rotated: bool

    def rotates(self, module: nn.Module) -> bool | None:
        """Whether ``module`` rotates its queries; None when only a call of it can tell."""
        reached = [_holds(conditions, module) for conditions in self.rotations]
        if True in reached:
            return True
        return None if None in reached else False


def read_source(attention: type[nn.Module]) -> AttentionSource:
    """Read ``forward`` of an attention class.

    Raises:
        NotImplementedError: when its source can't be read, or calls no attention function.
    """
    return _read(attention.forward, attention.__name__)


@lru_cache
def _read(forward: Callable, name: str) -> AttentionSource:
    try:
        text = inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError) as error:
        raise NotImplementedError(
            f"the source of {name}.forward, which says how it attends, can't be read ({error})"
        ) from None
    calls = list(_calls(ast.parse(textwrap.dedent(text)), ()))
    attends = [call for called, call, _ in calls if called == _INTERFACE]
    if not attends:
        raise NotImplementedError(f"{name}.forward calls no {_INTERFACE}(...)")
    rotates = [call.lineno for name, call, _ in calls if "rotary" in name]
    norms = [call.lineno for name, call, _ in calls if "norm" in name]
    indices = [index for name, call, _ in calls if name == "update" for index in _layer_index(call)]
    return AttentionSource(
        frozenset(keyword.arg for call in attends for keyword in call.keywords if keyword.arg),
        all(ast.unparse(index) == "self.layer_idx" for index in indices),
        tuple(conditions for name, _, conditions in calls if "rotary" in name),
        any(min(rotates, default=line) < line < attends[0].lineno for line in norms),
    )


def _layer_index(update: ast.Call) -> list[ast.expr]:
    """Return what stands for the layer's number in ``cache.update(key, value, layer_idx)``."""
    return update.args[2:3] + [k.value for k in update.keywords if k.arg == "layer_idx"]


def _calls(
    node: ast.AST, conditions: tuple[Condition, ...]
) -> Iterator[tuple[str, ast.Call, tuple[Condition, ...]]]:
    """Yield (name of the function, call, conditions that lead to it) for every call in ``node``."""
    if isinstance(node, ast.Call):
        yield getattr(node.func, "id", getattr(node.func, "attr", "")), node, conditions
    under: dict[ast.AST, tuple[Condition, ...]] = dict.fromkeys(
        ast.iter_child_nodes(node), conditions
    )
    if isinstance(node, (ast.If, ast.IfExp)):
        test = compile(ast.Expression(node.test), "<condition>", "eval")
        for branch, wanted in ((node.body, True), (node.orelse, False)):
            children: Sequence[ast.AST] = branch if isinstance(branch, list) else [branch]
            under |= dict.fromkeys(children, (*conditions, (test, wanted)))
    for child, leading in under.items():
        yield from _calls(child, leading)


def _holds(conditions: tuple[Condition, ...], module: nn.Module) -> bool | None:
    """Whether all conditions hold in ``module``; None when they read more than ``self``."""
    for expression, wanted in conditions:
        try:
            holds = bool(eval(expression, {"self": module}))  # the model's own code
        except NameError:
            return None
        if holds is not wanted:
            return False
    return True
