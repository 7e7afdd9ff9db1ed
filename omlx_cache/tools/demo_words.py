"""What the demo's numbers mean, in plain words.

Nothing is claimed that was not measured in this run; what is slower or larger is called that.
"""

from __future__ import annotations

from omlx_cache.tools.yardstick import BUSY, disturbance

SAME = 0.05


def explain(report: dict) -> list[str]:
    """Return what the numbers of a run mean, a statement a line.

    Args:
        report: what `summarize` returned.
    """
    stock, patched = report["stock"]["summary"], report["patched"]["summary"]
    lines = [
        _memory(stock, patched, report["patched"]["turns"][-1]["context_tokens"]),
        *_speeds(stock, patched),
        *_text(report["stock"], report["patched"]),
        _window(report["settings"], report["patched"]["turns"][-1]["context_tokens"]),
        "How it was measured: both runs in this process, one after the other, each after a short "
        "warm-up, greedy, on one cache over all turns. Stock bytes are those of the key and value "
        "tensors after each turn (the copy of one layer that torch.cat makes meanwhile is not in "
        "them). Patched bytes are what omlx_cache.report says, temporary copies included in the "
        "peak. Speeds are of one run and vary from run to run.",
    ]
    return [
        line for line in (*lines, *report["stock"]["notes"], *report["patched"]["notes"]) if line
    ]


def _memory(stock: dict, patched: dict, tokens: int) -> str:
    share = patched["cache_end_bytes"] / stock["cache_end_bytes"]
    peak = patched["cache_peak_bytes"] / stock["cache_peak_bytes"]
    saved = "" if share < 1 else " Here it saves nothing."
    return (
        f"Memory: with {tokens:,} tokens the patched cache takes {share:.0%} of the stock cache's "
        f"bytes at the end, {peak:.0%} at the peak.{saved}"
    )


def _speeds(stock: dict, patched: dict) -> list[str]:
    worst = disturbance(stock["yardstick_seconds"] + patched["yardstick_seconds"])
    if worst > BUSY:
        return [
            f"Speed: not compared. Other programs kept this machine busy: a fixed piece of work "
            f"took up to {worst:.1f} times as long as at best while the chats ran. Close them, or "
            f"try --threads with fewer threads than cores."
        ]
    return [
        _speed("Generating, first turns", stock, patched, "start_tokens_per_second"),
        _speed("Generating, last turns", stock, patched, "end_tokens_per_second"),
        _flatness(stock, patched),
    ]


def _speed(what: str, stock: dict, patched: dict, key: str) -> str:
    if not stock[key] or not patched[key]:
        return f"{what}: the answers were too short to measure a speed."
    ratio = patched[key] / stock[key]
    if abs(ratio - 1) <= SAME:
        return f"{what}: no difference that one run could show (within {SAME:.0%})."
    if ratio > 1:
        return f"{what}: patched is {ratio:.2f} times as fast as stock."
    return f"{what}: patched is slower, at {ratio:.0%} of stock's speed."


def _flatness(stock: dict, patched: dict) -> str:
    kept = []
    for name, run in (("stock", stock), ("patched", patched)):
        start, end = run["start_tokens_per_second"], run["end_tokens_per_second"]
        if not start or not end:
            return ""
        kept.append(f"{name} ends at {end / start:.0%} of its first speed")
    return f"As the chat grows: {', '.join(kept)}."


def _text(stock_run: dict, patched_run: dict) -> list[str]:
    noise, same = stock_run["summary"]["same"], patched_run["summary"]["same"]
    if same is None:
        return []
    if same["identical"] == same["tokens"]:
        return ["Text: every answer is the same, token by token."]
    turns = patched_run["turns"]
    equal = sum(turn["same"]["identical"] == turn["same"]["tokens"] for turn in turns)
    lines = [
        f"Text: {equal} of {len(turns)} answers are the same, token by token. After the first "
        f"token that differs an answer is another text, so the choices were also compared one by "
        f"one with the same text before them: {same['same']} of {same['tokens']} are the same."
    ]
    if noise is not None:
        lines.append(
            f"For scale: the stock model itself, given its own answers in one pass instead of "
            f"token by token, makes {noise['same']} of {noise['tokens']} of its choices again "
            f"(rounding tips nearly equal choices)."
        )
    return lines


def _window(settings: dict, tokens: int) -> str:
    window = settings.get("cache", {}).get("window_size")
    if not isinstance(window, int) or window >= tokens:
        return ""
    return (
        f"The patched model saw no more than the last {window:,} tokens and the first few, the "
        f"stock model all {tokens:,}: less memory, and other answers where they need the rest."
    )
