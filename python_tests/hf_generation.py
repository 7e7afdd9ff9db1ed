"""Run transformers' own tests of generation and caches, with every model patched before use.

The tests are in transformers' repository, not in its wheel. With a checkout of the version that is
installed (``git clone --depth 1 --branch v5.24.0 <repository> transformers``)::

    python python_tests/hf_generation.py transformers            # all four families, 16 bits
    python python_tests/hf_generation.py transformers -k greedy  # and other options of pytest

Of the families' test classes only what ``GenerationTesterMixin`` brings is run, and all of
``tests/utils/test_cache_utils.py``. Every model is patched as soon as it is built, or loaded, so
that the tests cast, move, save and use patched ones. Where omlx_cache *refuses*, by an error of its
own that says why, the test is listed as refused, apart from those that failed. The exit status
counts failures.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from pathlib import Path

import pytest
import transformers

import omlx_cache
from omlx_cache.patch_state import find_state

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
}
MIXIN = "tests.generation.test_utils", "GenerationTesterMixin"
CACHES = Path("tests", "utils", "test_cache_utils.py")
REFUSALS = (ValueError, TypeError, NotImplementedError)


def patch_when_built(model_class: type) -> None:
    """Make each model of a class patch itself when it is built or loaded."""
    build, load = model_class.__init__, model_class.from_pretrained.__func__

    @functools.wraps(build)
    def init(self, *args, **kwargs):
        build(self, *args, **kwargs)
        if not any(parameter.is_meta for parameter in self.parameters()):  # as while it is loaded
            omlx_cache.patch(self, cache_bits=16)

    @functools.wraps(load)
    def from_pretrained(cls, *args, **kwargs):
        loaded = load(cls, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # with what was missing
        if find_state(model) is None:
            omlx_cache.patch(model, cache_bits=16)
        return loaded

    model_class.__init__ = init
    model_class.from_pretrained = classmethod(from_pretrained)


class PatchedModels:
    """A pytest plugin: what to run, and what has been refused."""

    def __init__(self) -> None:
        self.refused: list[tuple[str, str]] = []

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list) -> None:
        """Leave out what doesn't generate."""
        mixin = getattr(importlib.import_module(MIXIN[0]), MIXIN[1])
        kept = [item for item in items if item.path.match(str(CACHES)) or hasattr(mixin, item.name)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo):
        """Tell a refusal from a failure."""
        report = yield
        error = call.excinfo
        if report.failed and error is not None and _is_refusal(error):
            why = str(error.value).splitlines()[0]
            self.refused.append((item.nodeid, why))
            report.outcome = "skipped"
            report.longrepr = (str(item.path), 0, f"refused: {why}")
        return report

    def pytest_terminal_summary(self, terminalreporter) -> None:
        """List the refusals by reason."""
        by_reason: dict[str, list[str]] = {}
        for test, why in self.refused:
            by_reason.setdefault(why, []).append(test)
        for why, tests in by_reason.items():
            terminalreporter.section(f"refused ({len(tests)}): {why}")
            for test in tests:
                terminalreporter.line(test)


def _is_refusal(error: pytest.ExceptionInfo) -> bool:
    """Whether omlx_cache itself raised an error by which it says that it can't serve something."""
    module = error.traceback[-1].frame.f_globals.get("__name__", "")
    return isinstance(error.value, REFUSALS) and module.partition(".")[0] == "omlx_cache"


def _check_checkout(checkout: Path) -> list[Path]:
    """Return the files to run.

    Raises:
        SystemExit: the folder is no checkout of the installed version.
    """
    files = [checkout / "tests" / "models" / f / f"test_modeling_{f}.py" for f in FAMILIES]
    files.append(checkout / CACHES)
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        raise SystemExit(f"hf_generation: no {missing[0]}; give a checkout of transformers")
    source = (checkout / "src" / "transformers" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"', source, re.MULTILINE)
    if found is None or found[1] != transformers.__version__:
        raise SystemExit(
            f"hf_generation: the checkout must be of transformers {transformers.__version__}, the "
            f"installed version, got {found and found[1]}; check out v{transformers.__version__}"
        )
    return files


def main(arguments: list[str]) -> int:
    """Run the tests of a checkout; return pytest's exit status."""
    if not arguments:
        raise SystemExit(__doc__)
    checkout = Path(arguments[0]).resolve()
    files = _check_checkout(checkout)
    for name in FAMILIES.values():
        patch_when_built(getattr(transformers, name))
    options = [f"--rootdir={checkout}", "-c", str(checkout / "pyproject.toml"), "-rf"]
    return pytest.main(
        [*map(str, files), *options, "-p", "no:cacheprovider", *arguments[1:]],
        plugins=[PatchedModels()],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
