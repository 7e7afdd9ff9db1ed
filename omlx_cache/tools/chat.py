"""Chat with a model in the terminal or in a pipe, on a paged cache that each turn goes on with.

    python -m omlx_cache.tools.chat --model M --config chat.yaml

Without ``--model`` it takes SmolLM2-135M-Instruct from its PyPI package and quantizes it to GPTQ
4-bit once, as the demo does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console

import omlx_cache
from omlx_cache.conversation import Conversation
from omlx_cache.tools.chat_loop import Loop
from omlx_cache.tools.chat_room import ChatRoom
from omlx_cache.tools.errors import EXIT_WORDS, config_errors, exit_codes, setting_errors
from omlx_cache.tools.loading import checked_device, hushed, load_model, load_tokenizer
from omlx_cache.tools.progress import ConsoleProgress
from omlx_cache.tools.smollm2 import smollm2_gptq_checkpoint

EPILOG = f"""Examples

  python -m omlx_cache.tools.chat

  python -m omlx_cache.tools.chat --model ./llama-gptq --config configs/chat.yaml

  python -m omlx_cache.tools.chat --system "Be brief." --temperature 0.7 --load yesterday.chat

  printf 'What is paging?\\nAnd swapping?\\n/save out.chat\\n' | python -m omlx_cache.tools.chat

In the chat, /help lists the commands (/save, /load, /stats, /config, /reset, ...). Ctrl-C stops an
answer, and what was said so far stays in the chat; Ctrl-D, or Ctrl-C twice at the prompt, leaves.
Where standard input is no terminal, each line is a message: answers go to standard output, the line
about each answer to standard error, and the first error ends it. {EXIT_WORDS}
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog=EPILOG)
def chat(
    model: Annotated[
        str | None,
        typer.Option(
            help="Local directory or hub id of a model; default: SmolLM2-135M-Instruct, GPTQ 4-bit."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML configuration of the cache; default: the defaults. Always with prefix_cache."
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System prompt; default: the chat template's.")
    ] = None,
    load: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Go on with a chat that /save wrote.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="0 always takes the likeliest token; default: the model's own."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens of this mass."),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Sample from so many of the likeliest tokens.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(min=0.01, help="Above 1, repeat less; default: the model's own.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1, cpu, ...; default: the GPU if there is one.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Default: what the checkpoint says."),
    ] = None,
) -> None:
    """Chat with a patched model; each turn computes its own message alone."""
    out, notes = Console(), Console(stderr=True)
    with exit_codes(notes), hushed():
        with config_errors():
            settings = omlx_cache.CacheConfig.resolve(config, prefix_cache=True)
            where = checked_device(device)
        generation = _generation(max_new_tokens, temperature, top_p, top_k, repetition_penalty)
        with ConsoleProgress(notes) as progress:
            path = model or smollm2_gptq_checkpoint(progress=progress)
            progress("loading the model")
            loaded, tokenizer = load_model(path, dtype, where), load_tokenizer(path)
        with setting_errors():
            omlx_cache.patch(loaded, settings)
        torch.manual_seed(seed)
        room = ChatRoom(loaded, tokenizer, system, generation)
        if load is not None:
            room.load(load)
        if not Conversation(tokenizer).has_template:
            notes.print(
                "The tokenizer has no chat template: the chat is written as plain 'User:' / "
                "'Assistant:' text."
            )
        loop = Loop(room, out, notes)
        if sys.stdin.isatty():
            loop.terminal()
        else:
            loop.pipe()


def _generation(
    max_new_tokens: int,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    repetition_penalty: float | None,
) -> dict[str, Any]:
    """Return the arguments of ``generate``; what wasn't asked for is left to the model."""
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    found: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    if repetition_penalty is not None:
        found["repetition_penalty"] = repetition_penalty
    if temperature == 0:
        if len(sampling) > 1:
            raise typer.BadParameter(
                "must not be 0 with --top-p or --top-k: those choose what to sample from",
                param_hint="--temperature",
            )
        return found | {"do_sample": False}
    return found | sampling | ({"do_sample": True} if sampling else {})


if __name__ == "__main__":
    app()
