"""What every command says to a wrong input: one message that names it and the remedy, and a code.

A row is tried with each command that takes such an input.
"""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_chat import save_tiny_chat_model
from transformers import BloomConfig, BloomForCausalLM
from typer.testing import CliRunner

from omlx_cache.tools import cache_analyzer, chat, demo, quality
from omlx_cache.tools.texts import part_text

TOOLS = {
    "chat": (chat.app, ["--max-new-tokens", "70"]),
    "demo": (demo.app, ["--turns", "1", "--message-tokens", "150", "--answer-tokens", "2"]),
    "cache_analyzer": (cache_analyzer.app, ["--tokens", "300", "--decode", "2", "--no-try"]),
    "quality": (quality.app, ["--tokens", "300", "--turns", "0", "--no-peers"]),
}
READERS = ("cache_analyzer", "quality")
CONFIG, MODEL, TEXT = "{config}", "{model}", "{text}"


@dataclass(frozen=True)
class Row:
    """A wrong input: the options that give it, the exit code, and what the message must name."""

    code: int
    options: list[str]
    said: tuple[str, ...]
    tools: tuple[str, ...] = tuple(TOOLS)
    config: str | bytes | None = None  # content of a configuration file
    text: bytes | None = None  # content of a file to read


ROWS = {
    "no such model": Row(
        3, ["--model", "{d}/none"], ("{d}/none is not a directory", "give a directory made by")
    ),
    "an empty directory for a model": Row(
        3, ["--model", "{d}/empty"], ("{d}/empty has no config.json", "give a directory made by")
    ),
    "a file for a model": Row(
        3, ["--model", "{d}/file"], ("{d}/file is not a directory", "give a directory made by")
    ),
    "a hub id out of reach": Row(
        3, ["--model", "nobody/has-this-model"], ("nobody/has-this-model can't be loaded: ",)
    ),
    "a model without weights": Row(
        3, ["--model", "{d}/weightless"], ("{d}/weightless can't be loaded: OSError", "no file")
    ),
    "a model whose weights are cut off": Row(
        3,
        ["--model", "{d}/cut"],
        ("{d}/cut can't be loaded: its weights are damaged", "download it again"),
    ),
    "a model whose config.json is binary": Row(
        3, ["--model", "{d}/binary"], ("{d}/binary can't be loaded: ",)
    ),
    "a model that isn't served": Row(
        3,
        ["--model", "{d}/bloom"],
        ("can't be served: BloomForCausalLM builds ", "masks of its own", "load its text"),
    ),
    "no model where the default is kept": Row(
        4, [], ("cache directory", "file/cache can't be made", "set OMLX_CACHE_DIR to a directory")
    ),
    "no GPU": Row(
        2,
        ["--model", MODEL, "--device", "cuda:99"],
        ("device must be one that PyTorch has here, got 'cuda:99'", "try 'cpu'"),
    ),
    "no device": Row(
        2,
        ["--model", MODEL, "--device", "abacus"],
        ("device must be one that PyTorch has here, got 'abacus'", "try 'cpu'"),
    ),
    "no dtype": Row(2, ["--dtype", "int3"], ("'int3' is not one of 'float32'", "--dtype")),
    "no option": Row(2, ["--modle", "x"], ("No such option: --modle",)),
    "no configuration": Row(2, [CONFIG], ("{config}",)),
    "an empty configuration": Row(2, [CONFIG], ("{config}", "is empty"), config=""),
    "a binary configuration": Row(
        2, [CONFIG], ("{config}", "text"), config=b"\x7fELF\x00\xff\xfe\x01"
    ),
    "wrong YAML": Row(
        2, [CONFIG], ("{config}:1:13: not valid YAML: while parsing",), config="attention: ["
    ),
    "a list for a configuration": Row(2, [CONFIG], ("{config}", "list"), config="- 1\n"),
    "a directory for a configuration": Row(2, ["{d}/empty.yaml"], ("{d}/empty.yaml",)),
    "window 0": Row(
        2,
        [CONFIG],
        ("attention.window_size must be an integer of at least 1", "got 0", "{config}:2"),
        config="attention:\n  window_size: 0\n",
    ),
    "a misspelt key": Row(
        2,
        [CONFIG],
        ("unknown key kv_cache.blocksize", "did you mean kv_cache.block_size?"),
        config="kv_cache:\n  blocksize: 256\n",
    ),
    "bits that don't exist": Row(
        2, [CONFIG], ("cache_bits must be 4, 8 or 16", "got 5"), config="cache_bits: 5\n"
    ),
    "a window within the sinks": Row(
        2,
        [CONFIG],
        ("window_size must be more than attention.sink_tokens, got 4", "at least 5"),
        config="window_size: 4\n",
    ),
    "other weights than the model's": Row(
        2,
        ["--model", MODEL, CONFIG],
        ("model_bits is 4, but the model has 32-bit weights", "set model_bits to 32"),
        config="model_bits: 4\n",
    ),
    "a pool that is too small": Row(
        1,
        ["--model", MODEL, CONFIG],
        ("max_gpu_blocks",),
        config="block_size: 64\nmax_gpu_blocks: 1\n",
    ),
    "no text": Row(2, ["--input", "{d}/none"], ("{d}/none can't be read", "give a"), READERS),
    "a directory for a text": Row(
        2, ["--input", "{d}/empty"], ("{d}/empty is a directory", "give a file"), READERS
    ),
    "an empty text": Row(2, ["--input", TEXT], ("{text} is empty", "give a"), READERS, text=b""),
    "a binary text": Row(
        2, ["--input", TEXT], ("{text} is not text", "zero bytes"), READERS, text=b"\x7fELF\0\1"
    ),
    "a text of another encoding": Row(
        2,
        ["--input", TEXT],
        ("{text} must be UTF-8 text, got the byte 0xe4", "iconv"),
        READERS,
        text=b"h\xe4user " * 300,
    ),
    "a short text": Row(
        2,
        ["--model", MODEL, "--input", TEXT],
        ("{text} must have at least", "got", "give a longer text"),
        READERS,
        text=b"four words of text",
    ),
    "a chat that isn't there": Row(
        2,
        ["--model", MODEL, "--load", "{d}/none"],
        ("{d}/none can't be read (no such file", "give a file that /save wrote"),
        ("chat",),
    ),
    "a chat that is none": Row(
        2,
        ["--model", MODEL, "--load", "{d}/file"],
        ("{d}/file must be a whole file that was saved, got", "begin anew"),
        ("chat",),
    ),
    "messages that are no text": Row(
        2,
        ["--model", MODEL],
        ("standard input must be UTF-8 text", "in line 1", "iconv"),
        ("chat",),
        text=b"\xff\n",
    ),
    "an answer of no tokens": Row(
        2, ["--max-new-tokens", "0"], ("--max-new-tokens", "1"), ("chat",)
    ),
    "a chat of no turns": Row(2, ["--turns", "0"], ("--turns", "1"), ("demo",)),
    "more text than there is": Row(
        2,
        ["--model", MODEL, "--turns", "100000"],
        ("tokens in all), asked for 100000", "ask for fewer or shorter ones"),
        ("demo",),
    ),
    "no directory for the numbers": Row(
        2, ["--json", "{d}/none/o.json"], ("must be a file in a directory", "{d}/none"), ("demo",)
    ),
    "no directory for the page": Row(
        2, ["--report", "{d}/none/o.html"], ("must be a file in a directory", "{d}/none"), READERS
    ),
    "no directory for the results": Row(
        2, ["--results", "{d}/none/o"], ("must be a file in a directory", "{d}/none"), ("quality",)
    ),
    "results of something else": Row(
        2, ["--model", MODEL, "--results", "{d}/file"], ("must hold results of this",), ("quality",)
    ),
}
CASES = [(name, tool) for name, row in ROWS.items() for tool in row.tools]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wrong models and files, and a model that is right."""
    root = tmp_path_factory.mktemp("inputs")
    model = save_tiny_chat_model(root / "model")
    (root / "empty").mkdir()
    (root / "empty.yaml").mkdir()
    (root / "file").write_text("not what it should be")
    for name in ("weightless", "cut", "binary", "bloom"):
        shutil.copytree(model, root / name)
    (root / "weightless" / "model.safetensors").unlink()
    os.truncate(root / "cut" / "model.safetensors", 5000)
    (root / "binary" / "config.json").write_bytes(b"\x7fELF\0\xff\xfe")
    sizes = {"vocab_size": 500, "hidden_size": 32, "n_layer": 1, "n_head": 2}
    BloomForCausalLM(BloomConfig(**sizes)).save_pretrained(root / "bloom")
    return root


def run(tool: str, options: list[str], lines: bytes = b"Hello\n"):
    """Run a command; let an exception that it should have handled through."""
    app, short = TOOLS[tool]
    result = CliRunner().invoke(app, [*short, *options], input=lines)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize(("name", "tool"), CASES)
def test_a_wrong_input_is_named(name, tool, directory, tmp_path, monkeypatch):
    row = ROWS[name]
    monkeypatch.setenv("OMLX_CACHE_DIR", str(directory / "file" / "cache"))
    places = {
        "d": directory,
        "model": directory / "model",
        "config": tmp_path / "cache.yaml",
        "text": tmp_path / "text.txt",
    }
    if row.config is not None:
        content = row.config if isinstance(row.config, bytes) else row.config.encode()
        places["config"].write_bytes(content)
    if row.text is not None:
        places["text"].write_bytes(row.text)
    options = []
    for option in row.options:
        is_config = option.endswith(".yaml") or option == CONFIG
        options += ["--config"] if is_config and tool != "quality" else []
        options.append(option.format(**places))
    result = run(tool, options, row.text or b"Hello\n")
    stderr = " ".join(result.stderr.split())
    assert result.exit_code == row.code, result.output
    assert "Traceback" not in result.output
    for part in row.said:
        assert part.format(**places) in stderr, stderr


@pytest.mark.parametrize(
    ("tool", "option"), [("demo", "--json"), ("cache_analyzer", "--report"), ("quality", "--plot")]
)
def test_a_full_disk_is_named(tool, option, directory, tmp_path, monkeypatch):
    def full(*args) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    text = tmp_path / "text.txt"
    text.write_text(part_text("chat")[:4000])
    out = tmp_path / "out.svg"
    out.write_text("before")
    options = ["--model", str(directory / "model"), option, str(out)]
    if tool in READERS:
        options += ["--input", str(text)]
    monkeypatch.setattr("omlx_cache.tools.output.os.replace", full)
    result = run(tool, [*options, *(["cache_bits=8"] if tool == "quality" else [])])
    assert result.exit_code == 2, result.output
    assert f"{out} can't be written (no space left on device); make room" in result.stderr
    assert out.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.svg", "text.txt"]
