"""Compile kernels for GPUs that are not there, and read from the machine code what they will do.

A stub driver says which architecture to compile for, and every launch inside `recording` is turned
into a compilation with the launcher's real arguments and options. `inspect` disassembles the result
with the tools that ship with triton. Nothing runs, so CPU tensors are fine.

Must not share a process with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

NVIDIA_BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

SHARED_LIMIT = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99, "gfx942": 64}
"""KiB of shared memory that one program may use."""
SHARED_PER_SM = {80: 164, 86: 100, 89: 100, 90: 228, 100: 228, 120: 100}
"""KiB of shared memory of a multiprocessor; a resident program also costs 1 KiB of it."""
WARPS_PER_SM = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}


AMD_WIDTHS = {"ubyte": 8, "sbyte": 8, "ushort": 16, "short": 16, "dwordx2": 64, "dwordx4": 128}
"""Bits of a load by the ending of its name; the others are 32 wide."""


class StubDriver(DriverBase):
    """A driver that knows its target and nothing else."""

    def __init__(self, target: GPUTarget) -> None:
        super().__init__()
        self.target = target

    @classmethod
    def is_active(cls) -> bool:
        """Never picked by itself."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Not needed: nothing is launched."""
        raise NotImplementedError

    def get_current_target(self) -> GPUTarget:
        """Return the architecture to compile for."""
        return self.target

    def get_current_device(self) -> str:
        """Return a key of triton's per-device kernel cache: one for each architecture."""
        return f"{self.target.backend}:{self.target.arch}"

    def get_current_stream(self, device: str) -> int:
        """Return what a launch would use; there is none."""
        return 0

    def get_active_torch_device(self) -> None:
        """Not needed: nothing is launched."""
        raise NotImplementedError

    def get_benchmarker(self) -> None:
        """Not needed: nothing is timed."""
        raise NotImplementedError


def gpu_target(arch: int | str) -> GPUTarget:
    """Return the target of an NVIDIA compute capability (86) or an AMD architecture (gfx942)."""
    if isinstance(arch, int):
        return GPUTarget("cuda", arch, 32)
    return GPUTarget("hip", arch, 64)


@contextmanager
def recording(arch: int | str) -> Iterator[list]:
    """Turn launches into compilations for ``arch``; yield the list that receives the kernels."""
    launch = JITFunction.run
    compiled: list = []

    def compile_only(self: JITFunction, *args: object, grid: object, warmup: bool, **kw: object):
        kernel = launch(self, *args, grid=grid, warmup=True, **kw)
        compiled.append(kernel)
        return kernel

    triton.runtime.driver.set_active(StubDriver(gpu_target(arch)))
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = launch
        triton.runtime.driver._active = None


@dataclass(frozen=True)
class Tile:
    """A two-dimensional tile that is copied to shared memory asynchronously.

    Attributes:
        num_bytes: bytes of the whole tile.
        bits: bits that a thread copies at once.
    """

    num_bytes: int
    bits: int


