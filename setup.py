"""Package metadata and dependencies. Tool settings: pyproject.toml; exact pins: constraints.txt."""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

# PyPI has no triton for other platforms; there the non-Triton implementations serve.
TRITON = (
    "triton>=3.6; platform_system == 'Linux' "
    "and (platform_machine == 'x86_64' or platform_machine == 'aarch64')"
)

# The maintained GPTQ engine. Install torch first and pass --no-build-isolation (see Makefile).
# 7.7 wants torch >= 2.14.1.
GPTQ = [
    "gptqmodel>=7.6,<7.7",
    "optimum>=2.3",
    "requests",
]

# The original engine, which ended at 0.7.1; its metadata names what else it needs. Its last wheels
# are for Python <= 3.11; later Pythons build its source, with BUILD_CUDA_EXT=0 in the environment.
AUTO_GPTQ = ["auto-gptq==0.7.1"]

# Plots of the analyzer and of the quality tool; without it they print and write JSON.
TOOLS = ["matplotlib>=3.8"]

# A peer that the benchmarks measure beside; without it they say so and go on. It is built from
# source; DISABLE_CUDA=1 in the environment spares it the attempt to build CUDA kernels.
BENCH = ["hqq>=0.2.8"]

# Gauges for Prometheus.
PROMETHEUS = ["prometheus-client"]

# What bench/peers.py compares with. kvpress 0.5 is left out: it wants transformers < 5.3, and goes
# into an environment of its own. llama.cpp is built from source, in pip's own build environment:
# pip install -c constraints.txt '.[peers-llama]', without --no-build-isolation.
PEERS = ["hqq>=0.2.8", "optimum-quanto>=0.2.7", "fused-turboquant", "turboquant-kv"]
PEERS_LLAMA = ["llama-cpp-python>=0.3.36"]

# The C++ kernels for CPUs are optional: without a compiler the install succeeds, and the first use
# says what is slower. Loaded by path, for the package itself needs torch.
NATIVE = runpy.run_path(str(Path(__file__).with_name("omlx_kernels") / "native" / "build.py"))

setup(
    name="omlx_cache",
    version="0.1.0",
    description="A paged, quantized KV cache for Hugging Face models, in one call",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="omlx_cache developers",
    license="Apache-2.0",
    python_requires=">=3.11",
    **NATIVE["setup_arguments"](),
    packages=find_packages(include=["omlx_kernels*", "omlx_cache*"]),
    package_data={
        "omlx_kernels": [
            "py.typed",
            "tuned_configs/*.json",
            "tuned_configs/README.md",
            "native/src/*",
        ],
        "omlx_cache": ["py.typed", "**/*.json", "**/*.yaml"],
    },
    install_requires=[
        "torch>=2.11",
        TRITON,
        "transformers>=5.17",
        "numpy",
        "pydantic>=2",
        "PyYAML",
        "platformdirs",
        "typer",
        "rich",
        "safetensors",
        "filelock",
        "zstandard",
    ],
    extras_require={
        "gptq": GPTQ,
        "auto-gptq": AUTO_GPTQ,
        "demo": [*GPTQ, "gguf"],
        "tools": TOOLS,
        "bench": [*BENCH, "pytest>=8", "pytest-benchmark"],
        "peers": PEERS,
        "peers-llama": PEERS_LLAMA,
        "prometheus": PROMETHEUS,
        "dev": [
            *TOOLS,
            *PROMETHEUS,
            *("pytest>=8", "pytest-benchmark", "pytest-xdist", "hypothesis", "ruff"),
            *("mypy", "types-PyYAML"),
            *("fastapi", "openai", "uvicorn"),  # of the examples in docs/serving.md
            *("accelerate", "peft"),  # what users load models and adapters with
        ],
    },
)
