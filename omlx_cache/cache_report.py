"""What a cache holds, in numbers: a snapshot that is cheap to take and holds no tensor."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class CacheReport:
    """A snapshot of a `PagedCache`; sizes in bytes over all layers, everything allocated counted.

    Attributes:
        active_blocks: blocks in use, over all layer groups.
        total_blocks: ``max_gpu_blocks`` times the groups; without a bound, the blocks that the
            tensors have room for.
        bytes_by_tier: ``sink``, ``hot`` and ``k8v8`` (codes, scales and zeros; free blocks
            included), by the tier's name in lower case.
        total_bytes: sum of ``bytes_by_tier``.
        peak_bytes: the most that was ever allocated at once, temporary copies included.
        unquantized_bytes: what the same tokens take unpaged in the model's dtype, full length.
        block_utilization: share of the token slots of the active blocks that hold a token, 0..1.
        cached_tokens: tokens stored, over all sequences; padding is never stored. A window
            releases tokens, and those are not counted.
        seen_tokens: tokens that the sequences have seen.
        num_sequences: rows of the batch.
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

    def to_dict(self) -> dict:
        """Return the fields as a JSON-able dict."""
        return asdict(self)

    def __str__(self) -> str:
        mb = 1e6
        tiers = ", ".join(f"{name} {size / mb:.2f}" for name, size in self.bytes_by_tier.items())
        saved = 1 - self.total_bytes / self.unquantized_bytes if self.unquantized_bytes else 0.0
        return (
            f"[KV cache] {self.cached_tokens} of {self.seen_tokens} tokens in "
            f"{self.active_blocks}/{self.total_blocks} blocks "
            f"({self.block_utilization:.0%} full), {self.total_bytes / mb:.2f} MB ({tiers}), "
            f"peak {self.peak_bytes / mb:.2f} MB, {saved:.0%} saved"
        )
