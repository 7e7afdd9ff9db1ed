"""The analyzer's command: what it prints and writes, how its page looks, and how it fails."""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tiny_chat import save_tiny_chat_model
from transformers import BloomConfig, BloomForCausalLM
from typer.testing import CliRunner

from omlx_cache.tools import plots
from omlx_cache.tools.analyzer_text import short_report
from omlx_cache.tools.cache_analyzer import app
from omlx_cache.tools.texts import part_text

SHORT = ["--tokens", "400", "--decode", "4", "--device", "cpu"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "sample.txt"
    path.write_text(part_text("chat")[:5000], encoding="utf-8")
    return path


def run(*arguments: object, **kwargs):
    """Run the command; let an exception that it should have handled through."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], **kwargs)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def results(tiny: Path, sample: Path, tmp_path_factory: pytest.TempPathFactory):
    """One analysis, as the report's text, as JSON and as a page."""
    page = tmp_path_factory.mktemp("page") / "out.html"
    options = ["--model", tiny, "--input", sample, *SHORT]
    text = run(*options, "--no-try")
    result = run(*options, "--json", "--report", page)
    assert (text.exit_code, result.exit_code) == (0, 0), result.output
    return text.stdout, json.loads(result.stdout), page.read_text(encoding="utf-8"), page


def test_the_report_is_the_articles(results):
    text, data, _, _ = results
    report = short_report(data).splitlines()
    assert text.splitlines()[0] == report[0] == "[KV Cache Report]"
    assert report[1].startswith("Active blocks: 2/2 (CPU)")
    assert report[2].startswith("Memory usage: ")
    assert report[3] == "Block utilization: 77% avg"  # 396 tokens in 2 blocks of 256
    assert report[4].startswith("Attention sparsity: ")
    for part in ("sinks", "hot", "peak of the prompt", "tables of a step"):
        assert part in text
    assert "Recommendation: none; no change was tried" in text


def test_json_says_what_was_run(results, tiny):
    data = results[1]
    assert data["names"]["model"] == tiny.name
    assert data["text"] == {"tokens": 400, "decode": 4, "scored": 200}
    assert len(data["attention"]["mass"]) == data["model"]["layers"] == 2
    assert [p["tokens"] for p in data["speed"]] == [392]
    assert data["memory"]["over_time"][-1]["tokens"] == 400


class Page(HTMLParser):
    """Check that tags are balanced, and note what a browser would fetch."""

    VOID = ("meta", "br", "link", "img", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href") and not value.startswith(("#", "data:")):
                self.fetched.append(value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_fetches_nothing(results):
    text = results[2]
    page = Page(text)
    assert page.fetched == []
    assert "script" not in page.tags
    assert page.tags.count("svg") == 4  # memory, heat map, kept by layer, KL by layer
    assert "@import" not in text
    assert "url(http" not in text
    clips = [i for i in page.ids if not i.startswith(("figure", "axes", "patch", "line", "text"))]
    assert len(clips) > 10


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_draws_the_page(results, tmp_path):
    shot = tmp_path / "page.png"
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,3400"]
    subprocess.run(
        [*command, f"--screenshot={shot}", f"--user-data-dir={tmp_path}", results[3].as_uri()],
        capture_output=True,
        check=True,
        timeout=60,
    )
    from PIL import Image

    image = Image.open(shot).convert("RGB")
    assert image.size == (1000, 3400)
    assert len(image.getcolors(1 << 24)) > 300, "hardly anything was drawn"
    # plots lie below one another: some colour of theirs in each fifth of the first 2500 pixels
    assert all(
        len(image.crop((0, top, 1000, top + 500)).getcolors(1 << 24)) > 20
        for top in range(0, 2500, 500)
    )


def test_text_from_standard_input(tiny):
    text = part_text("chat")[:3000]
    options = ["--model", tiny, "--input", "-", "--tokens", 200, "--decode", 2, "--no-try"]
    result = run(*options, input=text)
    assert result.exit_code == 0, result.output


def test_in_16_bits_the_report_says_what_rounding_alone_does(tiny, sample, results, tmp_path):
    page = tmp_path / "out.html"
    options = ["--dtype", "bfloat16", "--no-try", "--report", page]
    result = run("--model", tiny, "--input", sample, *SHORT, *options)
    assert result.exit_code == 0, result.output
    line = next(x for x in result.stdout.splitlines() if x.startswith("bfloat16's rounding alone"))
    assert html.escape(line) in page.read_text(encoding="utf-8")
    assert "rounding alone" not in results[0], "float32"


def config_file(directory: Path, text: str) -> Path:
    path = directory / "cache.yaml"
    path.write_text(text)
    return path


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


WRONG_TEXTS = {
    "missing": (None, "can't be read (no such file or directory); give a text file"),
    "empty": (b"", "is empty"),
    "blank": (b" \n\t\n", "is empty"),
    "binary": (b"\x7fELF\0\0\0\1", "is not text (it holds zero bytes)"),
    "latin-1": ("häuser ".encode("latin-1") * 400, "must be UTF-8 text, got the byte 0xe4"),
    "short": (b"four words of text", "must have at least 64 tokens, got"),
}


@pytest.mark.parametrize("name", WRONG_TEXTS)
def test_wrong_texts(name, tiny, tmp_path):
    content, message = WRONG_TEXTS[name]
    path = tmp_path / "sample.txt"
    if content is not None:
        path.write_bytes(content)
    result = run("--model", tiny, "--input", path, *SHORT)
    assert result.exit_code == 2, result.output
    assert str(path) in result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_directory_is_no_text(tiny, tmp_path):
    result = run("--model", tiny, "--input", tmp_path)
    assert (result.exit_code, "is a directory" in result.stderr) == (2, True)


WRONG_CONFIGS = {
    "attention: [": "not valid YAML",
    "attention:\n  window_size: 0\n": "window_size must be an integer of at least 1",
    "kv_cache:\n  blocksize: 256\n": "did you mean kv_cache.block_size?",
    "": "is empty",
    "quantization:\n  cache_bits: 5\n": "cache_bits must be",
    "quantization:\n  model_bits: 4\n": "model_bits is 4, but the model",
}


@pytest.mark.parametrize("text", WRONG_CONFIGS)
def test_wrong_configurations(text, tiny, sample, tmp_path):
    path = config_file(tmp_path, text)
    result = run("--model", tiny, "--input", sample, "--config", path, *SHORT)
    assert result.exit_code == 2, result.output
    assert WRONG_CONFIGS[text] in result.stderr


def test_a_configuration_that_is_not_there(tiny, sample, tmp_path):
    result = run("--model", tiny, "--input", sample, "--config", tmp_path / "no.yaml")
    assert (result.exit_code, "no.yaml" in result.stderr) == (2, True)


def test_a_pool_too_small(tiny, sample, tmp_path):
    path = config_file(tmp_path, "kv_cache:\n  block_size: 64\n  max_gpu_blocks: 2\n")
    result = run("--model", tiny, "--input", sample, "--config", path, *SHORT)
    assert result.exit_code == 1, result.output
    assert "max_gpu_blocks" in result.stderr


def test_models_that_cannot_be_loaded_or_served(sample, tmp_path, tiny):
    missing = run("--model", tmp_path / "no-model", "--input", sample)
    assert (missing.exit_code, "is not a directory" in missing.stderr) == (3, True)
    bloom = tmp_path / "bloom"
    sizes = {"vocab_size": 500, "hidden_size": 32, "n_layer": 1, "n_head": 2}
    BloomForCausalLM(BloomConfig(**sizes)).save_pretrained(bloom)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, bloom)
    unserved = run("--model", bloom, "--input", sample, *SHORT)
    assert unserved.exit_code == 3, unserved.output
    assert "can't be served" in unserved.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "10"], "64"),
        (["--tokens", "400", "--decode", "300"], "half of the text's"),
        (["--device", "abacus"], "device must be one that PyTorch has here"),
        (["--report", "/no/such/place/out.html"], "a directory that exists"),
        (["--sparsity", "2"], "0.5"),
    ],
)
def test_wrong_options(options, message, tiny, sample):
    result = run("--model", tiny, "--input", sample, *options)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_without_matplotlib_the_page_is_refused_at_once(monkeypatch, tiny, sample, tmp_path):
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    page = tmp_path / "out.html"
    result = run("--model", tiny, "--input", sample, *SHORT, "--report", page)
    assert result.exit_code == 2, result.output
    assert "pip install 'omlx_cache[tools]'" in result.stderr
    assert not page.exists()


def test_help_shows_examples_and_exit_codes():
    output = run("--help").output
    assert "Examples" in output
    assert "--report out.html" in output
    assert "Exit codes" in output
