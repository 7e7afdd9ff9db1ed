"""Importing the packages is free of side effects, and the kernels stand alone."""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Records, with a stack, whatever asks for a GPU. It works without one, too.
WATCH_DRIVERS = """
    import traceback
    import torch

    touched = []

    def watch(owner, name):
        original = getattr(owner, name)

        def watched(*args, **kwargs):
            touched.append(f"{name}\\n" + "".join(traceback.format_stack(limit=8)))
            return original(*args, **kwargs)

        setattr(owner, name, watched)

    for name in ("init", "_lazy_init", "is_available", "device_count", "current_device",
                 "get_device_properties", "get_device_capability", "get_device_name"):
        watch(torch.cuda, name)

    def assert_untouched():
        assert not touched, touched[0]
        assert not torch.cuda.is_initialized()
        if "triton" in sys.modules:
            from triton.runtime.driver import driver
            assert driver._default is None and driver._active is None, "a Triton driver was created"
"""


def run_python(*sources: str) -> None:
    """Run the sources, joined, in a fresh interpreter; fail with what it printed."""
    program = "import sys\n" + "\n".join(textwrap.dedent(source) for source in sources)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_the_kernels_touches_no_driver_and_nothing_above_them():
    run_python(
        WATCH_DRIVERS,
        """
        import omlx_kernels

        assert_untouched()
        for name in ("omlx_cache", "transformers"):
            assert name not in sys.modules, f"omlx_kernels imported {name}"
        """,
    )


def test_importing_the_cache_touches_no_driver_and_no_gptq_engine():
    run_python(
        # These may ask for a GPU themselves, so they come before the watch.
        "import transformers.cache_utils, transformers.generation, transformers.modeling_utils",
        WATCH_DRIVERS,
        """
        from omlx_cache import *

        assert_untouched()
        for name in ("auto_gptq", "gptqmodel", "optimum"):
            assert name not in sys.modules, f"omlx_cache imported {name}"
        """,
    )


def test_importing_the_cache_patches_nothing():
    run_python(
        """
        import torch.nn.functional
        import transformers.cache_utils, transformers.generation.utils, transformers.masking_utils
        import transformers.modeling_utils
        import transformers.models.llama.modeling_llama, transformers.models.qwen2.modeling_qwen2

        modules = [
            module for name, module in sys.modules.items()
            if name.split(".")[0] == "transformers" or name.startswith("torch.nn.")
        ]

        def contents(value):
            # A registry is a plain dict, in a module or on a class: compare what it holds.
            return dict(value) if type(value) is dict else value

        def snapshot():
            state = {}
            for module in modules:
                for name, value in list(vars(module).items()):
                    if name.startswith("__"):
                        continue
                    state[module.__name__, name] = contents(value)
                    if isinstance(value, type) and value.__module__ == module.__name__:
                        for attribute, member in vars(value).items():
                            state[module.__name__, name, attribute] = contents(member)
            return state

        def same(a, b):
            if type(a) is type(b) is dict:
                return a.keys() == b.keys() and all(a[key] is b[key] for key in a)
            return a is b

        before = snapshot()
        from omlx_cache import *
        after = snapshot()

        changed = [
            ".".join(key) for key, value in before.items()
            if key not in after or not same(value, after[key])
        ]
        assert not changed, f"from omlx_cache import * changed {changed}"
        """
    )


def test_the_package_itself_is_cheap_to_import():
    run_python(
        """
        import omlx_cache

        for name in ("torch", "transformers", "pydantic"):
            assert name not in sys.modules, f"import omlx_cache imported {name}"
        assert all(getattr(omlx_cache, name).__doc__ for name in omlx_cache.__all__)
        """
    )


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / "omlx_kernels").rglob("*.py")),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_kernels_import_neither_the_cache_nor_transformers(path: Path):
    """Also inside functions, which an import at run time would not show."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.add(node.module.split(".")[0])
    assert not imported & {"omlx_cache", "transformers"}
