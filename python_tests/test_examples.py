"""Every example of the documents runs, and every command and path in them exists.

Python blocks of a document run in order, in one namespace, in a directory that has the
repository's ``configs``. They may use ``model``, ``tokenizer``, ``inputs``, ``turn_1`` and
``turn_2`` without making them, as a reader would. ``from_pretrained`` loads a tiny random model
whatever it is asked for, and nothing generates more than a few tokens.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from examples import DOCUMENTS, ROOT, blocks, commands, faults, options, paths

MOST_NEW_TOKENS = 12
NEEDS = {"serving.md": "fastapi"}
"""Document: what its examples import beside what the package needs (extra dev)."""

each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A tiny chat model, saved with its tokenizer."""
    sys.path.insert(0, str(Path(__file__).parent / "tools"))
    try:
        from tiny_chat import save_tiny_chat_model
    finally:
        sys.path.pop(0)
    return save_tiny_chat_model(tmp_path_factory.mktemp("examples") / "model")


@pytest.fixture
def reader(checkpoint, tmp_path, monkeypatch) -> dict[str, Any]:
    """The names that a reader of the examples has, and a directory to run them in."""
    import transformers
    from transformers.generation import GenerationMixin

    pytest.importorskip("accelerate", reason="device_map needs it")

    auto = transformers.AutoModelForCausalLM, transformers.AutoTokenizer
    for kind in auto:
        load = kind.from_pretrained
        monkeypatch.setattr(
            kind,
            "from_pretrained",
            lambda name, *args, load=load, **kwargs: load(checkpoint, *args, **kwargs),
        )
    generate = GenerationMixin.generate

    def a_few(self, *args, **kwargs):
        if "max_new_tokens" in kwargs:
            kwargs["max_new_tokens"] = min(kwargs["max_new_tokens"], MOST_NEW_TOKENS)
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", a_few)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "sample.txt").write_text("A text about nothing in particular. " * 20)
    monkeypatch.chdir(tmp_path)
    tokenizer = auto[1].from_pretrained("")
    ids = torch.randint(3, len(tokenizer), (1, 90))
    return {
        "__name__": "example",
        "model": auto[0].from_pretrained("").eval(),
        "tokenizer": tokenizer,
        "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        "turn_1": {"input_ids": ids[:, :20], "attention_mask": torch.ones_like(ids[:, :20])},
        "turn_2": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
    }


@each_document
def test_python_examples_run(document, request):
    found = list(blocks(document, "python", "py"))
    if not found:
        return
    if document.name in NEEDS:
        pytest.importorskip(NEEDS[document.name], reason="needs the extra dev")
    names = request.getfixturevalue("reader")
    for block in found:
        padded = "\n" * (block.line - 1) + block.text  # a traceback shows the document's lines
        exec(compile(padded, str(document), "exec"), names)


@each_document
def test_configurations_are_valid(document):
    from omlx_cache import CacheConfig

    for block in blocks(document, "yaml"):
        CacheConfig.from_dict(yaml.safe_load(block.text))


@each_document
def test_commands_exist(document):
    found = [
        f"{document.relative_to(ROOT)}:{line}: {f}"
        for line, words in commands(document)
        for f in faults(words)
    ]
    assert not found, "\n".join(found)


@each_document
def test_paths_and_links_exist(document):
    found = [
        f"{document.relative_to(ROOT)}:{line}: there is no {path}"
        for line, path in paths(document)
        if not (ROOT / path).exists()
    ]
    assert not found, "\n".join(found)


def test_the_index_names_every_document():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for document in DOCUMENTS:
        if document.parent == ROOT / "docs" and document.name != "README.md":
            assert f"({document.name})" in index, f"docs/README.md must link to {document.name}"


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("python -m omlx_cache.tools.nothing", "there is no omlx_cache/tools/nothing.py"),
        ("python -m omlx_cache.tools.quality --nothing", "quality.py has no --nothing"),
        ("python bench/roofline.py --nothing 3", "roofline.py has no --nothing"),
        ("make nothing", "make has no target nothing"),
        ("make aot NOTHING=1", "the Makefile has no variable NOTHING"),
        ("pip install -e '.[nothing]'", "there is no extra nothing"),
        ("pytest python_tests/nothing", "there is no python_tests/nothing"),
        ("torchrun --nothing=2 chat.py", "torchrun has no --nothing"),
        ("X=1 nothing --at all", "nobody checks the command 'nothing'"),
    ],
)
def test_a_wrong_command_is_found(command, fault):
    (found,) = faults(shlex.split(command))
    assert re.match(re.escape(fault), found)


def test_options_are_those_that_a_script_takes():
    assert {"--tokens", "--no-peers", "--results"} <= options(ROOT / "omlx_cache/tools/quality.py")
    assert {"--measure", "--tokens"} <= options(ROOT / "bench/roofline.py")
    assert "--full" in options(ROOT / "bench/aot.py")


def test_both_servers_answer_from_the_paged_cache(reader, checkpoint, monkeypatch):
    pytest.importorskip("fastapi", reason="needs the extra dev")
    from transformers.cli.serving import model_manager

    import omlx_cache

    monkeypatch.setattr(model_manager, "ModelManager", model_manager.ModelManager)  # put it back
    served, app = (block.text for block in blocks(ROOT / "docs" / "serving.md", "python"))
    exec(served, reader)
    manager = model_manager.ModelManager(device="cpu")
    assert type(manager) is reader["PatchingManager"]
    model, tokenizer = manager.load_model_and_processor(f"{checkpoint}@main")
    model.generate(**tokenizer("a text", return_tensors="pt"), max_new_tokens=3)
    assert omlx_cache.report(model).seen_tokens > 3
    manager.shutdown()
    exec(app, reader)
    hello = reader["Request"](messages=[{"role": "user", "content": "Hello"}], max_new_tokens=4)
    assert isinstance(reader["chat"](hello), str)
    assert reader["cache"]()["seen_tokens"] > 4
