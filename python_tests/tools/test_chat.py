"""The chat command in a pipe: what it prints, its commands, and how it fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from tiny_chat import save_tiny_chat_model
from typer.testing import CliRunner

import omlx_cache
from omlx_cache.tools.chat import app
from omlx_cache.tools.chat_answer import printable
from omlx_cache.tools.chat_commands import COMMANDS
from omlx_cache.tools.chat_room import ChatRoom
from omlx_cache.tools.loading import load_model, load_tokenizer

SHORT = ["--device", "cpu", "--max-new-tokens", "6", "--temperature", "0"]
STATUS = re.compile(
    r"^\[6 tokens, [\d.]+ tokens/s, first after [\d.]+ s, cut at --max-new-tokens \| "
    r"prompt (\d+) tokens, (\d+)% reused \| cache [\d.]+ MB \(hot [\d.]+\), (\d+)/\d+ blocks\]$",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers never end by themselves."""
    return save_tiny_chat_model(tmp_path_factory.mktemp("tiny"), eos_token_id=None)


@pytest.fixture(scope="module")
def model(tiny: Path):
    return omlx_cache.patch(load_model(tiny, device="cpu"), prefix_cache=True, block_size=64)


@pytest.fixture
def room(tiny: Path, model) -> ChatRoom:
    generation = {"max_new_tokens": 40, "do_sample": False}
    return ChatRoom(model, load_tokenizer(tiny), "Be brief.", generation)


def run(tiny: Path, lines: str | bytes, *options: object):
    """Run the command on some lines; let an exception that it should have handled through."""
    arguments = ["--model", tiny, *SHORT, *options]
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=lines)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_pipe_is_a_chat(tiny: Path):
    result = run(tiny, "Hello\n\nAnd then?\n")
    assert result.exit_code == 0, result.output
    first, second = STATUS.findall(result.stderr)
    assert first[1:] == ("0", "1")
    assert second[2] == "1", "a block of the turn before was not given back"
    known = int(first[0]) + 5  # the answer's last token was not read yet
    assert second[1] == f"{100 * known / int(second[0]):.0f}"
    assert "\x1b" not in result.output
    stock, tokenizer = load_model(tiny, device="cpu"), load_tokenizer(tiny)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    found = stock.generate(**ids, max_new_tokens=6, do_sample=False)[0, ids["input_ids"].shape[1] :]
    answer = tokenizer.decode(found, skip_special_tokens=True)
    assert result.stdout.startswith(printable(answer) + "\n")


