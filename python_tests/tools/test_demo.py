"""The demo from end to end on a tiny model: what it shows, what it writes, how it fails."""

import json
import re
from pathlib import Path

import pytest
import torch
from tiny_chat import save_tiny_chat_model
from transformers import BloomConfig, BloomForCausalLM, DynamicCache
from typer.testing import CliRunner

import omlx_cache
from omlx_cache.tools import demo_session
from omlx_cache.tools.chat_run import Bytes, ChatRun, Turn
from omlx_cache.tools.demo import app
from omlx_cache.tools.demo_report import edges, summarize
from omlx_cache.tools.demo_session import StockBytes
from omlx_cache.tools.demo_words import explain
from omlx_cache.tools.prepared import PreparationError

SHORT = ["--turns", "3", "--message-tokens", "60", "--answer-tokens", "6", "--device", "cpu"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


def run(*arguments: object):
    """Run the command; let an exception that it should have handled through."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_chat_is_held_twice_and_measured(tiny: Path, tmp_path: Path):
    out = tmp_path / "demo.json"
    result = run("--model", tiny, *SHORT, "--json", out)
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())

    assert report["settings"]["turns"] == 3
    assert (
        report["versions"]["torch"] == torch.__version__.split("+")[0] or "+" in torch.__version__
    )
    stock, patched = report["stock"], report["patched"]
    assert len(stock["turns"]) == len(patched["turns"]) == 3
    for ours, theirs in zip(patched["turns"], stock["turns"], strict=True):
        assert ours["context_tokens"] == theirs["context_tokens"]
        assert ours["new_tokens"] == theirs["new_tokens"]
        assert 1 <= len(ours["answer_ids"]) <= 6
        assert ours["same"]["tokens"] == len(theirs["answer_ids"])
        assert ours["first_token_seconds"] > 0
    assert stock["turns"][1]["new_tokens"] < stock["turns"][1]["context_tokens"], "cache not used"
    assert stock["summary"]["same"]["same"] == stock["summary"]["same"]["tokens"]  # float32

    # 2 layers, K and V, 2 heads of 16 float32; the last token of the answer is never fed.
    last = stock["turns"][-1]
    tokens = last["context_tokens"] + len(last["answer_ids"]) - 1
    assert stock["summary"]["cache_end_bytes"] == tokens * 2 * 2 * 2 * 16 * 4
    assert patched["summary"]["cache_end_bytes"] > 0
    assert patched["summary"]["cache_peak_bytes"] >= patched["summary"]["cache_end_bytes"]


def test_threads_are_set_for_the_demo_alone(tiny: Path, tmp_path: Path):
    before = torch.get_num_threads()
    out = tmp_path / "demo.json"
    assert run("--model", tiny, *SHORT, "--threads", "1", "--json", out).exit_code == 0
    assert json.loads(out.read_text())["machine"]["threads"] == 1
    assert torch.get_num_threads() == before


def test_the_screen_shows_turns_text_tables_and_what_they_mean(tiny: Path):
    output = run("--model", tiny, *SHORT).output
    for name in ("stock", "patched"):
        assert [f"{name}, turn {n}/3" in output for n in (1, 2, 3)] == [True] * 3
    for row in (
        "tokens/s at the start",
        "tokens/s at the end",
        "first token of the last turn, s",
        "cache at the end, MiB",
        "cache at its peak, MiB",
        "greedy choices as stock's",
    ):
        assert row in output
    assert "- Memory: with" in output
    assert "- How it was measured" in output
    assert "\x1b" not in output, "no control sequences in a pipe"
    assert not [line for line in output.splitlines() if len(line) > 80 and "─" in line]


def test_without_quantization_the_text_is_the_same(tiny: Path, tmp_path: Path):
    (tmp_path / "exact.yaml").write_text("quantization:\n  cache_bits: 16\n")
    out = tmp_path / "demo.json"
    result = run("--model", tiny, *SHORT, "--config", tmp_path / "exact.yaml", "--json", out)
    report = json.loads(out.read_text())
    stock, patched = report["stock"]["turns"], report["patched"]["turns"]
    assert [t["answer_ids"] for t in patched] == [t["answer_ids"] for t in stock]
    assert [t["answer"] for t in patched] == [t["answer"] for t in stock]
    assert "every answer is the same, token by token" in result.output


def test_a_window_bounds_the_patched_cache(tiny: Path, tmp_path: Path):
    sizes = {}
    for window in ("100", "5000"):
        out = tmp_path / f"{window}.json"
        chat = ["--turns", "4", "--message-tokens", "250", "--answer-tokens", "3"]
        result = run("--model", tiny, *chat, "--window", window, "--json", out)
        assert result.exit_code == 0, result.output
        report = json.loads(out.read_text())
        sizes[window] = report["patched"]["summary"]["cache_end_bytes"]
        assert report["settings"]["cache"]["window_size"] == int(window)
        said = "saw no more than the last 100 tokens" in " ".join(result.output.split())
        assert said == (window == "100")
    assert sizes["100"] < sizes["5000"]


def test_a_model_without_a_template_is_told(tmp_path: Path):
    directory = save_tiny_chat_model(tmp_path / "plain", chat_template=None)
    result = run("--model", directory, *SHORT)
    assert result.exit_code == 0, result.output
    assert "no chat template" in result.output


def test_a_chat_longer_than_the_model_was_trained_for_is_told(tmp_path: Path):
    directory = save_tiny_chat_model(tmp_path / "short", max_position_embeddings=128)
    result = run("--model", directory, *SHORT)
    assert result.exit_code == 0, result.output
    assert "the model was trained for 128" in result.output


def test_a_missing_model_directory(tmp_path: Path):
    result = run("--model", tmp_path / "nowhere", *SHORT)
    assert result.exit_code == 3
    assert "is not a directory" in result.stderr
    assert "Traceback" not in result.output


def test_a_directory_without_a_model(tmp_path: Path):
    result = run("--model", tmp_path, *SHORT)
    assert result.exit_code == 3
    assert "has no config.json" in result.stderr


def test_an_unknown_hub_id_when_offline():
    result = run("--model", "nobody/has-this-model", *SHORT)
    assert result.exit_code == 3
    assert "nobody/has-this-model can't be loaded" in result.stderr


def test_a_model_that_can_not_be_patched_says_why(tiny: Path, tmp_path: Path):
    for file in tiny.iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=400)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    result = run("--model", tmp_path, *SHORT)
    assert result.exit_code == 3, result.output
    with pytest.raises(NotImplementedError) as reason:
        omlx_cache.patch(BloomForCausalLM(config))
    assert str(reason.value) in result.stderr


def test_wrong_settings_end_before_the_chat(tiny: Path, tmp_path: Path):
    bad = tmp_path / "bad.yaml"
    bad.write_text("kv_cache:\n  blok_size: 256\n")
    for arguments, message in (
        (["--config", bad], "block_size"),
        (["--window", "2"], "window_size"),
        (["--turns", "999", "--message-tokens", "4000"], "ask for fewer or shorter"),
        (["--device", "cuda:77"], "device must be one"),
        (["--json", tmp_path / "no" / "out.json"], "must be a file in a directory that exists"),
        (["--turns", "0"], "turns"),
        (["--dtype", "int8"], "dtype"),
    ):
        result = run("--model", tiny, *arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert message in " ".join(result.stderr.split()), (arguments, result.output)
        assert "turn 1/" not in result.stdout


def test_out_of_blocks_is_an_error_of_its_own(tiny: Path, tmp_path: Path):
    small = tmp_path / "small.yaml"
    small.write_text("kv_cache:\n  block_size: 64\n  max_gpu_blocks: 4\n")
    result = run("--model", tiny, "--config", small, "--turns", "4", "--message-tokens", "200")
    assert result.exit_code == 1, result.output
    assert "error: " in result.stderr
    assert "Traceback" not in result.output


def test_a_default_model_that_can_not_be_prepared(monkeypatch):
    def missing(**kwargs):
        raise PreparationError("not installed; pip install something")

    monkeypatch.setattr(demo_session, "smollm2_gptq_checkpoint", missing)
    result = run(*SHORT)
    assert result.exit_code == 4
    assert "pip install something" in result.stderr


def test_interruption(monkeypatch, tiny: Path):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_session, "run_chat", interrupted)
    result = run("--model", tiny, *SHORT)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr


def test_help_has_examples_and_exit_codes():
    output = run("--help").output
    assert "python -m omlx_cache.tools.demo" in output
    assert "Exit codes" in output
    for option in ("--model", "--config", "--window", "--turns", "--json", "--threads"):
        assert option in output


def test_stock_bytes_are_the_memory_behind_the_tensors():
    cache = DynamicCache()
    measure = StockBytes(cache)
    assert measure() == Bytes(0, 0)
    big = torch.zeros(1, 2, 10, 4)
    for layer in range(3):
        cache.update(big[:, :, -5:], big[:, :, :5].clone(), layer)
    first = sum(
        t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values)
    )
    assert measure() == Bytes(first, first)
    cache.crop(-5)
    assert measure().peak == first


def chat_run(speeds: list[tuple[int, float]], cache: int, busy: float = 1.0) -> ChatRun:
    """Make a run out of (decode tokens, seconds) pairs."""
    turns = [
        Turn(100 * n, 100, 0.5, tokens, seconds, Bytes(cache * n, cache * n), [1] * 4, "text")
        for n, (tokens, seconds) in enumerate(speeds, start=1)
    ]
    return ChatRun(turns=turns, yardstick_seconds=[1.0, busy, busy, 1.0])


def words(stock: ChatRun, patched: ChatRun) -> str:
    return "\n".join(explain(summarize(stock, patched, {})))


def test_words_call_slower_slower_and_larger_larger():
    said = words(chat_run([(10, 1.0)] * 3, 100), chat_run([(10, 4.0)] * 3, 150))
    assert "patched is slower, at 25% of stock's speed" in said
    assert "takes 150% of the stock cache's bytes" in said
    assert "saves nothing" in said
    assert "as fast as" not in said


def test_words_call_faster_faster_and_smaller_smaller():
    said = words(chat_run([(10, 1.0), (10, 2.0), (10, 4.0)], 100), chat_run([(10, 1.0)] * 3, 50))
    assert re.search(r"last turns: patched is 4\.00 times as fast", said)
    assert "first turns: no difference that one run could show" in said
    assert "stock ends at 25% of its first speed, patched ends at 100%" in said
    assert "takes 50% of the stock cache's bytes" in said
    assert "saves nothing" not in said


def test_words_compare_no_speeds_of_a_busy_machine():
    said = words(chat_run([(10, 9.0)] * 3, 100, busy=3.0), chat_run([(10, 1.0)] * 3, 50))
    assert "Speed: not compared" in said
    assert "as fast as" not in said


def test_words_about_answers_without_a_second_token():
    assert "too short to measure" in words(chat_run([(0, 0.0)], 9), chat_run([(0, 0.0)], 9))


@pytest.mark.parametrize("turns", [1, 2, 3, 7])
def test_start_and_end_are_real_turns(turns: int):
    start, end = edges(turns)
    everything = list(range(turns))
    assert everything[start][0] == 0
    assert everything[end][-1] == turns - 1
    assert len(everything[start]) == len(everything[end]) >= 1
