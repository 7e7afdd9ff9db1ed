"""What the demo says at its end: the tables, the numbers as JSON, their meaning in plain words.

Nothing is claimed that was not measured in this run; a patched model that is slower is called
slower.
"""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.table import Table

from omlx_cache.tools.chat_run import ChatRun, agreement

MIB = 2**20
SAME = 0.05
PACKAGES = ("torch", "transformers", "triton", "gptqmodel", "optimum")


def edges(num_turns: int) -> tuple[slice, slice]:
    """Return the turns that count as the start and as the end: a third each, at least one.

    >>> edges(6)
    (slice(0, 2, None), slice(4, 6, None))
    """
    third = max(1, num_turns // 3)
    return slice(0, third), slice(num_turns - third, num_turns)


def summarize(stock: ChatRun, patched: ChatRun, settings: dict) -> dict:
    """Return every number of a demo as plain data for JSON.

    Args:
        stock: the run on the model's own cache.
        patched: the run with the paged cache, same messages.
        settings: how the demo was started.

    Returns:
        ``settings``, ``machine``, ``versions``, ``stock``, ``patched`` (each with ``turns``,
        ``summary`` and ``notes``) and ``agreement`` (per turn and in all). Bytes, seconds, tokens
        per second; null = not measured.
    """
    per_turn = [
        agreement(ours.answer_ids, theirs.answer_ids)
        for ours, theirs in zip(patched.turns, stock.turns, strict=True)
    ]
    return {
        "settings": settings,
        "machine": {
            "platform": platform.platform(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {name: _version(name) for name in ("omlx_cache", *PACKAGES)},
        "stock": _run_data(stock),
        "patched": _run_data(patched),
        "agreement": {
            "shared_tokens": sum(shared for shared, _ in per_turn),
            "tokens": sum(total for _, total in per_turn),
            "turns": [{"shared_tokens": shared, "tokens": total} for shared, total in per_turn],
        },
    }


def turn_table(report: dict) -> Table:
    """Return the table with a row per turn, stock / patched side by side."""
    table = Table(title="Turn by turn (stock / patched)")
    names = (
        "turn",
        "tokens in chat",
        "first token, s",
        "tokens/s",
        "cache, MiB",
        "same greedy tokens",
    )
    for name in names:
        table.add_column(name, justify="right")
    turns = zip(
        report["stock"]["turns"],
        report["patched"]["turns"],
        report["agreement"]["turns"],
        strict=True,
    )
    for number, (stock, patched, same) in enumerate(turns, start=1):
        table.add_row(
            str(number),
            f"{stock['context_tokens']:,}",
            f"{stock['first_token_seconds']:.2f} / {patched['first_token_seconds']:.2f}",
            f"{_speed(stock)} / {_speed(patched)}",
            f"{_mib(stock['cache']['now'])} / {_mib(patched['cache']['now'])}",
            f"{same['shared_tokens']} of {same['tokens']}",
        )
    return table


def summary_table(report: dict) -> Table:
    """Return the closing table: stock, patched, and patched over stock."""
    table = Table(title="The whole chat")
    for name in ("", "stock", "patched", "patched / stock"):
        table.add_column(name, justify="left" if not name else "right")
    stock, patched = report["stock"]["summary"], report["patched"]["summary"]
    rows = [
        ("tokens/s at the start", "start_tokens_per_second", _decimal),
        ("tokens/s at the end", "end_tokens_per_second", _decimal),
        ("time to first token, first turn, s", "first_turn_first_token_seconds", _decimal),
        ("time to first token, last turn, s", "last_turn_first_token_seconds", _decimal),
        ("cache at the end, MiB", "cache_end_bytes", _mib),
        ("cache at its peak, MiB", "cache_peak_bytes", _mib),
        ("GPU memory above the model at its peak, MiB", "gpu_peak_bytes", _mib),
    ]
    for label, key, show in rows:
        if stock[key] is not None or key != "gpu_peak_bytes":
            table.add_row(
                label, show(stock[key]), show(patched[key]), _ratio(patched[key], stock[key])
            )
    same = report["agreement"]
    table.add_row("same greedy tokens", "-", f"{same['shared_tokens']} of {same['tokens']}", "")
    return table


def explain(report: dict) -> list[str]:
    """Return what the numbers of this run mean, one sentence a line."""
    stock, patched = report["stock"]["summary"], report["patched"]["summary"]
    lines = [
        _memory_line(stock, patched, report["stock"]["turns"][-1]["context_tokens"]),
        _compare_line("Generating at the end of the chat", stock, patched, "end_tokens_per_second"),
        _flatness_line(stock, patched),
        _agreement_line(report["agreement"]),
        "Stock bytes are those of the key and value tensors after each turn; the copy that "
        "concatenation makes of one "
        "layer while it runs is not in them. Patched bytes are what omlx_cache.report says: "
        "blocks, scales and tables.",
        "One run on one machine: speeds vary from run to run, bytes and tokens don't.",
    ]
    return [
        line for line in (*lines, *report["stock"]["notes"], *report["patched"]["notes"]) if line
    ]


def _memory_line(stock: dict, patched: dict, tokens: int) -> str:
    share = patched["cache_end_bytes"] / stock["cache_end_bytes"]
    text = f"Memory: after {tokens:,} tokens patched takes {share:.0%} of the stock cache's bytes"
    if share >= 1:
        return f"{text}, so here it saves nothing."
    return f"{text}; at its peak {patched['cache_peak_bytes'] / stock['cache_peak_bytes']:.0%}."


def _compare_line(what: str, stock: dict, patched: dict, key: str) -> str:
    if not stock[key] or not patched[key]:
        return f"{what}: the answers were too short to measure a speed."
    ratio = patched[key] / stock[key]
    if abs(ratio - 1) <= SAME:
        return f"{what}: patched and stock differ by less than {SAME:.0%}; one run can't tell."
    if ratio > 1:
        return f"{what}: patched is {ratio:.2f} times as fast as stock."
    return f"{what}: patched is slower here, at {ratio:.0%} of stock's speed."


def _flatness_line(stock: dict, patched: dict) -> str:
    kept = []
    for name, run in (("stock", stock), ("patched", patched)):
        start, end = run["start_tokens_per_second"], run["end_tokens_per_second"]
        if not start or not end:
            return ""
        kept.append(f"{name} keeps {end / start:.0%} of its first speed")
    return "As the chat grows: " + ", ".join(kept) + "."


def _agreement_line(same: dict) -> str:
    if same["shared_tokens"] == same["tokens"]:
        return "Text: every answer is the same, token by token."
    differing = [
        number
        for number, turn in enumerate(same["turns"], 1)
        if turn["shared_tokens"] < turn["tokens"]
    ]
    turns = ", ".join(map(str, differing))
    return (
        f"Text: the answers of turn {turns} differ from some token on (counted up to there); a "
        f"greedy choice between "
        "two nearly equal tokens can fall either way, and what follows it is then another text."
    )


def _run_data(run: ChatRun) -> dict:
    start, end = edges(len(run.turns))
    return {
        "turns": [asdict(turn) for turn in run.turns],
        "notes": run.notes,
        "summary": {
            "start_tokens_per_second": run.speed(start),
            "end_tokens_per_second": run.speed(end),
            "first_turn_first_token_seconds": run.turns[0].first_token_seconds,
            "last_turn_first_token_seconds": run.turns[-1].first_token_seconds,
            "cache_end_bytes": run.turns[-1].cache.now,
            "cache_peak_bytes": max(turn.cache.peak for turn in run.turns),
            "gpu_peak_bytes": run.gpu_peak_bytes,
        },
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _speed(turn: dict) -> str:
    return f"{turn['decode_tokens'] / turn['decode_seconds']:.1f}" if turn["decode_tokens"] else "-"


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _mib(value: int | None) -> str:
    return "-" if value is None else f"{value / MIB:.2f}"


def _ratio(patched: float | None, stock: float | None) -> str:
    return f"{patched / stock:.2f}" if patched is not None and stock else "-"
