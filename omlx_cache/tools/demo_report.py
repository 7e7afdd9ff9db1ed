"""The demo's numbers: as plain data for JSON, and as the two tables that it ends with."""

from __future__ import annotations

from dataclasses import asdict

from rich import box
from rich.table import Table

from omlx_cache.tools.chat_run import ChatRun
from omlx_cache.tools.machine import machine, versions

MIB = 2**20


def summarize(stock: ChatRun, patched: ChatRun, settings: dict) -> dict:
    """Return every number of a demo as plain data.

    Args:
        stock: the run on the model's own cache.
        patched: the run with the paged cache, same messages.
        settings: how the demo was started.

    Returns:
        ``settings``, ``machine``, ``versions``, and for each of ``stock`` and ``patched`` its
        ``turns``, ``summary`` and ``notes``. Bytes, seconds, tokens per second; None is "not
        measured". ``same`` counts greedy choices equal to the stock run's answer (see `Agreement`),
        for the stock run itself those that it repeats when it computes its answer in one pass.
    """
    return {
        "settings": settings,
        "machine": machine(),
        "versions": versions(),
        "stock": _run_data(stock),
        "patched": _run_data(patched),
    }


def edges(num_turns: int) -> tuple[slice, slice]:
    """Return the turns that count as the start and as the end: a third each, at least one.

    >>> edges(6)
    (slice(0, 2, None), slice(4, 6, None))
    """
    third = max(1, num_turns // 3)
    return slice(0, third), slice(num_turns - third, num_turns)


def turn_table(report: dict) -> Table:
    """Return the table with a row per turn, stock / patched side by side."""
    table = Table(title="Turn by turn (stock / patched)", box=box.SIMPLE_HEAD)
    names = ("turn", "tokens", "first token, s", "tokens/s", "cache, MiB", "same text")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    turns = zip(report["stock"]["turns"], report["patched"]["turns"], strict=True)
    for number, (stock, patched) in enumerate(turns, start=1):
        table.add_row(
            str(number),
            f"{stock['context_tokens']:,}",
            f"{stock['first_token_seconds']:.2f} / {patched['first_token_seconds']:.2f}",
            f"{_speed(stock)} / {_speed(patched)}",
            f"{_mib(stock['cache']['now'])} / {_mib(patched['cache']['now'])}",
            _same(patched["same"]),
        )
    return table


def summary_table(report: dict) -> Table:
    """Return the closing table: stock, patched, and patched over stock."""
    table = Table(title="The whole chat", box=box.SIMPLE_HEAD)
    for name in ("", "stock", "patched", "patched / stock"):
        table.add_column(name, justify="right" if name else "left")
    stock, patched = report["stock"]["summary"], report["patched"]["summary"]
    rows = [
        ("tokens/s at the start", "start_tokens_per_second", _decimal),
        ("tokens/s at the end", "end_tokens_per_second", _decimal),
        ("first token of the first turn, s", "first_turn_first_token_seconds", _decimal),
        ("first token of the last turn, s", "last_turn_first_token_seconds", _decimal),
        ("cache at the end, MiB", "cache_end_bytes", _mib),
        ("cache at its peak, MiB", "cache_peak_bytes", _mib),
    ]
    if stock["gpu_peak_bytes"] is not None:
        rows.append(("GPU memory above the model, MiB", "gpu_peak_bytes", _mib))
    for label, key, show in rows:
        ours, theirs = patched[key], stock[key]
        ratio = f"{ours / theirs:.2f}" if ours is not None and theirs else "-"
        table.add_row(label, show(theirs), show(ours), ratio)
    table.add_row("greedy choices as stock's", _same(stock["same"]), _same(patched["same"]), "")
    return table


def _run_data(run: ChatRun) -> dict:
    start, end = edges(len(run.turns))
    turns = [asdict(turn) for turn in run.turns]
    compared = [turn["same"] for turn in turns]
    same = None
    if None not in compared:
        same = {key: sum(one[key] for one in compared) for key in ("same", "identical", "tokens")}
    return {
        "turns": turns,
        "notes": run.notes,
        "summary": {
            "start_tokens_per_second": run.speed(start),
            "end_tokens_per_second": run.speed(end),
            "first_turn_first_token_seconds": run.turns[0].first_token_seconds,
            "last_turn_first_token_seconds": run.turns[-1].first_token_seconds,
            "cache_end_bytes": run.turns[-1].cache.now,
            "cache_peak_bytes": max(turn.cache.peak for turn in run.turns),
            "gpu_peak_bytes": run.gpu_peak_bytes,
            "yardstick_seconds": run.yardstick_seconds,
            "same": same,
        },
    }


def _speed(turn: dict) -> str:
    return f"{turn['decode_tokens'] / turn['decode_seconds']:.1f}" if turn["decode_tokens"] else "-"


def _same(same: dict | None) -> str:
    return "-" if same is None else f"{same['same']} of {same['tokens']}"


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _mib(value: int | None) -> str:
    return "-" if value is None else f"{value / MIB:.1f}"
