"""What a cache holds, in numbers: a snapshot that is cheap to take and holds no tensor."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from omlx_cache.layer_group import LayerGroup
from omlx_kernels.layout import BLOCK_TIERS, Tier

if TYPE_CHECKING:
    from omlx_cache.cache import PagedCache


@dataclass(frozen=True)
class CacheReport:
    """A snapshot of a `PagedCache`; sizes in bytes over all layers, everything allocated counted.

    Attributes:
        active_blocks: blocks in use, over all layer groups.
        total_blocks: ``max_gpu_blocks`` times the groups; without a bound, the blocks that the
            tensors have room for.
        bytes_by_tier: codes, scales and zeros, free blocks included, by the tier's name in lower
            case: ``sink``, ``hot``, ``k8v8``, ``k8v4``, ``k4v4``.
        total_bytes: sum of ``bytes_by_tier``.
        peak_bytes: the most that was ever allocated at once, temporary copies included.
        unquantized_bytes: what the same tokens take unpaged in the model's dtype, full length.
        block_utilization: share of the token slots of the active blocks that hold a token, 0..1.
        cached_tokens: tokens stored, over all sequences; padding is never stored. A window
            releases tokens, and those are not counted.
        seen_tokens: tokens that the sequences have seen.
        num_sequences: rows of the batch.
        reused_tokens: of the tokens seen, those that an earlier call had left (``prefix_cache``),
            and that were not computed again.
        blocks_from_disk: blocks that were read from the disk for them (``disk_cache``), over all
            layer groups, a sink page counted as one.
        blocks_read_ahead: of those, the ones that were read, or being read, when they were needed
            (``prefetch``).
        read_ahead_seconds: what those would have taken to read.
        offloaded_blocks: blocks in CPU memory, over all layer groups (``cpu_offload``).
        offloaded_bytes: what they take there, free blocks included; not in ``total_bytes``.
        recall_hit_rate: share of the blocks that steps recalled which they would have chosen by
            their own queries, 0..1 (``recall: topk``); None where nothing was left out yet.
        copy_ahead_rate: share of the copies of a layer's offloaded blocks to the device, for the
            queries of a prompt, that had begun before the layer ran, 0..1 (``prefetch``); the first
            layer of a step isn't counted. None where nothing had to be copied: on a CPU, nothing.

    With ``prefix_cache`` the caches of a model share their blocks: blocks and bytes are then those
    of all of them and of what is kept for later calls, tokens and sequences this cache's.
    """

    active_blocks: int
    total_blocks: int
    bytes_by_tier: dict[str, int]
    total_bytes: int
    peak_bytes: int
    unquantized_bytes: int
    block_utilization: float
    cached_tokens: int
    seen_tokens: int
    num_sequences: int
    reused_tokens: int
    blocks_from_disk: int
    blocks_read_ahead: int
    read_ahead_seconds: float
    offloaded_blocks: int
    offloaded_bytes: int
    recall_hit_rate: float | None
    copy_ahead_rate: float | None

    def to_dict(self) -> dict:
        """Return the fields as a JSON-able dict."""
        return asdict(self)

    def __str__(self) -> str:
        mb = 1e6
        tiers = ", ".join(f"{name} {size / mb:.2f}" for name, size in self.bytes_by_tier.items())
        return (
            f"[KV cache] {self.cached_tokens} of {self.seen_tokens} tokens in "
            f"{self.active_blocks}/{self.total_blocks} blocks "
            f"({self.block_utilization:.0%} full), {self.total_bytes / mb:.2f} MB ({tiers}), "
            f"peak {self.peak_bytes / mb:.2f} MB, {self._saving()}"
        )

    def _saving(self) -> str:
        """Compare with an unpaged cache; a chat shorter than its first blocks saves nothing yet."""
        if not self.unquantized_bytes:
            return "nothing stored yet"
        if self.total_bytes > self.unquantized_bytes:
            more = (self.total_bytes - self.unquantized_bytes) / 1e6
            return f"{more:.2f} MB more than unpaged, for blocks that are not full yet"
        return f"{1 - self.total_bytes / self.unquantized_bytes:.0%} saved"


def report_of(cache: PagedCache) -> CacheReport:
    """Take a snapshot of what a cache holds."""
    bytes_by_tier = {tier.name.lower(): 0 for tier in Tier}
    unquantized = 0
    for layer in cache.layers:
        if layer.pool is None:
            continue
        for tier in Tier:
            bytes_by_tier[tier.name.lower()] += layer.pool.num_bytes(tier)
        block_format = layer.pool.format
        per_token = block_format.bytes_per_block(Tier.HOT) // block_format.block_size
        unquantized += per_token * sum(row.length for row in layer.group.rows)
    stored = [_tokens_in_blocks(group) for group in cache.groups]
    active = sum(group.blocks.num_used for group in cache.groups)
    rooms = [
        group.blocks.max_blocks or sum(group.blocks.capacity(tier) for tier in BLOCK_TIERS)
        for group in cache.groups
    ]
    # Shared blocks hold their tokens for several rows; utilization counts them once.
    slots = active * cache.config.block_size
    hosts = [group.arena.host for group in cache.groups if group.arena.host is not None]
    hits, chosen = (
        sum(getattr(group.recall, name) for group in cache.groups) for name in ("hits", "chosen")
    )
    copies = [sum(getattr(host.ahead, name) for host in hosts) for name in ("hits", "misses")]
    first = cache.groups[0]
    sinks = [min(row.length, first.geometry.sink_tokens) for row in first.rows]
    return CacheReport(
        active_blocks=active,
        total_blocks=sum(rooms),
        bytes_by_tier=bytes_by_tier,
        total_bytes=sum(bytes_by_tier.values()),
        peak_bytes=cache.meter.peak,
        unquantized_bytes=unquantized,
        block_utilization=sum(stored) / slots if slots else 0.0,
        cached_tokens=sum(sinks) + _tokens_in_rows(first),
        seen_tokens=sum(row.length for row in first.rows),
        num_sequences=len(first.rows),
        reused_tokens=cache.reused_tokens,
        blocks_from_disk=cache.prefix.reads.blocks,
        blocks_read_ahead=min(cache.prefix.reads.ahead, cache.prefix.reads.blocks),
        read_ahead_seconds=cache.prefix.reads.seconds_saved,
        offloaded_blocks=sum(host.blocks.num_used for host in hosts),
        offloaded_bytes=sum(host.meter.current for host in hosts),
        recall_hit_rate=hits / chosen if chosen else None,
        copy_ahead_rate=copies[0] / sum(copies) if sum(copies) else None,
    )


def _tokens_in_rows(group: LayerGroup) -> int:
    """Tokens that the rows' live blocks hold, shared blocks counted for each row."""
    size = group.geometry.block_size
    held = [(row, block) for row in group.rows for block in [*row.blocks, *row.offloaded]]
    return sum(min(size, row.length - block.start) for row, block in held)


def _tokens_in_blocks(group: LayerGroup) -> int:
    """Tokens that the group's blocks hold, shared blocks counted once."""
    size = group.geometry.block_size
    held = {
        (b.tier, b.index): min(size, row.length - b.start) for row in group.rows for b in row.blocks
    }
    return sum(held.values())
