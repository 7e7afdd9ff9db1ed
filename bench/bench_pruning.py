"""Which score of a block should say that it goes? Pruning's rankings on several texts and chats.

SmolLM2 in float32 reads texts and chats of about 4096 tokens, of whose old blocks ``prune_ratio``
is dropped on the way, and is then asked for what it has read::

    a text   its second half is held against the stock model (KL divergence, same top token);
             then passages from 24 depths must be continued, each behind the text ("needles")
    a chat   eight messages, each with a short answer, a token a step; then each message must be
             repeated, each behind the chat ("recall")
    a document and a question about it in one prompt, at whose end the blocks are dropped: a
             passage must be continued; 24 questions, each behind the document ("question")

Every question is put to the same cache: none is made easier or harder by the one before. Only that
of a document is there before the blocks go. All rankings keep equally many blocks. ``random`` draws
once a position, so it is measured with several seeds.

    python bench/bench_pruning.py                      # bench/results/pruning.json; two hours
    python bench/bench_pruning.py --seeds 1 --texts 1 --chats 0 --json out.json       # a quick look
    python docs/render_tuning.py                      # put the table into docs/tuning.md

Rows that are there are not measured again; a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from unittest import mock

import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, PreTrainedModel

import omlx_cache
from omlx_cache.cache_steps import CacheSteps
from omlx_cache.compat import cache_name
from omlx_cache.conversation import Conversation
from omlx_cache.policy import eviction
from omlx_cache.tools.divergence import compare
from omlx_cache.tools.loading import load_model, load_tokenizer
from omlx_cache.tools.machine import machine, versions
from omlx_cache.tools.output import write_text
from omlx_cache.tools.quality_tasks import ANSWER, CUE
from omlx_cache.tools.smollm2 import smollm2_checkpoint
from omlx_cache.tools.texts import passages, token_ids

RESULTS = Path(__file__).parent / "results" / "pruning.json"
TOKENS, CHUNK = 4096, 512
ROWS = 8  # questions at a time: the stock cache copies all it holds for each
NUM_NEEDLES, MESSAGES = 24, 8
FIRST_TEXT, BETWEEN_TEXTS = 27_000, 4_500  # those before chose the score
BLOCK_SIZES, PRUNE_RATIO = (256, 64), 0.3
SEEDS_APART = 1_000_003
STOCK = "nothing pruned"


@dataclass
class Reading:
    """What is read, and what is asked afterwards.

    Attributes:
        name: of the reading.
        steps: the ids of each step of the model.
        scored: how many of the last ids are held against the stock model.
        questions: ids that follow, each by itself; the last `ANSWER` must be told.
        prompts: ids that come before each question, in one prompt with what is read; none: what
            was read is a prompt, or several, of its own.
    """

    name: str
    steps: list[list[int]]
    scored: int
    questions: list[list[int]]
    prompts: list[list[int]] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """All that is read."""
        return [token for step in self.steps for token in step]


def a_text(tokenizer, number: int) -> Reading:
    """Return a text and its needles."""
    ids = token_ids("quality", tokenizer, TOKENS, FIRST_TEXT + number * BETWEEN_TEXTS)
    blank = tokenizer("\n\n", add_special_tokens=False)["input_ids"]
    last = TOKENS - CUE - ANSWER
    firsts = [round(i * last / (NUM_NEEDLES - 1)) for i in range(NUM_NEEDLES)]
    questions = [blank + ids[first : first + CUE + ANSWER] for first in firsts]
    steps = [ids[first : first + CHUNK] for first in range(0, TOKENS, CHUNK)]
    return Reading(f"text {number}", steps, TOKENS // 2, questions)


def a_chat(tokenizer, number: int) -> Reading:
    """Return a chat of `MESSAGES` messages and the requests to repeat each of them."""
    size = TOKENS // MESSAGES - 30  # of the template around a message
    texts = passages("calibration", (number + 1) * MESSAGES, size, tokenizer)[-MESSAGES:]
    answer = tokenizer("I have read it.", add_special_tokens=False)["input_ids"]
    chat, steps, questions = Conversation(tokenizer), [], []
    for i, text in enumerate(texts, 1):
        before = chat.num_tokens
        steps.append(chat.ask(f"Message {i}:\n\n{text}")[before:])
        chat.answer(answer)
        steps += [[token] for token in answer]
    for i, text in enumerate(texts, 1):
        asked = copy.deepcopy(chat).ask(f"Repeat message {i}.")[chat.num_tokens :]
        told = tokenizer(text, add_special_tokens=False)["input_ids"]
        questions.append(asked + told[: CUE + ANSWER])
    return Reading(f"chat {number}", steps, 0, questions)


def a_document(tokenizer, number: int) -> Reading:
    """Return a document, and requests to continue passages of it; with chunks of `CHUNK`."""
    text = a_text(tokenizer, number)
    before = tokenizer("<|im_start|>user\n", add_special_tokens=False)["input_ids"]
    ids = before + text.ids[: TOKENS - len(before)]
    last = TOKENS - CUE - ANSWER
    firsts = [round(i * last / (NUM_NEEDLES - 1)) for i in range(NUM_NEEDLES)]
    told = [ids[first : first + CUE + ANSWER] for first in firsts]
    asked = [
        f"\n\nContinue the passage of this text that begins with:\n{tokenizer.decode(t[:CUE])}"
        "<|im_end|>\n<|im_start|>assistant\n"
        for t in told
    ]
    prompts = [tokenizer(each, add_special_tokens=False)["input_ids"] for each in asked]
    steps = [ids[first : first + CHUNK] for first in range(0, TOKENS, CHUNK)]
    return Reading(f"document {number}", steps, 0, told, prompts)


@torch.no_grad()
def read(model: PreTrainedModel, reading: Reading, cache) -> tuple[torch.Tensor, dict]:
    """Read and ask with a cache.

    Returns:
        The logits [scored, vocabulary] of the reading; and of what was asked for the share of
        tokens that were told (``told``) and the mean negative log-likelihood in nats (``nll``).
    """
    name, found = cache_name(type(model).forward), []
    read_so_far, scored_from = 0, len(reading.ids) - reading.scored
    # The end of a prompt that is not all: steps that are its chunks, and no pruning before it ends.
    with mock.patch.object(CacheSteps, "prune") if reading.prompts else nullcontext():
        for step in reading.steps:
            read_so_far += len(step)
            kept = min(len(step), max(0, read_so_far - scored_from))
            out = model(torch.tensor([step]), logits_to_keep=max(kept, 1), **{name: cache})
            found.append(out.logits[0, out.logits.shape[1] - kept :])
    told, nll = 0, 0.0
    for prompt, rows in _asked(reading):
        forked = copy.deepcopy(cache)
        if prompt:
            model(torch.tensor([prompt]), logits_to_keep=1, **{name: forked})
        forked.batch_repeat_interleave(len(rows))
        logits = model(rows, logits_to_keep=ANSWER + 1, **{name: forked}).logits[:, :-1]
        right = rows[:, -ANSWER:]
        told += (logits.argmax(-1) == right).sum().item()
        nll += cross_entropy(logits.flatten(0, 1), right.flatten(), reduction="sum").item()
    count = ANSWER * len(reading.questions)
    return torch.cat(found), {"told": told / count, "nll": nll / count}


def _asked(reading: Reading) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield the end of a prompt, and the questions [rows, tokens] that are put behind it."""
    if reading.prompts:
        for prompt, question in zip(reading.prompts, reading.questions, strict=True):
            yield prompt, torch.tensor([question])
        return
    for _, same_size in groupby(sorted(reading.questions, key=len), key=len):
        for rows in torch.tensor(list(same_size)).split(ROWS):
            yield [], rows


