"""The one exception style of both packages: what, expected, got, remedy."""

from __future__ import annotations


def describe(op: str, what: str, expected: str, got: str, remedy: str | None = None) -> str:
    """Compose the message of an argument error.

    Args:
        op: name of the public function that refuses, e.g. ``"paged_attention"``.
        what: the argument or state that is wrong.
        expected: what would have been accepted.
        got: what was there instead.
        remedy: what the caller can do, as an imperative sentence without a full stop.

    Example:
        >>> describe("paged_attention", "q", "a contiguous last dimension", "stride 2",
        ...          "call .contiguous()")
        'paged_attention: q must be a contiguous last dimension, got stride 2; call .contiguous()'
    """
    message = f"{op}: {what} must be {expected}, got {got}"
    return f"{message}; {remedy}" if remedy else message


class OutOfBlocksError(RuntimeError):
    """The pool cannot hold what was asked for; nothing was changed.

    Attributes:
        needed: blocks that the request needs on top of those in use.
        free: blocks that were free.
        total: blocks that the pool may hold.
        bound: the key of the configuration that says so.
    """

    def __init__(self, needed: int, free: int, total: int, bound: str = "max_gpu_blocks") -> None:
        self.needed, self.free, self.total, self.bound = needed, free, total, bound
        elsewhere = "cpu_offload or pruning" if bound == "max_gpu_blocks" else "pruning"
        super().__init__(
            f"out of cache blocks: {needed} needed, {free} free, {total} configured "
            f"({bound}); raise {bound}, use {elsewhere}, set a smaller window_size, shorten the "
            f"prompt, or release a sequence. The cache is unchanged"
        )
