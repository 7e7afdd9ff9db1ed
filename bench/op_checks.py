"""Compare one op on a device with the float64 oracle; each check raises AssertionError.

The cases and the tolerance (twice the error of plain PyTorch in the same precision) are those of
the tests in ``python_tests/kernels``; so are ragged lengths, shuffled physical blocks, and poison
in all that nobody may read.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "python_tests" / "kernels"))

import torch
from strategies import Case, make_case, poison
from tolerance import assert_as_exact_as_plain

from omlx_kernels import ops, reference
from omlx_kernels.layout import BLOCK_TIERS, BlockFormat, LayerBlocks, Tier, TierBlocks


def moved(value: object, device: torch.device) -> object:
    """Copy a tensor, or every tensor of a nested dataclass, to ``device``."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if dataclasses.is_dataclass(value):
        parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: moved(x, device) for name, x in parts.items()})
    return value


def check_attention(
    device: torch.device, lens: list[int], new: list[int], *, options: dict | None = None, **case
) -> None:
    """Compare `paged_attention` with the oracle on a case of `strategies.make_case`."""
    compare(make_case(lens, new, **case), device, **(options or {}))


def compare(case: Case, device: torch.device, on_device: Case | None = None, **options) -> None:
    """Run a case on the device (or ``on_device`` in its place) and compare with the oracle."""
    there = on_device or moved(case, device)
    options |= case.attention_kwargs()
    kwargs = {name: moved(value, device) for name, value in options.items()}
    mass = None
    if case.meta.max_query_len == 1:
        mass = torch.full((len(case.meta.splits), case.q.shape[1]), float("nan"), device=device)
    got = ops.paged_attention(there.q, there.blocks, there.meta, split_mass=mass, **kwargs)
    assert_as_exact_as_plain(got, case, **options)
    if mass is not None:
        want = torch.zeros(mass.shape)
        reference.paged_attention(case.q, case.blocks, case.meta, split_mass=want, **options)
        assert (mass.cpu() - want).abs().max() <= 1e-4, "the mass of a split is wrong"


def check_append(device: torch.device, dtype: torch.dtype, kv_heads: int, dim: int) -> None:
    """Compare `append_kv`, plain and rotating, with the reference."""
    slots = torch.tensor([3, -1, 70, 64, 1, 191])
    k, v = torch.randn(2, len(slots), kv_heads, dim).to(dtype)
    fmt = BlockFormat(64, 4, kv_heads, dim, dtype)
    for rotate in (False, True):
        got = fmt.allocate(Tier.HOT, 3, device)
        want = dataclasses.replace(fmt, dtype=torch.float64).allocate(Tier.HOT, 3, "cpu")
        for tensor in (got.k, got.v, want.k, want.v):
            tensor.fill_(float("nan"))
        ops.append_kv(k.to(device), v.to(device), got, slots.to(device), rotate_v=rotate)
        reference.append_kv(k.double(), v.double(), want, slots, rotate_v=rotate)
        torch.testing.assert_close(got.k.cpu().double(), want.k, rtol=0, atol=0, equal_nan=True)
        step = torch.finfo(dtype).eps / 2 + 2 * torch.finfo(torch.float32).eps
        rtol, atol = (step, 2e-6) if rotate else (0, 0)
        torch.testing.assert_close(
            got.v.cpu().double(), want.v, rtol=rtol, atol=atol, equal_nan=True
        )


def check_convert(
    device: torch.device, dtype: torch.dtype, dim: int, source: Tier, target: Tier, far: int = 0
) -> None:
    """Compare `convert_blocks` with the reference: scales exactly, codes but for ties.

    The results are written ``far`` 16-bit words into their tensors.
    """
    fmt = BlockFormat(128, 4, 2, dim, dtype)
    hot = fmt.allocate(Tier.HOT, 3, "cpu")
    hot.k.normal_()
    hot.v.normal_()
    everything = torch.arange(3, dtype=torch.int32)
    src = hot if source is Tier.HOT else fmt.allocate(source, 3, "cpu")
    if source is not Tier.HOT:
        reference.convert_blocks(hot, src, Tier.HOT, source, everything, everything)
    ids, to = everything[[2, 0]], everything[[1, 2]]
    offset = _far_offset(fmt, target, far)
    got, want = fmt.allocate(target, offset + 3, device), fmt.allocate(target, 3, "cpu")
    there = (to + offset).to(device)
    ops.convert_blocks(moved(src, device), got, source, target, ids.to(device), there)
    reference.convert_blocks(src, want, source, target, ids, to)
    got = TierBlocks(**{name: tensor[offset:] for name, tensor in got.tensors().items()})
    compare_blocks(got, want, to.tolist(), ties=1e-3)


