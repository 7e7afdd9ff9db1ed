"""Render the tables of ``docs/tuning.md`` from ``bench/results``.

::

    python docs/render_tuning.py

The results come from the quality tool (quality_4096.json, settings_4096.json, quality_8192.json),
``python bench/settings.py`` (settings_bytes.json), ``python bench/bench_generate.py``
(generate_cpu.json), ``python bench/bench_bounded.py`` (bounded.json; until that has run, the
document says so), ``python bench/bench_pruning.py`` (pruning.json) and
``python bench/long_chat.py`` (long_chat.json).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from rendering import FOLDER, markdown, update

DOCUMENT = FOLDER / "tuning.md"
RESULTS = FOLDER.parent / "bench" / "results"


def read(name: str) -> dict:
    """Return what a file of results holds."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def quality(name: str, chosen: dict[str, str]) -> str:
    """Return a table of quality.

    Args:
        name: of a file that the quality tool has written.
        chosen: what a row is called there and here.
    """
    rows, found = [], read(name)["results"]
    for there, here in chosen.items():
        row = found[there]
        shares = [f"{row['saved']:.1%}", f"{row['kld']:.6f}", f"{row['top1']:.2%}"]
        told = [f"{row['perplexity_ratio']:+.2%}", f"{row['needle']:.1%}", f"{row['recall']:.1%}"]
        rows.append([here, *shares, *told])
    head = [
        "setting",
        "saved",
        "KL divergence",
        "same top token",
        "perplexity",
        "needles",
        "recall",
    ]
    return markdown(head, rows)


def precision() -> str:
    """Return the table of precisions."""
    chosen = {
        "unquantized": "transformers, unquantized",
        "8 bits (default)": "`cache_bits: 8` (default)",
        "K 8, V 4 bits": "`cache_bits: {k: 8, v: 4}`",
        "1024 tokens K 8, V 4; then 4 bits": "`tiers: {k8v4: 1024, k4v4: null}`",
        "4 bits": "`cache_bits: 4`",
        "transformers, fp8": "transformers, `QuantizedCache` (fp8)",
    }
    return quality("quality_4096.json", chosen)


def long() -> str:
    """Return the table of precisions at 8192 tokens."""
    chosen = {
        "cache_bits=8": "`cache_bits: 8` (default)",
        "cache_bits={k: 8, v: 4}": "`cache_bits: {k: 8, v: 4}`",
        "tiers={k8v4: 6200, k4v4: null}": "`tiers: {k8v4: 6200, k4v4: null}`",
        "tiers={k8v4: 1024, k4v4: null}": "`tiers: {k8v4: 1024, k4v4: null}`",
        "cache_bits=4": "`cache_bits: 4`",
        "target_saving=0.6": "`target_saving: 0.6`",
        "block_size=128 target_saving=0.6": "`target_saving: 0.6`, `block_size: 128`",
        "block_size=128 target_saving=0.68": "`target_saving: 0.68`, `block_size: 128`",
    }
    return quality("quality_8192.json", chosen)


def windows() -> str:
    """Return the table of windows and sinks."""
    sinks = "window_size=1024 sink_tokens="
    chosen = {f"window_size={w}": f"`window_size: {w}`" for w in (2048, 1024, 512)}
    chosen |= {f"{sinks}{n}": f"`window_size: 1024`, `sink_tokens: {n}`" for n in (16, 1, 0)}
    return quality("settings_4096.json", chosen)


def others() -> str:
    """Return the table of what else changes the quality of 4 bits."""
    plain = "cache_bits=4"
    chosen = {plain: "`cache_bits: 4`"}
    more = ("keep_layers=[0,-1]", "recent_tokens=512", "block_size=64")
    for setting in (*more, "block_size=1024"):
        key, _, value = setting.partition("=")
        chosen[f"{plain} {setting}"] = f"with `{key}: {value.replace(',', ', ')}`"
    return quality("settings_4096.json", chosen)


def saved() -> str:
    """Return the table of bytes by length."""
    rows, found = [], read("settings_bytes.json")
    for setting, lengths in found.items():
        if not setting.startswith(("block_size", "prefill_chunk", "recent_tokens")):
            cells = [f"{1 - r['bytes'] / r['unquantized']:.1%}" for r in lengths.values()]
            rows.append([f"`{setting}`", *cells])
    return markdown(["setting", *(f"{int(n):,} tokens" for n in lengths)], rows)


def sizes(key: str) -> str:
    """Return the table of bytes by length for the values of one key."""
    rows = []
    for setting, lengths in read("settings_bytes.json").items():
        if setting.startswith(key):
            cells = [f"{1 - r['bytes'] / r['unquantized']:.1%}" for r in lengths.values()]
            rows.append([setting.partition("=")[2], *cells])
    return markdown([f"`{key}`", *(f"{int(n):,} tokens" for n in lengths)], rows)


