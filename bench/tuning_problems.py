"""What a candidate of `bench/autotune.py` is compiled, checked and timed on."""

from __future__ import annotations

from collections.abc import Callable

import op_checks
import torch
from measuring import median_ms
from problems import DTYPES, Attention, Shape, Step, fill
from tuning import Job

from omlx_kernels import ops, tuned
from omlx_kernels.launch import TileConfig
from omlx_kernels.layout import BlockFormat, LayerBlocks, Tier

TIMED_MIXES = ("k8v8", "mixed")
WORKLOADS = {
    "append": "4096 tokens",
    "convert": "64 blocks, hot to K8V8 and K8V8 to K4V4",
    "decode": "8 x 8192 tokens, K8V8 and mixed tiers",
    "extend": "4 x 8192 tokens, K8V8 and mixed tiers",
}
"""In words; the times of the calls are added up."""


def shape_of(job: Job) -> Shape:
    """Return heads that give the job's key."""
    if job.op == "decode":
        group = job.key[2]
        kv_heads = max(1, 32 // group)
        return Shape(kv_heads * group, kv_heads, job.key[0])
    return Shape(32, 8, job.key[0])


def launches(job: Job, device: str, *, tiny: bool = False) -> list[Callable[[], object]]:
    """Return the calls of a job; ``tiny`` ones compile the same kernels on next to no data."""
    if job.op == "append":
        return _append(job, device, 8 if tiny else 4096)
    if job.op == "convert":
        return _convert(job, device, 1 if tiny else 64)
    shape = shape_of(job)
    queries = 1
    if job.op == "extend":
        rows = job.key[2]
        queries = rows // (shape.num_q_heads // shape.num_kv_heads)
        # The largest bucket stands for whole chunks.
        queries = 512 if rows == 512 else max(2, queries)
    lengths = (queries + 600,) if tiny else (8192,) * (8 if job.op == "decode" else 4)
    sms = 82
    if device != "cpu":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
    return [
        Attention(Step(shape, job.key[1], lengths, mix, queries, None, sms), device).run
        for mix in (TIMED_MIXES[1:] if tiny else TIMED_MIXES)
    ]


def _append(job: Job, device: str, tokens: int) -> list[Callable[[], object]]:
    kv_heads, dim = job.key
    blocks = BlockFormat(256, 4, kv_heads, dim, torch.float16).allocate(
        Tier.HOT, -(-tokens // 256), device
    )
    k, v = torch.randn(2, tokens, kv_heads, dim, device=device).half()
    slots = torch.arange(tokens, device=device)
    return [
        lambda rotate=rotate: ops.append_kv(k, v, blocks, slots, rotate_v=rotate)
        for rotate in (False, True)
    ]


def _convert(job: Job, device: str, num_blocks: int) -> list[Callable[[], object]]:
    fmt = BlockFormat(256, 4, 8, job.key[0], torch.float16)
    blocks = LayerBlocks(*(fmt.allocate(tier, num_blocks, device) for tier in Tier))
    fill(blocks)
    ids = torch.arange(num_blocks, dtype=torch.int32, device=device)

    def convert(source: Tier, target: Tier) -> None:
        ops.convert_blocks(blocks.tier(source), blocks.tier(target), source, target, ids, ids)

    pairs = ((Tier.HOT, Tier.K8V8), (Tier.K8V8, Tier.K4V4))
    return [lambda pair=pair: convert(*pair) for pair in pairs]


def check(job: Job, config: TileConfig, device: torch.device) -> None:
    """Compare the op with the oracle, under this tile; raise AssertionError where it is wrong."""
    with tuned.using(job.with_tile(config)), ops.use_implementation("triton"):
        if job.op == "append":
            op_checks.check_append(device, torch.float16, *job.key)
        elif job.op == "convert":
            for source, target in ((Tier.HOT, Tier.K8V8), (Tier.K8V8, Tier.K4V4)):
                op_checks.check_convert(device, torch.float16, job.key[0], source, target)
        else:
            shape = shape_of(job)
            new = 1 if job.op == "decode" else max(2, job.key[2] // 4)
            op_checks.check_attention(
                device,
                [new + 333, new],
                [new, new],
                num_q_heads=shape.num_q_heads // shape.num_kv_heads,
                num_kv_heads=1,
                head_dim=shape.head_dim,
                dtype=DTYPES[job.key[1]],
                window_size=None,
            )


def measure(job: Job, config: TileConfig, device: torch.device) -> float:
    """Return the milliseconds of the job's calls, one after the other."""
    with tuned.using(job.with_tile(config)), ops.use_implementation("triton"):
        return sum(median_ms(run, device) for run in launches(job, str(device)))
