"""The demo: the same long chat with the stock cache and with omlx_cache, side by side.

    python -m omlx_cache.tools.demo

Without ``--model`` it takes SmolLM2-135M-Instruct from its PyPI package and quantizes it to GPTQ
4-bit once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from omlx_cache.tools.demo_report import summary_table, turn_table
from omlx_cache.tools.demo_session import Settings, run_demo
from omlx_cache.tools.demo_words import explain
from omlx_cache.tools.errors import EXIT_WORDS, exit_codes
from omlx_cache.tools.loading import hushed
from omlx_cache.tools.output import write_text

EPILOG = f"""Examples

  python -m omlx_cache.tools.demo

  python -m omlx_cache.tools.demo --window 1024 --turns 10

  python -m omlx_cache.tools.demo --model ./llama-gptq --config chat.yaml --json out.json

{EXIT_WORDS}
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog=EPILOG)
def demo(
    model: Annotated[
        str | None,
        typer.Option(
            help="Local directory or hub id of a model; default: SmolLM2-135M-Instruct, GPTQ 4-bit."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML configuration of the cache; default: the defaults.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Sliding window of the patched run, in tokens.")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="Turns of the chat.")] = 6,
    message_tokens: Annotated[
        int, typer.Option(min=8, help="Text in each user message, in tokens.")
    ] = 512,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 32,
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1, cpu, ...; default: the GPU if there is one.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Default: what the checkpoint says."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="PyTorch's CPU threads.")] = None,
    json_out: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all numbers there as JSON."),
    ] = None,
) -> None:
    """Hold a long chat twice, stock and patched, and compare speed, memory and text."""
    console, errors = Console(), Console(stderr=True)
    if json_out is not None and (json_out.is_dir() or not json_out.absolute().parent.is_dir()):
        raise typer.BadParameter(
            f"must be a file in a directory that exists, got {json_out}", param_hint="--json"
        )
    settings = Settings(
        model=model,
        config=config,
        window=window,
        turns=turns,
        message_tokens=message_tokens,
        answer_tokens=answer_tokens,
        device=device,
        dtype=dtype,
        threads=threads,
    )
    with exit_codes(errors), hushed():
        report = run_demo(settings, console)
        _show_report(console, report)
        if json_out is not None:
            write_text(json_out, json.dumps(report, indent=2) + "\n")
            console.print(f"numbers written to {json_out}", highlight=False)


def _show_report(console: Console, report: dict) -> None:
    console.rule("result")
    console.print(turn_table(report))
    console.print(summary_table(report))
    for line in explain(report):
        console.print(f"- {line}", highlight=False)


if __name__ == "__main__":
    app()