def compare_blocks(got: TierBlocks, want: TierBlocks, ids: list[int], ties: float) -> None:
    """Compare blocks bit for bit; of the codes a share of ``ties`` may differ."""
    for name, tensor in want.tensors().items():
        a, b = got.tensors()[name][ids].cpu(), tensor[ids]
        share = 0.0 if b.is_floating_point() else ties
        different = (a.view(torch.uint8) != b.view(torch.uint8)).double().mean().item()
        assert different <= share, f"{name}: {different:.2%} of the bytes differ"


def check_copy(device: torch.device, dtype: torch.dtype, tier: Tier) -> None:
    """Check that `copy_blocks` copies every part, and no other block changes."""
    blocks = LayerBlocks(*(BlockFormat(64, 4, 2, 64, dtype).allocate(t, 4, device) for t in Tier))
    poison(blocks)
    stored = blocks.tier(tier)
    for i, tensor in enumerate(stored.tensors().values()):
        tensor[1].fill_(i + 1)
    before = TierBlocks(**{name: t.cpu().clone() for name, t in stored.tensors().items()})
    ids = torch.tensor([1, 3], dtype=torch.int32, device=device)
    ops.copy_blocks(stored, ids[:1], ids[1:])
    compare_blocks(stored, before, [0, 1, 2], ties=0)
    after = TierBlocks(**{name: t[[3]] for name, t in stored.tensors().items()})
    compare_blocks(after, TierBlocks(**{n: t[[1]] for n, t in before.tensors().items()}), [0], 0)


def _far_offset(fmt: BlockFormat, tier: Tier, far: int) -> int:
    """Return the first block whose keys lie ``far`` 16-bit words into their tensor.

    Kernels read codes as 16-bit words, so this is the unit in which an offset must not overflow.
    """
    shape, dtype = fmt.parts(tier)["k"]
    return -(-2 * far // (torch.Size(shape).numel() * dtype.itemsize))


def check_far(
    device: torch.device, dtype: torch.dtype, tier: Tier, new: int, far: int, case_kwargs: dict
) -> None:
    """Put a tier's blocks ``far`` words into their tensors, and attend to them there.

    Hot blocks are written there by `append_kv`; all are then moved a little further by
    `copy_blocks`.
    """
    case = make_case(
        [330 + new, 70 + new], [new, new], dtype=dtype, hot_blocks=0,
        cold_tiers=(tier,) if tier.bits else (Tier.K8V8,), **case_kwargs,
    )  # fmt: skip
    there, stored = moved(case, device), case.blocks.tier(tier)
    offset = _far_offset(case.format, tier, far)
    pool = case.format.allocate(tier, offset + 2 * stored.num_blocks, device)
    if tier.bits:
        for name, tensor in stored.tensors().items():
            pool.tensors()[name][offset : offset + len(tensor)] = tensor.to(device)
    else:
        k, v = (getattr(stored, x).to(device).transpose(1, 2).flatten(0, 1) for x in "kv")
        slots = torch.arange(len(k), device=device) + offset * case.format.block_size
        ops.append_kv(k, v, pool, slots)
    ids = torch.arange(stored.num_blocks, dtype=torch.int32, device=device) + offset
    ops.copy_blocks(pool, ids, ids + stored.num_blocks)
    table, bounds = there.meta.block_table, there.meta.tier_starts
    i = BLOCK_TIERS.index(tier)
    entries = torch.arange(table.shape[1], device=device)[None]
    inside = (entries >= bounds[:, i, None]) & (entries < bounds[:, i + 1, None])
    assert bool(inside.any()), f"no block of {tier.name} in the case"
    moved_table = torch.where(inside, table + offset + stored.num_blocks, table)
    meta = dataclasses.replace(there.meta, block_table=moved_table)
    blocks = dataclasses.replace(there.blocks, **{tier.name.lower(): pool})
    compare(case, device, dataclasses.replace(there, meta=meta, blocks=blocks))


def far_bytes(fmt: BlockFormat, tier: Tier, far: int) -> int:
    """Return the bytes of device memory that a check ``far`` into a tier needs, roughly."""
    return (_far_offset(fmt, tier, far) + 64) * fmt.bytes_per_block(tier)