def chunks() -> str:
    """Return the table of the peak by chunk."""
    rows = []
    for setting, lengths in read("settings_bytes.json").items():
        if setting.startswith("prefill_chunk"):
            peaks = [f"{r['peak'] / r['unquantized']:.0%}" for r in lengths.values()]
            rows.append([setting.partition("=")[2], *peaks])
    return markdown(["`prefill_chunk`", *(f"{int(n):,} tokens" for n in lengths)], rows)


def speed() -> str:
    """Return the table of tokens/s, as ratios to the stock model."""
    names = {
        "stock": "transformers, `DynamicCache`",
        "8-bit": "8 bits (default)",
        "window 1024": "`window_size: 1024`",
    }
    found = read("generate_cpu.json")["results"]
    rows = []
    for name, title in names.items():
        cells = []
        for contenders in found.values():
            row, stock = contenders[name], contenders["stock"]
            speed = row["tokens_per_s"] / stock["tokens_per_s"]
            first = row["first_token_s"] / stock["first_token_s"]
            cells.append(f"{speed:.2f}x, first token {first:.2f}x")
        rows.append([title, *cells])
    return markdown(["", *(f"after {int(n):,}" for n in found)], rows)


def endless() -> str:
    """Return the table of perplexity past the trained length."""
    names = {
        "stock, inside the trained length": "the stock model, of the last 8,192 alone",
        "stock": "the stock model",
        "default (window 8192)": "patched, the default (`window_size: auto`, here 8192)",
        "window 1024": "`window_size: 1024`",
        "window 1024 without sinks": "`window_size: 1024`, `sink_tokens: 0`",
    }
    found = read("long_chat.json")["results"]
    inside = found["stock, inside the trained length"]["perplexity"]
    rows = [
        [title, f"{found[name]['tokens']:,}", f"{found[name]['perplexity'] / inside - 1:+.1%}"]
        for name, title in names.items()
    ]
    return markdown(["", "tokens read", "perplexity"], rows)


def bounded() -> str:
    """Return the table of pools with room for a quarter of a chat."""
    if not (RESULTS / "bounded.json").exists():
        first = "Not measured yet: `python bench/bench_bounded.py`"
        return f"{first}, then `python docs/render_tuning.py`."
    found = read("bounded.json")["results"]
    without = found["no bound"]
    head = ["", "tokens/s", "first token", "on the device", "in CPU memory", "KL divergence"]
    rows = []
    for name, row in found.items():
        cells = [f"{row[key] / without[key]:.2f}x" for key in ("tokens_per_s", "first_token_s")]
        cells += [f"{row[key] / 2**20:.1f} MiB" for key in ("device_bytes", "cpu_bytes")]
        cells += [f"{row['kld']:.6f}", f"{row['top1']:.1%}", f"{row['needle']:.1%}"]
        rows.append([f"`{name}`" if row["setting"].get("max_gpu_blocks") else name, *cells])
    return markdown([*head, "same top token", "needles"], rows)


def pruning() -> str:
    """Return the table of pruning's rankings: means, and for random the range over its seeds."""
    ways: dict[str, list[dict]] = {}
    for name, readings in read("pruning.json")["results"].items():
        ways.setdefault(name.rstrip(" 0123456789"), []).append(_means(readings))
    shapes = {"text kld": ".4f", "text top1": ".1%", "text told": ".1%"}
    shapes |= {"document told": ".1%", "chat told": ".1%", "chat nll": ".2f"}
    rows = []
    for way, runs in ways.items():
        size, _, ranking = way.rpartition(", ")
        seeds = "" if len(runs) == 1 else f", {len(runs)} seeds"
        cells = [
            _spread([r[key] for r in runs if key in r], shape) for key, shape in shapes.items()
        ]
        rows.append([size, f"`{ranking}`{seeds}" if size else ranking, *cells])
    head = ["`block_size`", "`pruning`", "KL divergence", "same top token", "needles"]
    return markdown([*head, "question", "recall", "recall, nats"], rows)


def _means(readings: dict[str, dict]) -> dict[str, float]:
    """Return the mean of each figure over the texts, and over the chats: ``text kld``."""
    found: dict[str, list[float]] = {}
    for name, row in readings.items():
        for key, value in row.items():
            if isinstance(value, int | float):
                found.setdefault(f"{name.partition(' ')[0]} {key}", []).append(value)
    return {key: sum(values) / len(values) for key, values in found.items()}


def _spread(values: list[float], shape: str) -> str:
    """Write a mean, and the range where there are several values."""
    if not values:
        return ""
    mean = format(sum(values) / len(values), shape)
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):{shape}} to {max(values):{shape}})"


def render() -> str:
    """Return the document."""
    tables = {
        "precision": precision(),
        "long": long(),
        "windows": windows(),
        "endless": endless(),
        "others": others(),
        "saved": saved(),
        "block sizes": sizes("block_size"),
        "recent tokens": sizes("recent_tokens"),
        "chunks": chunks(),
        "speed": speed(),
        "bounded": bounded(),
        "pruning": pruning(),
    }
    return update(DOCUMENT, tables)


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
    print(DOCUMENT)
