"""The analyzer's report as one HTML page."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from omlx_cache.tools import analyzer_plots as plots
from omlx_cache.tools.analyzer_text import (
    TIERS,
    advice,
    meanings,
    quality_lines,
    short_report,
    size,
)
from omlx_cache.tools.output import write_text
from omlx_cache.tools.page import cards, page, paragraph, preformatted, section, table
from omlx_cache.tools.plots import svg


def write_page(path: Path, data: dict) -> None:
    """Write the page of `analysis.analyze`'s data, with its ``names``, to ``path``."""
    write_text(path, analyzer_page(data))


def analyzer_page(data: dict) -> str:
    """Return the page; it needs matplotlib and nothing from the network."""
    names, text, model = data["names"], data["text"], data["model"]
    subtitle = (
        f"{names['model']} ({model['class']}, {model['dtype']}, {model['layers']} layers) on "
        f"{text['tokens']:,} tokens of {names['text']}; configuration: {names['config']}"
    )
    parts = [_cards(data), _report(data), _advice(data), _memory(data), _attention(data)]
    parts += [_quality(data), _speed(data), _how(data)]
    return page("KV cache report", subtitle, [part for part in parts if part])


def _cards(data: dict) -> str:
    memory, quality = data["memory"], data["quality"]
    return cards(
        [
            (size(memory["steady"]), f"of {size(memory['unquantized'])} unquantized"),
            (size(memory["prefill_peak"]), "peak of the prompt"),
            (f"{quality['kld']:.2g}", "KL divergence, nats"),
            (f"{quality['top1']:.1%}", "same top token"),
            (f"{data['attention']['sparsity']:.0%}", "attention sparsity"),
        ]
    )


def _report(data: dict) -> str:
    lines = [paragraph(line) for line in meanings(data) + quality_lines(data)]
    return section("In short", preformatted(short_report(data)), *lines)


def _advice(data: dict) -> str:
    found, memory, quality = data["recommendation"], data["memory"], data["quality"]
    sentence, _, *yaml = advice(data)
    rows = [
        [
            "(none)",
            "",
            size(memory["steady"]),
            "",
            f"{quality['kld']:.6f}",
            f"{quality['top1']:.2%}",
        ]
    ]
    rows += [
        [
            row["change"],
            row["why"],
            size(row["num_bytes"]),
            f"{1 - row['num_bytes'] / memory['steady']:+.1%}",
            f"{row['kld']:.6f}",
            f"{row['top1']:.2%}",
        ]
        for row in found["tried"]
    ]
    header = ["change", "why", "bytes", "saves", "KL", "same top token"]
    highlighted = 0 if found["chosen"] is None else found["chosen"] + 1
    return section(
        "Recommendation",
        paragraph(sentence.removeprefix("Recommendation: ") + "."),
        preformatted("\n".join(yaml)),
        table(header, rows, numbers=4, chosen=highlighted),
    )


def _memory(data: dict) -> str:
    memory = data["memory"]
    rows = [
        [TIERS[name], size(tier["values"]), size(tier["scales"]), size(sum(tier.values()))]
        for name, tier in memory["tiers"].items()
        if sum(tier.values())
    ]
    rows += [
        ["steady state", "", "", size(memory["steady"])],
        ["peak of the prompt", "", "", size(memory["prefill_peak"])],
        ["tables of a step", "", "", size(memory["tables"])],
        ["workspace of a step", "", "", size(memory["workspace"])],
    ]
    return section(
        "Memory",
        paragraph(
            "Allocated by the cache, free blocks included, over the tokens read. The dashed line "
            "is the same cache in the model's dtype."
        ),
        svg(partial(plots.memory_over_time, data=data), "memory over time by tier"),
        table(["", "values or codes", "scales", "together"], rows, numbers=3),
    )


def _attention(data: dict) -> str:
    height = 1.2 + max(2.4, 0.11 * len(data["attention"]["mass"]))
    return section(
        "Where attention goes",
        paragraph(
            f"Measured on the unquantized cache, mean over heads and the last "
            f"{data['text']['decode']} tokens. A dark block could leave the cache at little loss."
        ),
        svg(partial(plots.mass_heat_map, data=data), "attention by layer and block", height=height),
        paragraph(
            "What a window would keep, layer by layer: the sinks and the blocks that lie wholly in "
            "the newest tokens."
        ),
        svg(partial(plots.kept_by_layer, data=data), "attention kept by layer"),
    )


def _quality(data: dict) -> str:
    if data["quality"]["kld_by_layer"] is None:
        return ""
    return section(
        "Where the error arises",
        paragraph(
            "Each layer's output, read by the model's own final norm and output head as if the "
            "layer were the last: KL divergence of this configuration from the unquantized cache."
        ),
        svg(partial(plots.kld_by_layer, data=data), "KL divergence by layer", height=3.0),
    )


def _speed(data: dict) -> str:
    if len(data["speed"]) < 2:
        return ""
    return section(
        "Speed",
        paragraph(
            "While the text was read. Other programs on the machine show here too: read the shape, "
            "not the digits."
        ),
        svg(partial(plots.speed, data=data), "tokens per second and time to the first token"),
    )


def _how(data: dict) -> str:
    machine = data["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in data["versions"].items() if v)
    device = machine["gpu"] if data["device"] == "cuda" else data["device"]
    return section(
        "Measured on",
        paragraph(f"{machine['platform']}, {device}, {machine['threads']} threads; {versions}"),
    )
