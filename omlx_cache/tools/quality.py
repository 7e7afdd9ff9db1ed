"""What each setting of the cache costs in quality and saves in bytes, beside transformers' own.

    python -m omlx_cache.tools.quality configs/chat.yaml cache_bits=4

Every row is measured against the stock model with its unquantized cache, over the same text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from omlx_cache.tools.errors import EXIT_WORDS, WrongSettingError, exit_codes, setting_errors
from omlx_cache.tools.input_text import read_text, tokenize
from omlx_cache.tools.loading import checked_device, hushed, load_model, load_tokenizer
from omlx_cache.tools.output import write_text, write_whole
from omlx_cache.tools.plots import require_matplotlib
from omlx_cache.tools.progress import ConsoleProgress
from omlx_cache.tools.quality_contenders import contenders
from omlx_cache.tools.quality_plots import HEADER, cells, quality_page, save_plot
from omlx_cache.tools.quality_run import Results, measure_all
from omlx_cache.tools.quality_tasks import chat_task, text_task
from omlx_cache.tools.smollm2 import smollm2_checkpoint

LEAST_TOKENS = 256
MOST_SCORED = 2048
PLOT_SUFFIXES = (".svg", ".png", ".pdf")

EPILOG = f"""Examples

  python -m omlx_cache.tools.quality

  python -m omlx_cache.tools.quality cache_bits=4 "window_size=1024 sink_tokens=0"

  python -m omlx_cache.tools.quality configs/*.yaml --model ./llama-gptq --results out.json

  python -m omlx_cache.tools.quality --results out.json --report out.html --plot out.svg

With --results a run that was interrupted goes on where it stopped, and more settings can be added
later. {EXIT_WORDS}
"""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog=EPILOG)
def quality(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG]...",
            help="YAML files, or key=value pairs in one argument; default: a range of settings.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Local directory or hub id of a model; default: SmolLM2-135M-Instruct, float32."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            "--input", help="A UTF-8 text file, or - for standard input; default: Python's manual."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=LEAST_TOKENS, help="Tokens of the text.")] = 4096,
    scored: Annotated[
        int | None,
        typer.Option(min=2, help=f"Last tokens that count; default: half, at most {MOST_SCORED}."),
    ] = None,
    turns: Annotated[
        int,
        typer.Option(min=0, max=50, help="Messages of the chat that is recalled; 0 is no chat."),
    ] = 6,
    with_peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Also measure transformers' own caches.")
    ] = True,
    results_path: Annotated[
        Path | None,
        typer.Option("--results", metavar="FILE", help="Keep rows in this JSON file, and go on."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of the table.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Also write a page with plots; needs matplotlib."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the plot alone, as .svg, .png or .pdf."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1, cpu, ...; default: the GPU if there is one.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Default: what the checkpoint says."),
    ] = None,
) -> None:
    """Measure perplexity, KL divergence, top-1, needle retrieval and recall of cache settings."""
    console, errors = Console(), Console(stderr=True)
    with exit_codes(errors), hushed():
        _check_outputs({"--results": results_path, "--report": report, "--plot": plot})
        chosen = contenders(settings or [], with_peers)
        with setting_errors():
            where = checked_device(device)
        content, name = read_text(text)
        with ConsoleProgress(errors) as progress:
            path = model or smollm2_checkpoint(progress=progress)
            progress("loading the model")
            tokenizer = load_tokenizer(path)
            ids = tokenize(content, name, tokenizer, tokens, LEAST_TOKENS)
            count = min(len(ids) // 2, MOST_SCORED) if scored is None else scored
            if count >= len(ids):
                raise typer.BadParameter(
                    f"must be less than the text's {len(ids)} tokens, got {count}",
                    param_hint="--scored",
                )
            loaded = load_model(path, dtype, where)
            setup = {
                "model": Path(path).name,
                "dtype": str(loaded.dtype).removeprefix("torch."),
                "text": name,
                "tokens": len(ids),
                "scored": count,
                "turns": turns,
            }
            results = Results(setup, results_path)
            blank = tokenizer("\n\n", add_special_tokens=False)["input_ids"]
            with setting_errors():
                tasks = [text_task(ids, count, blank)]
                if turns:
                    size = len(ids) // 2 // turns
                    tasks.append(chat_task(tokenizer, turns, size))
                for contender in chosen:  # what can't be patched is refused now
                    if not contender.is_peer:
                        with contender.open(loaded):
                            pass
            measure_all(loaded, tasks, chosen, results, progress)
        names = ["unquantized", *(c.name for c in chosen)]
        if as_json:
            typer.echo(json.dumps(results.data, indent=1))
        else:
            console.print(_table(results.data, names))
        if report is not None:
            write_text(report, quality_page(results.data, names))
            errors.print(f"report written to {report}", highlight=False)
        if plot is not None:
            rows = {n: results.data["results"][n] for n in names}
            write_whole(plot, lambda scratch: save_plot(scratch, rows))
            errors.print(f"plot written to {plot}", highlight=False)


def _check_outputs(paths: dict[str, Path | None]) -> None:
    """Refuse files that can't be written or drawn now, not after minutes of reading."""
    for option, path in paths.items():
        if path is None:
            continue
        if not path.absolute().parent.is_dir() or path.is_dir():
            raise WrongSettingError(
                f"{option} must be a file in a directory that exists, got {path}"
            )
        if option != "--results":
            require_matplotlib(option)
        if option == "--plot" and path.suffix not in PLOT_SUFFIXES:
            raise WrongSettingError(f"--plot must end in {', '.join(PLOT_SUFFIXES)}, got {path}")


def _table(data: dict, names: list[str]) -> Table:
    setup = data["setup"]
    table = Table(
        title=f"{setup['model']}, {setup['dtype']}: {setup['tokens']:,} tokens of "
        f"{setup['text']}, the last {setup['scored']:,} scored",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    table.add_column(HEADER[0], overflow="fold", min_width=20)
    for name in HEADER[1:]:
        table.add_column(name, justify="right")
    for name in names:
        table.add_row(*cells(name, data["results"][name]))
    return table


if __name__ == "__main__":
    app()