def rankings(seeds: int) -> dict[str, tuple[dict, int]]:
    """Return name -> (keys of the configuration, seed of ``random``)."""
    found = {}
    for size in BLOCK_SIZES:
        base = {"block_size": size, "window_size": None, "prefill_chunk": CHUNK}
        for ranking in ("topk", "oldest"):
            found[f"{size}, {ranking}"] = base | _pruned(ranking), 0
        for seed in range(seeds):
            found[f"{size}, random {seed}"] = base | _pruned("random"), seed
    return found


def _pruned(ranking: str) -> dict:
    return {"pruning": ranking, "prune_ratio": PRUNE_RATIO}


def measure(model: PreTrainedModel, reading: Reading, setting: dict, seed: int, stock) -> dict:
    """Return a row: how a reading went with a setting.

    Args:
        model: not patched.
        reading: what is read and asked.
        setting: keys of the configuration.
        seed: of ``pruning: random``.
        stock: what `read` returned for the stock model.
    """
    with (
        mock.patch.object(eviction, "SEED", seed * SEEDS_APART),
        omlx_cache.patched(model, **setting),
    ):
        cache = omlx_cache.PagedCache(model)
        logits, row = read(model, reading, cache)
    (sequence,) = cache.groups[0].rows
    row |= {"tokens": sequence.length}
    if not reading.prompts:  # with them each question has dropped its own
        row |= {"dropped": sorted(sequence.dropped)}
    if reading.scored:
        agreement = compare(stock[0], logits, torch.tensor([reading.ids]))
        row |= asdict(agreement)
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="of random")
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--chats", type=int, default=3)
    parser.add_argument("--documents", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the rows go")
    given = parser.parse_args(arguments)
    path = smollm2_checkpoint()
    tokenizer = load_tokenizer(path)
    model = load_model(path, dtype=torch.float32, device="cpu")
    setup = {"prune_ratio": PRUNE_RATIO, "tokens": TOKENS, "needles": NUM_NEEDLES}
    data = {"setup": setup, "machine": machine(), "versions": versions(), "results": {}}
    if given.json.exists():
        data["results"] = json.loads(given.json.read_text(encoding="utf-8"))["results"]
    readings = [a_text(tokenizer, i) for i in range(given.texts)]
    readings += [a_chat(tokenizer, i) for i in range(given.chats)]
    readings += [a_document(tokenizer, i) for i in range(given.documents)]
    rows, stock = data["results"], {}
    rows.setdefault(STOCK, {})
    for name, (setting, seed) in rankings(given.seeds).items():
        for reading in readings:
            if reading.name in rows.setdefault(name, {}):
                continue
            if reading.name not in stock:
                stock[reading.name] = read(model, reading, DynamicCache(config=model.config))
                rows[STOCK][reading.name] = stock[reading.name][1]
            row = measure(model, reading, setting, seed, stock[reading.name])
            rows[name][reading.name] = row
            print(name, reading.name, row, flush=True)
            write_text(given.json, json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
