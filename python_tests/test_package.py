"""Wheel and source archive hold what the package needs, and work outside of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.package

ROOT = Path(__file__).parents[1]
NEEDED = (
    "omlx_cache/py.typed",
    "omlx_kernels/py.typed",
    "omlx_kernels/tuned_configs/README.md",
    "omlx_kernels/native/build.py",
    "omlx_kernels/native/src/abi.h",
    "omlx_kernels/native/src/paged_attention.cpp",
)
USE = """
import pathlib, torch, omlx_cache, omlx_kernels
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
             num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=256,
             eos_token_id=None)
model = omlx_cache.patch(LlamaForCausalLM(LlamaConfig(**sizes)).eval())
model.generate(torch.ones(1, 5, dtype=torch.long), max_new_tokens=3)
print(omlx_cache.report(model).seen_tokens, pathlib.Path(omlx_cache.__file__).parent)
"""


def run(*command: object, cwd: Path, **env: str) -> str:
    """Run a command without the repository on its path; return what it says."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=clean | env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The files that git knows, as in a fresh clone: build outputs of the checkout stay out."""
    folder = tmp_path_factory.mktemp("package") / "source"
    listed = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines()
    for name in listed:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
    return folder


@pytest.fixture(scope="module")
def archive(source) -> Path:
    """The source archive, by the build backend that pip and build call."""
    made = source.parent / "sdist"
    made.mkdir()
    code = f"from setuptools.build_meta import build_sdist; build_sdist({str(made)!r})"
    run(sys.executable, "-c", code, cwd=source)
    return next(made.iterdir())


@pytest.fixture(scope="module")
def wheel(archive) -> Path:
    """The wheel, built from the unpacked source archive as a user's pip would."""
    unpacked = archive.parents[1] / "unpacked"
    with tarfile.open(archive) as tar:
        tar.extractall(unpacked, filter="data")
    made = archive.parents[1] / "wheel"
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps")
    run(*pip, "--no-index", "-w", made, next(unpacked.iterdir()), cwd=unpacked)
    return next(made.glob("*.whl"))


def test_the_source_archive_is_whole(archive):
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    wanted = {*NEEDED, "LICENSE", "README.md", "pyproject.toml", "setup.py"}
    assert wanted <= names
    assert not [name for name in names if name.startswith("logs/")]


def test_the_wheel_is_whole(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert set(NEEDED) <= names
    sources = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("omlx_kernels/native/src/*")}
    assert sources <= names
    packages = {name.partition("/")[0] for name in names}
    assert {p for p in packages if not p.endswith(".dist-info")} == {"omlx_cache", "omlx_kernels"}


def test_the_wheel_works_in_a_fresh_environment(wheel, tmp_path):
    """Installed without an index; what it depends on is lent by the environment of the tests."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel, cwd=tmp_path)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path)
    import torch

    lent = Path(torch.__file__).parents[1]
    (Path(site.strip()) / "lent.pth").write_text(f"{lent}\n")
    said = run(python, "-c", USE, cwd=tmp_path, HF_HUB_OFFLINE="1").split()
    assert said[-2] == "7"
    assert Path(said[-1]).is_relative_to(tmp_path)
