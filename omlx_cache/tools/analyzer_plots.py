"""The analyzer's plots; each function paints one on matplotlib axes, from the analysis' data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from omlx_cache.tools.analyzer_text import TIERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "sink": "#7a5af8",
    "hot": "#f04438",
    "k8v8": "#f79009",
    "k8v4": "#2e90fa",
    "k4v4": "#12b76a",
}
INK, SECOND = "#2e90fa", "#f79009"
MAX_BLOCK_LABELS = 12


def mass_heat_map(axes: Axes, data: dict) -> None:
    """Paint layer x block, the colour a block's share of the attention (log scale)."""
    from matplotlib.colors import LogNorm

    attention = data["attention"]
    mass = np.maximum(np.array(attention["mass"]), 1e-4)
    image = axes.imshow(
        mass, aspect="auto", cmap="magma", norm=LogNorm(1e-4, 1), interpolation="nearest"
    )
    axes.grid(False)
    labels = ["sinks" if start < 0 else f"{start:,}" for start in attention["starts"]]
    every = -(-len(labels) // MAX_BLOCK_LABELS)
    shown = [i for i in range(len(labels)) if i % every == 0]
    axes.set_xticks(shown, [labels[i] for i in shown])
    layers = len(mass)
    axes.set_yticks(range(0, layers, max(1, layers // 8)))
    axes.set_xlabel("block, by its first token's position")
    axes.set_ylabel("layer")
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02)
    bar.set_ticks([1e-4, 1e-3, 1e-2, 1e-1, 1], labels=["≤ 0.01%", "0.1%", "1%", "10%", "100%"])
    bar.set_label("share of the attention")


def kept_by_layer(axes: Axes, data: dict) -> None:
    """Paint what each layer's sinks and newest tokens keep of the attention."""
    attention = data["attention"]
    layers = np.arange(len(attention["mass"]))
    axes.bar(layers, attention["kept_by_sinks"], color=COLORS["sink"], label="sinks alone")
    windows = list(attention["kept_by_newest"].items())
    shades = np.linspace(0.25, 1, max(len(windows), 1))
    for (window, values), shade in zip(windows, shades, strict=False):
        axes.plot(
            layers, values, color=INK, alpha=shade, marker=".", label=f"sinks + newest {window}"
        )
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
    axes.set_xlabel("layer")
    axes.set_ylabel("attention kept")
    _integers(axes)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


def memory_over_time(axes: Axes, data: dict) -> None:
    """Paint bytes by tier over the tokens read, stacked, and the unquantized cache beside them."""
    moments = [dict.fromkeys(("tokens", *TIERS), 0), *data["memory"]["over_time"]]
    tokens = [m["tokens"] for m in moments]
    full = data["memory"]["unquantized"] / data["report"]["seen_tokens"] / 1e6
    tiers = [name for name in TIERS if any(m[name] for m in moments)]
    stacks = [[m[name] / 1e6 for m in moments] for name in tiers]
    axes.stackplot(
        tokens,
        stacks,
        step="pre",
        labels=[TIERS[name] for name in tiers],
        colors=[COLORS[name] for name in tiers],
        alpha=0.85,
    )
    axes.plot(
        [0, tokens[-1]], [0, full * tokens[-1]], color="#475467", ls="--", label="unquantized cache"
    )
    axes.set_xlim(0, tokens[-1])
    axes.set_ylim(0)
    axes.set_xlabel("tokens read")
    axes.set_ylabel("MB")
    axes.legend(loc="upper left")


def speed(axes: Axes, data: dict) -> None:
    """Paint tokens/s and the time to the first token over the length."""
    points = data["speed"]
    tokens = [p["tokens"] for p in points]
    (left,) = axes.plot(
        tokens, [p["tokens_per_s"] for p in points], "o-", color=INK, label="tokens/s"
    )
    axes.set_ylim(0)
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel("tokens/s while decoding")
    other = axes.twinx()
    (right,) = other.plot(
        tokens, [p["first_token_s"] for p in points], "s--", color=SECOND, label="first token, s"
    )
    other.set_ylim(0)
    other.set_ylabel("seconds to the first token")
    other.grid(False)
    other.spines["right"].set_visible(True)
    axes.legend(handles=[left, right], loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=2)


def kld_by_layer(axes: Axes, data: dict) -> None:
    """Paint the KL divergence after each layer."""
    values = data["quality"]["kld_by_layer"]
    axes.bar(range(len(values)), values, color=INK)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    axes.set_xlabel("layer")
    axes.set_ylabel("KL divergence, nats")
    _integers(axes)


def _integers(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
