"""What the analyzer prints: the report of four lines, then where they come from."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table

TIERS = {
    "sink": "sinks",
    "hot": "hot (model's dtype)",
    "k8v8": "K 8, V 8 bits",
    "k8v4": "K 8, V 4 bits",
    "k4v4": "K 4, V 4 bits",
}


def size(num_bytes: float) -> str:
    """Return bytes with a unit.

    >>> size(3_200_000_000), size(512)
    ('3.20 GB', '512 B')
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def short_report(data: dict) -> str:
    """Return the report's four lines."""
    report, memory = data["report"], data["memory"]
    device = "GPU" if data["device"] == "cuda" else data["device"].upper()
    used, full = memory["steady"], memory["unquantized"]
    is_sparse = data["attention"]["sparsity"] >= 0.5
    return "\n".join(
        [
            "[KV Cache Report]",
            f"Active blocks: {report['active_blocks']}/{report['total_blocks']} ({device})",
            f"Memory usage: {size(used)} / {size(full)} ({used / full:.0%})",
            f"Block utilization: {report['block_utilization']:.0%} avg",
            f"Attention sparsity: {data['attention']['sparsity']:.0%}"
            + ("  <-- room to optimize" if is_sparse else ""),
        ]
    )


def show(console: Console, data: dict) -> None:
    """Print the whole analysis."""
    console.print(short_report(data), markup=False, highlight=False, soft_wrap=True)
    console.print()
    for line in meanings(data):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    for table in (memory_table(data), attention_table(data)):
        console.print(table)
    for line in quality_lines(data):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print()
    console.print(recommendation_table(data))
    for line in advice(data):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def meanings(data: dict) -> list[str]:
    """Say what the four lines mean here, in one line each."""
    report, memory = data["report"], data["memory"]
    bound = data["config"]["kv_cache"]["max_gpu_blocks"]
    room = "max_gpu_blocks" if bound else "blocks that the tensors have room for; no bound is set"
    return [
        f"blocks: {report['cached_tokens']:,} of {report['seen_tokens']:,} tokens are cached, in "
        f"blocks of {data['config']['kv_cache']['block_size']} ({room})",
        f"memory: steady state; the unquantized cache of as many tokens takes "
        f"{size(memory['unquantized'])}",
        f"sparsity: {data['attention']['definition']}",
    ]


def memory_table(data: dict) -> Table:
    """Return bytes by tier, then what is beside the tiers."""
    memory = data["memory"]
    table = Table(title="Memory", box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("tier")
    for name in ("values or codes", "scales", "together", "share"):
        table.add_column(name, justify="right")
    for name, tier in memory["tiers"].items():
        together = tier["values"] + tier["scales"]
        if together:
            share = f"{together / memory['steady']:.1%}"
            table.add_row(
                TIERS[name], size(tier["values"]), size(tier["scales"]), size(together), share
            )
    table.add_section()
    table.add_row("steady state", "", "", size(memory["steady"]), "100.0%")
    for label, key in (
        ("peak of the prompt", "prefill_peak"),
        ("tables of a step", "tables"),
        ("workspace of a step", "workspace"),
    ):
        share = f"{memory[key] / memory['steady']:.1%}"
        table.add_row(label, "", "", size(memory[key]), share)
    return table


def attention_table(data: dict) -> Table:
    """Return a row a layer: what sinks, newest tokens and heaviest blocks get, and sparsity."""
    attention = data["attention"]
    table = Table(
        title="Attention kept (share of the unquantized cache's mass, sinks always included)",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    table.add_column("layer", justify="right")
    columns = list(_columns(attention))
    for name, _ in columns:
        table.add_column(name, justify="right")
    for layer in range(len(attention["mass"])):
        table.add_row(str(layer), *(f"{values[layer]:.1%}" for _, values in columns))
    table.add_section()
    table.add_row("mean", *(f"{sum(v) / len(v):.1%}" for _, v in columns))
    return table


def _columns(attention: dict) -> Iterator[tuple[str, list[float]]]:
    yield "sinks", attention["kept_by_sinks"]
    for window, values in list(attention["kept_by_newest"].items())[-3:]:
        yield f"newest\n{window}", values
    for count, values in list(attention["kept_by_top"].items())[:3]:
        yield f"top\n{count}", values
    yield "sparse", attention["sparsity_by_layer"]


def quality_lines(data: dict) -> list[str]:
    """Say how far the text is from the unquantized cache's, and how far rounding alone takes it."""
    quality = data["quality"]
    lines = [
        f"Against the unquantized cache, last {data['text']['scored']} tokens: {_told(quality)}"
    ]
    if quality["rounding"] is not None:
        lines.append(
            f"{data['model']['dtype']}'s rounding alone, the model's own attention against the "
            f"unquantized cache: {_told(quality['rounding'])}"
        )
    return lines


def _told(agreement: dict) -> str:
    return (
        f"KL {agreement['kld']:.6f}, same top token {agreement['top1']:.2%}, "
        f"perplexity {agreement['perplexity_ratio']:+.3%}"
    )


def recommendation_table(data: dict) -> Table:
    """Return what was tried: change, reason, bytes, KL."""
    memory, quality = data["memory"], data["quality"]
    table = Table(title="What a change would do", box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("change", "why"):
        table.add_column(name, overflow="fold")
    for name in ("bytes", "saves", "KL", "same top token"):
        table.add_column(name, justify="right")
    now = memory["steady"]
    table.add_row("(none)", "", size(now), "", f"{quality['kld']:.6f}", f"{quality['top1']:.2%}")
    for row in data["recommendation"]["tried"]:
        saved = 1 - row["num_bytes"] / now
        table.add_row(
            row["change"],
            row["why"],
            size(row["num_bytes"]),
            f"{saved:+.1%}",
            f"{row['kld']:.6f}",
            f"{row['top1']:.2%}",
        )
    return table


def advice(data: dict) -> list[str]:
    """Return the recommendation in a sentence, and as YAML."""
    chosen = data["recommendation"]["chosen"]
    bound = data["recommendation"]["max_kld"]
    if not data["recommendation"]["tried"]:
        sentence = "Recommendation: none; no change was tried. This configuration is"
    elif chosen is None:
        sentence = (
            f"Recommendation: keep this configuration; no change that was tried saves memory with "
            f"a KL of at most {bound:g}"
        )
    else:
        row = data["recommendation"]["tried"][chosen]
        saved = data["memory"]["steady"] - row["num_bytes"]
        effect = f"saves {size(saved)}" if saved >= 0 else f"costs {size(-saved)}"
        sentence = (
            f"Recommendation: {row['change']}; it {effect} on this text, with a KL of "
            f"{row['kld']:.6f} instead of {data['quality']['kld']:.6f}"
        )
    return [sentence, "", *data["recommendation"]["yaml"].splitlines()]