def test_a_process_in_a_pipe(tiny: Path, tmp_path: Path):
    saved = tmp_path / "a.chat"
    command = [sys.executable, "-m", "omlx_cache.tools.chat", "--model", str(tiny), *SHORT]
    lines = f"Hello\n/save {saved}\n".encode()
    done = subprocess.run(command, input=lines, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    assert b"1 turn, " in done.stdout
    again = run(tiny, "/history\n/exit\nnever said\n", "--load", saved)
    assert again.exit_code == 0, again.output
    assert again.stdout.startswith("user: Hello\nassistant: ")
    assert "never said" not in again.output


def test_commands(tiny: Path, tmp_path: Path):
    saved = tmp_path / "a chat"
    lines = [
        "/stats",
        "One",
        "Two",
        "/stats",
        f"/save {saved}",
        "/undo",
        "/retry",
        "/history",
        "/reset",
        "/history",
        f"/load {saved}",
        "Three",
        "/config",
        "/help",
        " /etc is a directory",
    ]
    result = run(tiny, "\n".join(lines), "--system", "Be brief.")
    assert result.exit_code == 0, result.output
    out = result.stdout
    assert "chat: 0 turns, 0 tokens\ncache: nothing was computed yet\n" in out
    assert "answers: 2, 12 tokens, " in out
    assert re.search(r"prompts: \d+ tokens, \d+ \([4-9]\d%\) found in the cache\n\[KV cache\]", out)
    assert f"saved {saved}: 2 turns, " in out
    assert "taken back: Two" in out
    assert "system: Be brief.\nuser: One\nassistant: " in out
    assert "user: Two" not in out
    assert "a new chat\nsystem: Be brief.\nloaded " in out
    assert f"loaded {saved}: 2 turns, " in out
    assert "prefix_cache: true" in out
    assert all(f"/{name}" in out for name in COMMANDS)
    statuses = STATUS.findall(result.stderr)
    assert len(statuses) == 5
    assert int(statuses[3][1]) > 60, "the loaded chat was computed again"


def test_with_a_seed_sampling_is_repeatable_and_the_configuration_holds(tiny: Path, tmp_path: Path):
    config = tmp_path / "cache.yaml"
    config.write_text("kv_cache:\n  block_size: 64\nquantization:\n  cache_bits: 4\n")
    options = ["--temperature", "1.5", "--top-p", "0.9", "--top-k", "50", "--config", config]
    found = [run(tiny, "Hi\n/config\n", *options, "--seed", s).stdout for s in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
    assert "block_size: 64" in found[0]
    assert "prefix_cache: true" in found[0]


def test_a_model_without_a_template_is_told(tmp_path: Path):
    plain = save_tiny_chat_model(tmp_path / "plain", chat_template=None, eos_token_id=None)
    result = run(plain, "Hello\n")
    assert result.exit_code == 0
    assert "no chat template" in result.stderr


def test_a_template_that_refuses(tmp_path: Path):
    template = "{{ raise_exception('no system prompt here') }}"
    directory = save_tiny_chat_model(tmp_path / "refuses", chat_template=template)
    result = run(directory, "Hello\n", "--system", "Be brief.")
    assert result.exit_code == 2
    assert "refuses: no system prompt here; where it knows" in result.stderr


def test_ctrl_c_keeps_what_was_said(room: ChatRoom, tiny: Path):
    pieces: list[str] = []

    def write(piece: str) -> None:
        if piece:
            pieces.append(piece)
            if len(pieces) == 2:
                signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    turn = room.say("Hello", write)
    assert turn.is_stopped
    assert 0 < turn.tokens < 40
    said = "".join(pieces)
    assert room.chat.messages[-1] == {"role": "assistant", "content": said}
    assert signal.getsignal(signal.SIGINT) is before
    held = room.chat.num_tokens
    more = room.say("Go on", lambda piece: None)
    assert not more.is_stopped
    assert more.reused_tokens >= held - 1  # the answer's last token may not have been read


@pytest.mark.parametrize("asked", ["say", "retry"])
def test_ctrl_c_before_the_answer_takes_the_turn_back(room: ChatRoom, model, asked: str):
    room.say("Hello", lambda piece: None)
    ask = {"say": partial(room.say, "Stop"), "retry": room.retry}[asked]
    before = room.chat.messages
    hook = model.model.layers[1].register_forward_pre_hook(
        lambda module, args: signal.raise_signal(signal.SIGINT)
    )
    try:
        with pytest.raises(KeyboardInterrupt):
            ask(lambda piece: None)
    finally:
        hook.remove()
    assert room.chat.messages == before
    assert room.say("Go on", lambda piece: None).reused_tokens > 0


def test_a_second_ctrl_c_takes_the_turn_back(room: ChatRoom):
    def write(piece: str) -> None:
        if piece:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        room.say("Hello", write)
    assert room.num_turns == 0


def test_ctrl_c_in_a_pipe_ends_it(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    from omlx_cache.tools import chat_loop

    def interrupt(text: str) -> str:
        signal.raise_signal(signal.SIGINT)
        return text

    monkeypatch.setattr(chat_loop, "printable", interrupt)
    result = run(tiny, "Hello\nAnd?\n")
    assert result.exit_code == 130, result.output
    assert len(result.stderr.splitlines()) < 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/lod x", "unknown command /lod; did you mean /load? /help lists them"),
        ("/", "unknown command /; /help lists them"),
        ("/save", "/save takes PATH, got none; type /save PATH"),
        ("/stats now", "/stats takes no argument, got now; type /stats"),
        ("/undo", "there must be a turn to take back, got none"),
        ("/retry", "there must be a turn to take back, got none"),
        ("/load {d}/none", "/none can't be read (no such file or directory); give a file that"),
        ("/load {d}", "can't be read (is a directory)"),
        ("/load {d}/notes.txt", "must be a whole file that was saved, got one that can't be used"),
        ("/save {d}/no/a.chat", "can't be written (no such file or directory); make room, or name"),
        ("/save {d}/notes.txt", "must be a new file or a saved chat, got something else"),
        ("/save {d}", "must be a new file or a saved chat, got something else"),
    ],
)
def test_a_wrong_command_is_one_line(tiny: Path, tmp_path: Path, line: str, message: str):
    notes = tmp_path / "notes.txt"
    notes.write_text("keep me")
    result = run(tiny, f"{line.format(d=tmp_path)}\nnever sent\n")
    assert result.exit_code == 2, result.output
    errors = [text for text in result.stderr.splitlines() if text != "loading the model ..."]
    assert len(errors) == 1
    assert message in errors[0]
    assert notes.read_text() == "keep me"


@pytest.mark.parametrize(
    "data", [b"ok\nh\xe4user\n", b"ok\n\x7fELF\0\n"], ids=["latin-1", "binary"]
)
def test_standard_input_that_is_no_text(tiny: Path, data: bytes):
    result = run(tiny, data)
    assert result.exit_code == 2
    assert "standard input must be UTF-8 text, one message a line, got" in result.stderr
    assert "in line 2" in result.stderr


def test_a_pool_too_small_ends_a_pipe(tiny: Path, tmp_path: Path):
    config = tmp_path / "cache.yaml"
    config.write_text("kv_cache:\n  block_size: 64\n  max_gpu_blocks: 1\n")
    result = run(tiny, f"Hello\n{'word ' * 100}\nnever\n", "--config", config)
    assert result.exit_code == 1, result.output
    assert "max_gpu_blocks" in result.stderr
    assert len(STATUS.findall(result.stderr)) == 1


def test_the_answer_can_not_draw_on_the_terminal():
    assert printable("a\x1b]0;title\x07b\r\x9bc\n\t") == "a]0;titlebc\n\t"


def test_help_shows_examples_and_exit_codes():
    output = CliRunner().invoke(app, ["--help"]).output
    assert "Examples" in output
    assert "Exit codes" in output


def test_the_file_is_replaced_as_a_whole(tiny: Path, tmp_path: Path, monkeypatch):
    saved = tmp_path / "a.chat"
    assert run(tiny, f"One\n/save {saved}\n").exit_code == 0
    before = saved.read_bytes()

    def full(*args) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    result = run(tiny, f"/load {saved}\nTwo\n/save {saved}\n")
    assert result.exit_code == 2
    assert "can't be written (no space left on device); make room" in result.stderr
    assert saved.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["a.chat"]
