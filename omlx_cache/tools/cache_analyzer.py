"""The cache analyzer: what a configuration does to one model on one text, and what to change.

python -m omlx_cache.tools.cache_analyzer --model M --input sample.txt
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console

import omlx_cache
from omlx_cache.tools.analysis import Plan, analyze
from omlx_cache.tools.analyzer_text import show
from omlx_cache.tools.errors import EXIT_WORDS, config_errors, exit_codes, setting_errors
from omlx_cache.tools.input_text import read_text, tokenize
from omlx_cache.tools.loading import checked_device, hushed, load_model, load_tokenizer
from omlx_cache.tools.progress import ConsoleProgress
from omlx_cache.tools.smollm2 import smollm2_gptq_checkpoint

LEAST_TOKENS = 64

EPILOG = f"""Examples

  python -m omlx_cache.tools.cache_analyzer --model ./llama-gptq --input sample.txt

  python -m omlx_cache.tools.cache_analyzer --input - --config configs/chat.yaml < sample.txt

  python -m omlx_cache.tools.cache_analyzer --tokens 8192 --report out.html --json > out.json

{EXIT_WORDS}
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog=EPILOG)
def cache_analyzer(
    model: Annotated[
        str | None,
        typer.Option(
            help="Local directory or hub id of a model; default: SmolLM2-135M-Instruct, GPTQ 4-bit."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            "--input", help="A UTF-8 text file, or - for standard input; default: Python's manual."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML configuration of the cache; default: the defaults.")
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=LEAST_TOKENS, help="Read at most so many tokens of the text.")
    ] = 4096,
    decode: Annotated[
        int,
        typer.Option(
            min=1, help="Tokens at the end, read one by one, whose attention is observed."
        ),
    ] = 32,
    sparsity: Annotated[
        float,
        typer.Option(
            min=0.001, max=0.5, help="Share of the attention that sparsity may leave out."
        ),
    ] = 0.05,
    max_kl: Annotated[
        float, typer.Option(min=0.0, help="Largest KL divergence to recommend, in nats.")
    ] = 0.01,
    try_changes: Annotated[
        bool,
        typer.Option("--try/--no-try", help="Read the text again with each change that may pay."),
    ] = True,
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1, cpu, ...; default: the GPU if there is one.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Default: what the checkpoint says."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print every number as JSON instead of the report.")
    ] = False,
    page: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="FILE.html", help="Also write a page with plots; needs matplotlib."
        ),
    ] = None,
) -> None:
    """Run a text through a patched model and report on its KV cache, and what to change."""
    console, errors = Console(), Console(stderr=True)
    with exit_codes(errors), hushed():
        with config_errors():
            settings = omlx_cache.CacheConfig.resolve(config)
            where = checked_device(device)
        if page is not None:
            _check_page(page)
        content, name = read_text(text)
        with ConsoleProgress(errors) as progress:
            path = model or smollm2_gptq_checkpoint(progress=progress)
            progress("loading the model")
            loaded, tokenizer = load_model(path, dtype, where), load_tokenizer(path)
            ids = tokenize(content, name, tokenizer, tokens, LEAST_TOKENS)
            if decode >= len(ids) // 2:
                raise typer.BadParameter(
                    f"must be less than half of the text's {len(ids)} tokens, got {decode}",
                    param_hint="--decode",
                )
            plan = Plan(settings, decode, min(512, len(ids) // 2), sparsity, max_kl, try_changes)
            with setting_errors(), omlx_cache.patched(loaded, settings):
                pass  # what can't be patched is refused now
            data = analyze(loaded, torch.tensor([ids], device=where), plan, progress)
        data["names"] = {
            "model": Path(path).name,
            "text": name,
            "config": str(config or "defaults"),
        }
        if as_json:
            typer.echo(json.dumps(data, indent=1))
        else:
            show(console, data)
        if page is not None:
            from omlx_cache.tools.analyzer_page import write_page

            write_page(page, data)
            errors.print(f"report written to {page}", highlight=False)


def _check_page(page: Path) -> None:
    """Refuse a page that can't be drawn or written now, not after minutes of reading."""
    from omlx_cache.tools.plots import require_matplotlib

    require_matplotlib("--report")
    if not page.absolute().parent.is_dir() or page.is_dir():
        raise typer.BadParameter(
            f"must be a file in a directory that exists, got {page}", param_hint="--report"
        )


if __name__ == "__main__":
    app()
