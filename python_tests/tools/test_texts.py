"""The texts are long enough, the same every time, and the parts share nothing."""

import hashlib
import os
import re
import subprocess
import sys

import pytest
from tiny_chat import tiny_tokenizer

from omlx_cache.tools import texts
from omlx_cache.tools.prepared import PreparationError


def paragraphs(part: str) -> set[str]:
    """Return the part's paragraphs that are long enough not to be a stock phrase."""
    pieces = (" ".join(p.split()) for p in re.split(r"\n\s*\n", texts.part_text(part)))
    return {p for p in pieces if len(p) >= texts.LONG_PARAGRAPH}


@pytest.mark.parametrize(
    ("left", "right"),
    [("calibration", "chat"), ("calibration", "quality"), ("chat", "quality")],
)
def test_parts_share_no_paragraph(left: str, right: str):
    assert len(paragraphs(left)) > 50
    assert not paragraphs(left) & paragraphs(right)


def test_a_part_repeats_no_paragraph():
    for part in texts.SHARES:
        pieces = [" ".join(p.split()) for p in re.split(r"\n\s*\n", texts.part_text(part))]
        long = [p for p in pieces if len(p) >= texts.LONG_PARAGRAPH]
        assert len(long) == len(set(long))


def test_parts_are_large_enough_for_their_purpose():
    assert len(texts.part_text("calibration")) > 40_000  # 32 texts of 256 tokens
    assert len(texts.part_text("chat")) > 50_000  # tens of long messages
    assert len(texts.part_text("quality")) > 150_000  # 24k tokens and more


def test_parts_are_the_same_in_another_process():
    program = (
        "import hashlib; from omlx_cache.tools.texts import SHARES, part_text; "
        "print(*(hashlib.sha256(part_text(p).encode()).hexdigest() for p in SHARES))"
    )
    other = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    here = [hashlib.sha256(texts.part_text(p).encode()).hexdigest() for p in texts.SHARES]
    assert other.stdout.split() == here


def test_passages_follow_each_other_without_overlap():
    first, second, third = texts.passages("chat", 3, 500)
    assert texts.passages("chat", 2, 500) == [first, second]
    text = texts.part_text("chat")
    starts = [text.index(passage) for passage in (first, second, third)]
    assert starts[0] + len(first) <= starts[1]
    assert starts[1] + len(second) <= starts[2]


def test_passages_are_as_long_as_asked_for_in_tokens():
    tokenizer = tiny_tokenizer()
    lengths = [
        len(tokenizer(text, add_special_tokens=False)["input_ids"])
        for text in texts.passages("chat", 5, 200, tokenizer)
    ]
    assert all(100 < length <= 200 for length in lengths), lengths


def test_token_ids_are_consecutive():
    tokenizer = tiny_tokenizer()
    whole = texts.token_ids("quality", tokenizer, 300)
    assert len(whole) == 300
    assert texts.token_ids("quality", tokenizer, 100, offset=200) == whole[200:]
    assert texts.token_ids("quality", tokenizer, 0) == []


def test_asking_for_too_much_says_how_much_there_is():
    with pytest.raises(ValueError, match=r"part 'chat' holds \d+ passages of 10000 characters"):
        texts.passages("chat", 1000, 10_000)
    with pytest.raises(ValueError, match=r"has \d+ tokens with this tokenizer, asked for 0 \+ 10"):
        texts.token_ids("quality", tiny_tokenizer(), 10**9)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="part must be one of"):
        texts.part_text("training")
    with pytest.raises(ValueError, match="count=0"):
        texts.passages("chat", 0, 10)


def test_a_python_without_topics_is_named(monkeypatch):
    texts._parts.cache_clear()
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(PreparationError, match=r"without pydoc_data\.topics"):
        texts.part_text("chat")
