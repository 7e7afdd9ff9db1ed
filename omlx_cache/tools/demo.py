"""The demo: the same long chat with the stock cache and with omlx_cache, side by side.

    python -m omlx_cache.tools.demo

Without ``--model`` it takes SmolLM2-135M-Instruct from its PyPI package and quantizes it to GPTQ
4-bit once.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from omlx_cache.tools.prepared import PreparationError

EXIT_FAILED, EXIT_USAGE, EXIT_MODEL, EXIT_PREPARATION, EXIT_INTERRUPTED = 1, 2, 3, 4, 130

EPILOG = """Examples

  python -m omlx_cache.tools.demo

  python -m omlx_cache.tools.demo --window 1024 --turns 10

  python -m omlx_cache.tools.demo --model ./my-llama-gptq --config configs/chat.yaml --json
  demo.json

Exit codes: 0 done, 1 a run failed, 2 wrong options or configuration, 3 the model can't be loaded or
served, 4 the default model can't be prepared, 130 interrupted.
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
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="YAML configuration of the cache."),
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
        typer.Option(
            "--json", dir_okay=False, metavar="FILE", help="Write all numbers there as JSON."
        ),
    ] = None,
) -> None:
    """Hold a long chat twice, stock and patched, and compare speed, memory and text."""
    console, errors = Console(), Console(stderr=True)
    if json_out is not None and not json_out.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {json_out.parent}", param_hint="--json")
    try:
        report = _run(
            console,
            model,
            config,
            window,
            turns,
            message_tokens,
            answer_tokens,
            device,
            dtype,
            threads,
        )
    except KeyboardInterrupt:
        errors.print("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        _show_error(errors, error)
        raise typer.Exit(code) from None
    _show_report(console, report)
    if json_out is not None:
        json_out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        console.print(f"numbers written to {json_out}", highlight=False)


def _run(
    console: Console,
    model,
    config,
    window,
    turns,
    message_tokens,
    answer_tokens,
    device,
    dtype,
    threads,
) -> dict:
    with console.status("starting"):
        from transformers.utils import logging as transformers_logging

        from omlx_cache.tools.demo_session import Settings, run_demo

        transformers_logging.set_verbosity_error()
        logging.captureWarnings(True)
    settings = Settings(
        model, config, window, turns, message_tokens, answer_tokens, device, dtype, threads
    )
    return run_demo(settings, console)


def _exit_code(error: Exception) -> int | None:
    """Return the exit code of an error that is the user's to mend; None for a fault of ours."""
    import omlx_cache
    from omlx_cache.tools.loading import ModelLoadError

    if isinstance(error, PreparationError):
        return EXIT_PREPARATION
    if isinstance(error, ModelLoadError | NotImplementedError):
        return EXIT_MODEL
    if isinstance(error, omlx_cache.OutOfBlocksError):
        return EXIT_FAILED
    if isinstance(error, ValueError):
        return EXIT_USAGE
    return None


def _show_error(errors: Console, error: Exception) -> None:
    errors.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
    for note in getattr(error, "__notes__", ()):
        errors.print(note, markup=False, highlight=False, soft_wrap=True)


def _show_report(console: Console, report: dict) -> None:
    from omlx_cache.tools.demo_report import summary_table, turn_table
    from omlx_cache.tools.demo_words import explain

    console.rule("result")
    console.print(turn_table(report))
    console.print(summary_table(report))
    for line in explain(report):
        console.print(f"- {line}", highlight=False)


if __name__ == "__main__":
    app()
