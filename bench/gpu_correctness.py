"""Every op on the device against the float64 oracle: what must pass before anything is timed.

`op_checks` compares one op on one case. Here is which cases are checked, in which order, and what
a run of them says. Among them are blocks that lie more than 2**31 elements into their tensors,
which takes a GPU's memory.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import torch
from op_checks import (
    check_append,
    check_attention,
    check_convert,
    check_copy,
    check_far,
    far_bytes,
)

from omlx_kernels.layout import BLOCK_TIERS, BlockFormat, Tier

Check = tuple[str, str, Callable[[], None]]
"""Op, what is checked, and the call that raises AssertionError."""

FAR = 2**31 + 2**20


def checks(device: torch.device, *, tiny: bool) -> Iterator[Check]:
    """Yield all checks of an op, the cheap ones first; ``tiny`` ones for the interpreter."""
    dtypes = (torch.float16, torch.bfloat16)
    dim = 64 if tiny else 128
    pairs = list(itertools.combinations(BLOCK_TIERS, 2))
    for dtype in dtypes[1:] if tiny else dtypes:
        name = str(dtype).removeprefix("torch.")
        for kv_heads, d in ((2, dim),) if tiny else ((8, 128), (32, 128), (3, 64), (2, 80)):
            yield (
                "append_kv",
                f"{name} {kv_heads}x{d}",
                lambda a=(dtype, kv_heads, d): check_append(device, *a),
            )
        for source, target in pairs:
            yield (
                "convert_blocks",
                f"{name} {source.name} to {target.name}",
                lambda a=(dtype, dim, source, target): check_convert(device, *a),
            )
        for tier in Tier:
            yield (
                "copy_blocks",
                f"{name} {tier.name}",
                lambda a=(dtype, tier): check_copy(device, *a),
            )
    yield from _attention_checks(device, tiny, dtypes)
    yield from _far_checks(device, tiny)


def _far_checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    far = 2**16 if tiny else FAR
    where = f"more than {far} words into the pool"
    heads, dim, size = (1, 64, 64) if tiny else (8, 128, 256)
    fmt = BlockFormat(size, 4, heads, dim, torch.float16)
    case = {"num_q_heads": heads, "num_kv_heads": heads, "head_dim": dim, "block_size": size}
    for tier, new in itertools.product(BLOCK_TIERS, (1, 9)):
        if not tiny or (tier, new) in ((Tier.HOT, 1), (Tier.K4V4, 9)):
            needed = 0 if tiny else far_bytes(fmt, tier, far)
            args = (needed, device, check_far, torch.float16, tier, new, far, case)
            op = "decode" if new == 1 else "extend"
            yield op, f"{tier.name} {where}", lambda args=args: _if_it_fits(*args)
    needed = 0 if tiny else far_bytes(fmt, Tier.K8V8, far)
    args = (needed, device, check_convert, torch.float16, dim, Tier.HOT, Tier.K8V8, far)
    yield "convert_blocks", f"HOT to K8V8 {where}", lambda: _if_it_fits(*args)


class NotEnoughMemoryError(RuntimeError):
    """A check needs more memory than the device has free: it is left out, and says so."""


def _if_it_fits(needed: int, device: torch.device, check: Callable, *args: object) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(device)[0]
        if needed > 0.9 * free:
            raise NotEnoughMemoryError(f"{needed / 2**30:.1f} GiB needed, {free / 2**30:.1f} free")
    check(device, *args)


def _attention_checks(
    device: torch.device, tiny: bool, dtypes: tuple[torch.dtype, ...]
) -> Iterator[Check]:
    lens, far_new = ([150, 1, 70], 20) if tiny else ([1300, 1, 69, 0, 700, 260], 150)
    cold = {tier.name: (tier,) for tier in BLOCK_TIERS[1:]} | {"all tiers": BLOCK_TIERS[1:]}
    base = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64 if tiny else 128}
    options = {
        "window": {"window_size": 90},
        "window, no sinks": {"window_size": 90, "keep_sinks": False},
        "soft-cap": {"softcap": 5.0},
        "learned sinks": {"sink_logits": torch.randn(4) * 3},
        "capped sinks": {"window_size": 90, "sink_q": True},
    }
    shapes = [(4, 2, 64), (7, 1, 128), (2, 2, 80), (2, 1, 256), (32, 8, 128), (8, 8, 128)]
    dtypes = dtypes[1:] if tiny else dtypes
    for new, dtype in itertools.product((1, far_new), dtypes):
        op = "decode" if new == 1 else "extend"
        queries = [min(n, new) for n in lens]
        name = str(dtype).removeprefix("torch.")
        common = base | {"dtype": dtype}
        for tiers, cold_tiers in cold.items():
            if not tiny or tiers == "all tiers":
                rotated = cold_tiers != (Tier.K8V8,)
                kwargs = common | {"cold_tiers": cold_tiers, "rotated_v": rotated}
                kwargs["options"] = {"rotated_v": rotated}
                yield op, f"{name} {tiers}", _attention(device, lens, queries, kwargs)
        for what, chosen in options.items():
            if tiny and what not in ("capped sinks", "learned sinks"):
                continue
            kwargs = common | {"cold_tiers": BLOCK_TIERS[1:], "options": dict(chosen)}
            if "sink_q" in chosen:
                shape = (sum(queries), common["num_q_heads"], common["head_dim"])
                kwargs["options"]["sink_q"] = torch.randn(shape).to(dtype)
            yield op, f"{name} {what}", _attention(device, lens, queries, kwargs)
        for q_heads, kv_heads, dim in () if tiny else shapes:
            heads = {"num_q_heads": q_heads, "num_kv_heads": kv_heads, "head_dim": dim}
            kwargs = common | heads | {"cold_tiers": BLOCK_TIERS[1:]}
            shape = f"{q_heads}/{kv_heads}/{dim}"
            yield op, f"{name} {shape}", _attention(device, lens[:3], queries[:3], kwargs)


def _attention(device: torch.device, lens: list[int], new: list[int], kwargs: dict) -> Callable:
    return lambda: check_attention(device, lens, new, **kwargs)


def run(todo: list[Check], deadline: float) -> list[dict]:
    """Run the checks until ``deadline`` (`time.monotonic`).

    Returns:
        One row a check: op, check, result ("ok", "WRONG", "FAILED", "skipped"), reason, seconds.
    """
    rows = []
    for op, name, check in todo:
        start = time.monotonic()
        row = {"op": op, "check": name, "result": "ok", "reason": ""}
        if start > deadline:
            row |= {"result": "skipped", "reason": "out of time"}
        else:
            try:
                torch.manual_seed(0)
                check()
            except NotEnoughMemoryError as error:
                row |= {"result": "skipped", "reason": str(error)}
            except AssertionError as error:
                row |= {"result": "WRONG", "reason": str(error).strip()[:500]}
            except Exception as error:  # a kernel that does not compile or launch is a result too
                row |= {"result": "FAILED", "reason": f"{type(error).__name__}: {error}"[:500]}
        rows.append(row | {"seconds": round(time.monotonic() - start, 3)})
    return rows


def sound_ops(rows: list[dict]) -> set[str]:
    """Return the ops that may be timed: something passed, nothing failed."""
    bad = {row["op"] for row in rows if row["result"] in ("WRONG", "FAILED")}
    return {row["op"] for row in rows if row["result"] == "ok"} - bad
