"""The quality tool: its numbers against plain computations, its tasks, resuming, and its errors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tiny_chat import save_tiny_chat_model, tiny_tokenizer
from typer.testing import CliRunner

import omlx_cache
from omlx_cache.compat import cache_name
from omlx_cache.tools import quality_run
from omlx_cache.tools.errors import WrongSettingError
from omlx_cache.tools.loading import load_model
from omlx_cache.tools.output import write_whole
from omlx_cache.tools.quality import app
from omlx_cache.tools.quality_contenders import contenders, from_setting, peers, reference
from omlx_cache.tools.quality_plots import quality_page
from omlx_cache.tools.quality_run import Results, measure_all, run, targets_of
from omlx_cache.tools.quality_tasks import ANSWER, CUE, DEPTHS, chat_task, text_task
from omlx_cache.tools.texts import part_text

WINDOW = 100
SHORT = ["--tokens", "300", "--turns", "2", "--device", "cpu"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(tiny):
    return load_model(tiny, device="cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def task(tokenizer):
    ids = tokenizer(part_text("quality")[:20_000])["input_ids"][:700]
    return text_task(ids, 200, tokenizer("\n\n")["input_ids"])


def test_needles_are_passages_of_the_text(task, tokenizer):
    haystack = task.ids[:700]
    assert len(task.asked["needle"]) == ANSWER * len(DEPTHS)
    for number, depth in enumerate(DEPTHS):
        positions = task.asked["needle"][number * ANSWER : (number + 1) * ANSWER]
        assert positions == list(range(positions[0], positions[0] + ANSWER))
        first = positions[0] + 1 - CUE
        assert first >= 700
        passage = task.ids[first : first + CUE + ANSWER]
        start = int(depth * 700)
        assert passage == haystack[start : start + CUE + ANSWER]
    assert task.asked["text"] == list(range(500, 700))


def test_a_chat_asks_for_each_of_its_messages(tokenizer):
    chat = chat_task(tokenizer, turns=3, tokens=80)
    text = tokenizer.decode(chat.ids)
    assert len(chat.asked["recall"]) == 3 * ANSWER
    targets = targets_of(chat)["recall"].tolist()
    for number in range(3):
        assert f"Repeat message {number + 1}." in text
        answer = tokenizer.decode(targets[number * ANSWER : (number + 1) * ANSWER])
        assert text.count(answer) >= 2, "what is asked for was said before"


def plain_logits(model, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("name", ["unquantized", "cache_bits=16"])
def test_logits_in_chunks_are_those_of_one_pass(name, model, task):
    contender = reference() if name == "unquantized" else from_setting(name)
    logits, _ = run(model, [task], contender)
    want = plain_logits(model, task.ids)
    for part, positions in task.asked.items():
        torch.testing.assert_close(logits[part], want[positions], rtol=1e-3, atol=1e-3)


def test_the_window_peer_is_a_window(model, task):
    (window_peer,) = [c for c in peers(WINDOW) if "window" in c.name]
    logits, num_bytes = run(model, [task], window_peer)
    size = len(task.ids)
    i, j = torch.arange(size)[:, None], torch.arange(size)
    mask = torch.where((j <= i) & (j > i - WINDOW), 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        want = model(torch.tensor([task.ids]), attention_mask=mask[None, None]).logits[0]
    torch.testing.assert_close(logits["needle"], want[task.asked["needle"]], rtol=1e-3, atol=1e-3)
    assert num_bytes == (WINDOW - 1) * 2 * 2 * 2 * 16 * 2  # layers, K and V, heads, dim, 16 bits


def test_rows_are_what_plain_computations_give(model, task):
    setting = "cache_bits=4 block_size=64 recent_tokens=0"
    results = Results({})
    measure_all(model, [task], contenders([setting], with_peers=True), results)
    rows = results.data["results"]
    assert list(rows) == ["unquantized", setting, "transformers, fp8", "transformers, window 1024"]

    p = plain_logits(model, task.ids).double().log_softmax(-1)
    with torch.no_grad(), omlx_cache.patched(model, cache_bits=4, block_size=64, recent_tokens=0):
        cache = omlx_cache.PagedCache(model)
        kwargs = {cache_name(type(model).forward): cache}
        q = model(torch.tensor([task.ids]), **kwargs).logits[0].double().log_softmax(-1)
    text = slice(500, 700)
    row = rows[setting]
    kld = (p[text].exp() * (p[text] - q[text])).sum(-1).mean().item()
    assert row["kld"] == pytest.approx(kld, rel=1e-3)
    same = (p[text].argmax(-1) == q[text].argmax(-1)).float().mean().item()
    assert row["top1"] == pytest.approx(same)
    truth = torch.tensor(task.ids[501:700])[:, None]
    assert row["perplexity"] == pytest.approx(
        math.exp(-q[500:699].gather(1, truth).mean().item()), rel=1e-4
    )
    ratio = row["perplexity"] / rows["unquantized"]["perplexity"] - 1
    assert row["perplexity_ratio"] == pytest.approx(ratio, abs=1e-5)
    right = [q[i].argmax().item() == task.ids[i + 1] for i in task.asked["needle"]]
    assert row["needle"] == pytest.approx(sum(right) / len(right))

    full = len(task.ids) * 2 * 2 * 2 * 16 * 2
    assert rows["unquantized"]["num_bytes"] == full
    assert rows["transformers, fp8"]["num_bytes"] == pytest.approx(full / 2, rel=0.01)
    stored = sum(
        t.numel() * (2 if t.dtype == torch.float32 else t.element_size())
        for layer in cache.layers
        for tier in ("sink", "hot", "k8v8", "k8v4", "k4v4")
        for t in getattr(layer.pool.blocks, tier).tensors().values()
    )
    assert row["num_bytes"] == stored
    assert row["saved"] == pytest.approx(1 - stored / full)


def test_what_can_be_retrieved_is(model, task, monkeypatch):
    """A model that always knows the next token scores 100 %."""
    targets = targets_of(task)
    perfect = {
        part: torch.nn.functional.one_hot(t, 500).float() * 50 for part, t in targets.items()
    }
    monkeypatch.setattr(quality_run, "run", lambda *args: (perfect, 10))
    results = Results({})
    measure_all(model, [task], [from_setting("cache_bits=8")], results)
    row = results.data["results"]["cache_bits=8"]
    assert (row["needle"], row["kld"], row["top1"]) == (1.0, 0.0, 1.0)
    assert row["perplexity"] == pytest.approx(1)


def test_an_interrupted_comparison_goes_on(model, task, tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    wanted = contenders(["cache_bits=8", "cache_bits=4"], with_peers=False)
    ran: list[str] = []

    def watched(model, tasks, contender, progress):
        ran.append(contender.name)
        if contender.name == "cache_bits=4" and ran.count("cache_bits=4") == 1:
            raise KeyboardInterrupt
        return run(model, tasks, contender, progress)

    monkeypatch.setattr(quality_run, "run", watched)
    with pytest.raises(KeyboardInterrupt):
        measure_all(model, [task], wanted, Results({"tokens": 700}, path))
    measure_all(model, [task], wanted, Results({"tokens": 700}, path))
    assert ran == ["unquantized", "cache_bits=8", "cache_bits=4", "unquantized", "cache_bits=4"]
    rows = json.loads(path.read_text())["results"]
    assert list(rows) == ["unquantized", "cache_bits=8", "cache_bits=4"]
    measure_all(model, [task], wanted, Results({"tokens": 700}, path))
    assert len(ran) == 5, "all rows were there"
    with pytest.raises(WrongSettingError, match=r"holds results with tokens 700, asked for 800"):
        Results({"tokens": 800}, path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_setting_that_changed_under_its_name_is_measured_again(tmp_path):
    file = tmp_path / "cache.yaml"
    file.write_text("quantization:\n  cache_bits: 8\n")
    results = Results({})
    results.add(from_setting(str(file)), {"kld": 1})
    assert results.has(from_setting(str(file)))
    file.write_text("quantization:\n  cache_bits: 4\n")
    assert not results.has(from_setting(str(file)))


def test_a_peer_that_is_not_there_is_a_row(model, task):
    def refuse(model):
        raise ValueError("Unknown quantization backend `fp8`")

    peer = peers(WINDOW)[0]
    broken = type(peer)(peer.name, peer.setting, True, refuse)
    results = Results({})
    measure_all(model, [task], [broken, from_setting("cache_bits=8")], results)
    assert "Unknown" in results.data["results"][peer.name]["error"]
    page = quality_page(
        results.data
        | {
            "setup": dict.fromkeys(("model", "dtype", "text"), "x")
            | dict.fromkeys(("tokens", "scored", "turns"), 1)
        },
        list(results.data["results"]),
    )
    assert "Unknown quantization backend" in page


@pytest.mark.parametrize(
    ("setting", "want"),
    [
        ("cache_bits=4", {"cache_bits": 4}),
        ("cache_bits={k: 8, v: 4}", {"cache_bits": {"k": 8, "v": 4}}),
        ("window_size=1024 sink_tokens=0", {"window_size": 1024, "sink_tokens": 0}),
        (
            "tiers={k8v4: 64, k4v4: null}, window_size=null",
            {"tiers": {"k8v4": 64, "k4v4": None}, "window_size": None},
        ),
    ],
)
def test_inline_settings(setting, want):
    assert from_setting(setting).setting == omlx_cache.CacheConfig(**want).to_dict()


def invoke(*arguments: object):
    """Run the command; let an exception that it should have handled through."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_command(tiny, tmp_path):
    files = [tmp_path / name for name in ("out.json", "out.html", "out.png")]
    options = ["--results", files[0], "--report", files[1], "--plot", files[2]]
    result = invoke("--model", tiny, *SHORT, "window_size=100", *options)
    assert result.exit_code == 0, result.output
    data = json.loads(files[0].read_text())
    names = ["unquantized", "window_size=100", "transformers, fp8", "transformers, window 100"]
    assert list(data["results"]) == names
    for name in names:
        assert name.split()[-1] in result.stdout
        assert {"kld", "top1", "perplexity_ratio", "saved", "needle", "recall"} <= set(
            data["results"][name]
        )
    assert data["results"]["unquantized"]["saved"] == 0
    assert files[1].read_text().count("<svg") == 2
    assert files[2].read_bytes().startswith(b"\x89PNG")
    printed = invoke("--model", tiny, *SHORT, "window_size=100", "--results", files[0], "--json")
    assert json.loads(printed.stdout)["results"] == data["results"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["window_size=0"], "window_size must be an integer of at least 1"),
        (["windowsize=5"], "did you mean attention.window_size?"),
        (["cache_bits={k: 8"], "the value of cache_bits must be YAML"),
        (["cache_bits=8 cache_bits=4"], "cache_bits is given twice"),
        (["cache_bits=8", "cache_bits=8"], "is given twice; keep one"),
        (["no-such.yaml"], "got 'no-such.yaml', which is no file"),
        ([""], "got '', which is no file"),
        (["--scored", "300"], "must be less than the text's 300 tokens"),
        (["--plot", "out.gif"], "--plot must end in .svg, .png, .pdf"),
        (["--results", "/no/such/place/out.json"], "a directory that exists"),
        (["--input", "/no/such/text"], "can't be read"),
        (["--device", "abacus"], "device must be one that PyTorch has here"),
        (["cache_bits=8", "--turns", "900"], "50"),
    ],
)
def test_wrong_arguments(arguments, message, tiny):
    result = invoke("--model", tiny, *SHORT, *arguments)  # of an option given twice the last counts
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_a_file_of_something_else_is_not_overwritten(tiny, tmp_path):
    path = tmp_path / "out.json"
    for content in ("{}", "no json", "[]"):
        path.write_text(content)
        result = invoke("--model", tiny, *SHORT, "--results", path, "cache_bits=8")
        assert result.exit_code == 2, result.output
        assert "must hold results of this tool" in result.stderr
        assert path.read_text() == content


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_says_so(tmp_path):
    def fill(scratch: Path) -> None:
        scratch.write_text("half of it")
        Path("/dev/full").write_text("x")

    path = tmp_path / "out.json"
    path.write_text("before")
    with pytest.raises(WrongSettingError, match=r"out.json can't be written \(no space left"):
        write_whole(path, fill)
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_help_shows_examples():
    assert "window_size=1024 sink_tokens=0" in " ".join(invoke("--help").output.split())