@dataclass(frozen=True)
class Report:
    """What the machine code of one kernel shows.

    Attributes:
        name: the kernel.
        arch: what it was compiled for.
        num_warps: warps of a program.
        num_stages: stages of its software pipeline.
        registers: 32-bit registers a thread.
        spills: local-memory loads and stores (vector-register spills on AMD).
        shared: bytes of shared memory a program.
        instructions: machine instructions by opcode with its modifiers.
        tiles: tiles that are copied to shared memory asynchronously (see `Tile`).
    """

    name: str
    arch: int | str
    num_warps: int
    num_stages: int
    registers: int
    spills: int
    shared: int
    instructions: Counter[str]
    tiles: tuple[Tile, ...] = ()

    def count(self, pattern: str) -> int:
        """Count the instructions whose full opcode matches the regular expression."""
        return sum(n for op, n in self.instructions.items() if re.match(pattern, op))

    @property
    def tensor_core(self) -> int:
        """Tensor-core instructions (HMMA, IMMA, HGMMA, UTCHMMA ...; v_mfma on AMD)."""
        return self.count(r"(H|I|Q|D)MMA|(H|I|Q)GMMA|UTC\w*MMA|v_mfma")

    @property
    def copies(self) -> dict[int, int]:
        """Loads from global memory by width in bits, asynchronous copies included."""
        widths: Counter[int] = Counter()
        for op, n in self.instructions.items():
            if op.startswith("LDG"):
                width = re.search(r"\.(?:U|S)?(8|16|64|128|256)\b", op)
                widths[int(width.group(1)) if width else 32] += n
            elif load := re.match(r"(?:global|buffer)_load_([a-z0-9]+)", op):
                widths[AMD_WIDTHS.get(load.group(1), 32)] += n
        return dict(widths)

    @property
    def async_copies(self) -> dict[int, int]:
        """Asynchronous copies to shared memory (LDGSTS) by width in bits."""
        widths: Counter[int] = Counter()
        for op, n in self.instructions.items():
            if op.startswith("LDGSTS"):
                width = re.search(r"\.(64|128)\b", op)
                widths[int(width.group(1)) if width else 32] += n
        return dict(widths)

    @property
    def programs_per_sm(self) -> int | None:
        """Programs that fit on a multiprocessor at once; None where it is not known."""
        if self.arch not in SHARED_PER_SM:
            return None
        registers = -(-self.registers // 8) * 8 * 32 * self.num_warps
        by_registers = 65536 // max(registers, 1)
        by_shared = SHARED_PER_SM[self.arch] * 1024 // (self.shared + 1024)
        return min(by_registers, by_shared, WARPS_PER_SM[self.arch] // self.num_warps)


def inspect(kernel: object, arch: int | str) -> Report:
    """Disassemble a compiled kernel."""
    meta = kernel.metadata
    common = {
        "name": meta.name,
        "arch": arch,
        "num_warps": meta.num_warps,
        "num_stages": meta.num_stages,
        "shared": meta.shared,
    }
    if "cubin" not in kernel.asm:
        text = kernel.asm["amdgcn"]
        return Report(
            registers=int(re.search(r"\.vgpr_count:\s*(\d+)", text).group(1)),
            spills=int(re.search(r"\.vgpr_spill_count:\s*(\d+)", text).group(1)),
            instructions=Counter(re.findall(r"^\s+([a-z]\w+)", text, re.M)),
            **common,
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        sass = _run("nvdisasm", "-c", file.name)
    # "/*0a30*/  @!P0 LDGSTS.E.BYPASS.128 [R5+0x800], desc[UR4][R2.64] ;"
    opcodes = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", sass, re.M)
    instructions = Counter(opcodes)
    return Report(
        registers=int(re.search(r"REG:(\d+)", usage).group(1)),
        spills=sum(n for op, n in instructions.items() if op.startswith(("STL", "LDL"))),
        instructions=instructions,
        tiles=_tiles(kernel.asm["ttgir"]),
        **common,
    )


def _tiles(ttgir: str) -> tuple[Tile, ...]:
    """Find the asynchronous copies of tiles, and how many elements a thread copies at once.

    The compiler notes the run of elements where it knows better than the layout.
    """
    layouts = dict(
        re.findall(r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[\d+, (\d+)\]", ttgir, re.M)
    )
    copies = re.findall(
        r"ttg\.async_copy_global_to_local (.*?): "
        r"tensor<(\d+)x(\d+)x!tt\.ptr<[a-z]+(\d+)>, (#\w+)",
        ttgir,
    )
    tiles = []
    for attributes, rows, columns, bits, layout in copies:
        run = re.search(r"contiguity = (\d+)", attributes)
        elements = int(run.group(1) if run else layouts.get(layout, 1))
        num_bytes = int(rows) * int(columns) * int(bits) // 8
        tiles.append(Tile(num_bytes, min(128, elements * int(bits))))
    return tuple(tiles)


def _run(tool: str, *args: str) -> str:
    return subprocess.run(
        [NVIDIA_BIN / tool, *args], capture_output=True, text=True, check=True
    ).stdout
