"""Plots as text: matplotlib draws them without a display, and they are put inline as SVG."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from omlx_cache.tools.errors import WrongSettingError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e7ec",
    "axes.edgecolor": "#98a2b3",
    "axes.axisbelow": True,
    "axes.labelcolor": "#344054",
    "xtick.color": "#475467",
    "ytick.color": "#475467",
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def require_matplotlib(option: str) -> None:
    """Check that plots can be drawn.

    Raises:
        WrongSettingError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise WrongSettingError(
            f"{option} draws plots with matplotlib, which is not installed; "
            f"pip install 'omlx_cache[tools]', or leave {option} out"
        )


def draw(paint: Callable[[Axes], None], width: float = 9.0, height: float = 3.6):
    """Return a matplotlib figure that ``paint`` has drawn on; inches."""
    import matplotlib
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        paint(figure.add_subplot())
    return figure


def svg(paint: Callable[[Axes], None], label: str, width: float = 9.0, height: float = 3.6) -> str:
    """Draw a plot and return it as an ``<svg>`` element.

    Args:
        paint: draws on axes.
        label: what the plot shows, for readers that don't see it; makes the element's ids its own.
        width, height: inches.
    """
    import matplotlib

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": label, "svg.fonttype": "path"}):
        out = io.StringIO()
        figure = draw(paint, width, height)
        figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    element = out.getvalue()[out.getvalue().index("<svg") :]
    return element.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
