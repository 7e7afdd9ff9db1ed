"""The demo's course: get a model, hold the chat stock, patch, hold the same chat again, report.

Both runs are treated alike: one process, the same messages, greedy, one cache kept over all turns,
and a short warm-up of their own beforehand, so that neither pays for the first use of a kernel. The
stock run's answers are the history of both (see ``run_chat``), so that every turn's prompt is the
same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from transformers import DynamicCache

import omlx_cache
from omlx_cache.conversation import Conversation
from omlx_cache.tools.chat_run import Bytes, ChatRun, pad_id, run_chat
from omlx_cache.tools.conversation import long_messages
from omlx_cache.tools.demo_report import summarize
from omlx_cache.tools.demo_screen import Screen
from omlx_cache.tools.errors import setting_errors
from omlx_cache.tools.loading import checked_device, load_model, load_tokenizer
from omlx_cache.tools.progress import ConsoleProgress
from omlx_cache.tools.smollm2 import smollm2_gptq_checkpoint

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Settings:
    """How a demo was asked for; ``None`` leaves the choice to the model or the machine."""

    model: str | None = None
    config: Path | None = None
    window: int | None = None
    turns: int = 6
    message_tokens: int = 512
    answer_tokens: int = 32
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None

    def overrides(self) -> dict:
        """Return the leaf keys that are given to ``patch`` besides the configuration."""
        return {} if self.window is None else {"window_size": self.window}

    def as_data(self) -> dict:
        """Return the settings, and the cache's configuration in full, as plain data for JSON."""
        cache = omlx_cache.CacheConfig.resolve(self.config, **self.overrides())
        return asdict(self) | {
            "config": None if self.config is None else str(self.config),
            "cache": cache.model_dump(mode="json"),
        }


def run_demo(settings: Settings, console: Console) -> dict:
    """Run the whole demo and return its report (see `summarize`).

    Raises:
        PreparationError: the default model could not be made.
        ModelLoadError: the model could not be loaded.
        NotServedError: ``patch`` can't serve this model or configuration.
        WrongSettingError: the configuration is wrong, or there is not enough text.
        OutOfBlocksError: the configuration's pool is too small for the chat.
    """
    with _threads(settings.threads):
        return _run(settings, console)


def _run(settings: Settings, console: Console) -> dict:
    with setting_errors():
        omlx_cache.CacheConfig.resolve(settings.config, **settings.overrides())
        device = checked_device(settings.device)
    model, tokenizer = _load(settings, device, console)

    def patched():
        return omlx_cache.patched(model, settings.config, **settings.overrides())

    with setting_errors():
        messages = long_messages(tokenizer, settings.turns, settings.message_tokens)
        with patched():
            pass  # what can't be patched is refused now, not after the stock run
    _notes_before(model, tokenizer, settings, console)

    def hold(name: str, cache, cache_bytes: Callable[[], Bytes], reference=None) -> ChatRun:
        with console.status("warming up"):
            _warm_up(model, tokenizer)
        return run_chat(
            model,
            tokenizer,
            messages,
            cache,
            cache_bytes,
            settings.answer_tokens,
            Screen(console, name, messages).listener(),
            reference,
        )

    stock_cache = DynamicCache(config=model.config)
    stock = hold("stock", stock_cache, StockBytes(stock_cache))
    del stock_cache
    with patched():
        paged_cache = omlx_cache.PagedCache(model)
        answers = [turn.answer_ids for turn in stock.turns]
        paged = hold("patched", paged_cache, lambda: _paged_bytes(paged_cache), answers)
    return summarize(stock, paged, settings.as_data())


class StockBytes:
    """Measure a ``DynamicCache``: the memory behind its tensors, each storage counted once."""

    def __init__(self, cache: DynamicCache) -> None:
        self._cache = cache
        self._peak = 0

    def __call__(self) -> Bytes:
        """Return the bytes now and the most that was seen at a call."""
        storages = {}
        for layer in self._cache.layers:
            for tensor in (layer.keys, layer.values):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
        now = sum(storages.values())
        self._peak = max(self._peak, now)
        return Bytes(now, self._peak)


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _paged_bytes(cache) -> Bytes:
    report = omlx_cache.report(cache)
    return Bytes(report.total_bytes, report.peak_bytes)


def _load(settings: Settings, device: str, console: Console):
    path: str | Path | None = settings.model
    if path is None:
        with ConsoleProgress(console) as progress:
            path = smollm2_gptq_checkpoint(progress=progress)
    console.print(
        f"loading {Path(path).name if settings.model is None else path} ...", highlight=False
    )
    with console.status("loading"):
        model = load_model(path, dtype=settings.dtype, device=device)
        tokenizer = load_tokenizer(path)
    console.print(
        f"{type(model).__name__}, {str(model.dtype).removeprefix('torch.')}, on "
        f"{next(model.parameters()).device}, {torch.get_num_threads()} threads, "
        f"{_configuration(settings)}",
        highlight=False,
    )
    return model, tokenizer


def _configuration(settings: Settings) -> str:
    """Name the configuration of the patched run in a few words."""
    parts = [f"configuration {settings.config}" if settings.config else "default configuration"]
    parts += [f"{key}={value}" for key, value in settings.overrides().items()]
    return ", ".join(parts)


def _notes_before(model, tokenizer, settings: Settings, console: Console) -> None:
    if not Conversation(tokenizer).has_template:
        console.print(
            "The tokenizer has no chat template: the chat is written as plain 'User:' / "
            "'Assistant:' text."
        )
    trained = getattr(model.config, "max_position_embeddings", None)
    planned = settings.turns * (settings.message_tokens + settings.answer_tokens)
    if trained and planned > trained:
        console.print(
            f"The chat will have about {planned:,} tokens, the model was trained for {trained:,}: "
            "the stock model's answers will break down past that."
        )


def _warm_up(model, tokenizer) -> None:
    ids = torch.tensor(
        [Conversation(tokenizer).ask("Hello!")], device=next(model.parameters()).device
    )
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=WARM_UP_TOKENS,
        do_sample=False,
        pad_token_id=pad_id(tokenizer),
    )
