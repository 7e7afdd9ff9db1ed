"""Other caches beside this one: same model, same text; KL divergence, bytes, tokens per second.

    python bench/peers.py                       # everything that is missing in the results file
    python bench/peers.py --list                # who is compared, and whether it is installed

A contender that isn't installed or doesn't run is a row with the reason.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import sys
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer
from peers_contenders import Contender, Source, contenders
from peers_measures import MEASURES, QUALITY_DTYPE, USE_DTYPE, Plan
from peers_run import Child, Results, measure_all
from render_peers import peers_table
from rich.console import Console

from omlx_cache.tools.errors import EXIT_WORDS, WrongSettingError, exit_codes
from omlx_cache.tools.loading import hushed, load_tokenizer
from omlx_cache.tools.prepared import PreparationError
from omlx_cache.tools.progress import ConsoleProgress
from omlx_cache.tools.smollm2 import find_gguf, smollm2_checkpoint
from omlx_cache.tools.texts import token_ids

RESULTS = Path(__file__).parent / "results" / "peers.json"
TEXT = "Python's language reference"

EPILOG = f"""Examples

  python bench/peers.py --measure quality --measure memory

  python bench/peers.py "omlx_cache*" "llama.cpp*" --measure speed --length 512 --length 8192

  python bench/peers.py "kvpress*" --python .venv-kvpress/bin/python

  python bench/render.py

A run that was interrupted goes on where it stopped; what failed is tried again. kvpress 0.5.5
wants transformers < 5.3 and so an environment of its own, in which --python runs it. Timings are
ratios to the stock model in the same process; run them on a machine that does nothing else.
{EXIT_WORDS}
"""

Measure = StrEnum("Measure", list(MEASURES))

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog=EPILOG)
def peers(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Contenders, as patterns; default: all of them."),
    ] = None,
    measures: Annotated[
        list[Measure] | None,
        typer.Option("--measure", help="What to measure, repeatable; default: everything."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Local directory or hub id; default: SmolLM2-135M-Instruct, float32."),
    ] = None,
    gguf: Annotated[
        Path | None,
        typer.Option(help="The same model for llama.cpp; default: SmolLM2's, 4-bit weights."),
    ] = None,
    context: Annotated[int, typer.Option(min=64, help="Tokens read for quality.")] = 2048,
    scored: Annotated[int, typer.Option(min=2, help="Tokens after them that count.")] = 256,
    memory: Annotated[int, typer.Option(min=64, help="Tokens read for memory.")] = 8192,
    lengths: Annotated[
        list[int] | None,
        typer.Option("--length", help="Tokens read for speed, repeatable [512, 2048, 8192]."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds of decoding, for each length.")
    ] = 3.0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Default: PyTorch's own number.")
    ] = None,
    python: Annotated[
        str, typer.Option(metavar="PATH", help="The interpreter that measures.")
    ] = sys.executable,
    path: Annotated[
        Path, typer.Option("--results", metavar="FILE", help="The results file.")
    ] = RESULTS,
    only_list: Annotated[
        bool, typer.Option("--list", help="List the contenders and measure nothing.")
    ] = False,
) -> None:
    """Measure other caches and this one, on the same model and the same text."""
    console, errors = Console(), Console(stderr=True)
    with exit_codes(errors), hushed():
        chosen = _chosen(names or ["*"])
        if only_list:
            for contender in chosen:
                console.print(f"{contender.name}{_needs(contender)}", highlight=False)
            return
        if not path.absolute().parent.is_dir():
            raise WrongSettingError(f"--results must be in a directory that exists, got {path}")
        wanted = tuple(sorted(set(lengths or Plan(()).lengths)))
        with ConsoleProgress(errors) as progress:
            checkpoint = model or str(smollm2_checkpoint(progress=progress))
            source = Source(checkpoint, gguf or (_default_gguf() if model is None else None))
            most = max(context + scored, memory, *wanted)
            try:
                ids = token_ids("quality", load_tokenizer(checkpoint), most)
            except ValueError as error:
                raise WrongSettingError(str(error)) from error
            setup = {
                "model": Path(checkpoint).name,
                "text": TEXT,
                "context": context,
                "scored": scored,
                "memory": memory,
                "quality_dtype": str(QUALITY_DTYPE).removeprefix("torch."),
                "use_dtype": str(USE_DTYPE).removeprefix("torch."),
            }
            results = Results(setup, path)
            plan = Plan(ids, context, scored, memory, wanted, seconds)
            asked = [str(m) for m in measures or Measure]
            with TemporaryDirectory() as scratch:
                child = Child(source, threads or torch.get_num_threads(), Path(scratch), python)
                measure_all(chosen, asked, plan, child, results, progress)
        typer.echo(peers_table(results.data))


def _chosen(patterns: list[str]) -> list[Contender]:
    known = contenders()
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(c.name, pattern) for c in known):
            raise WrongSettingError(
                f"there is no contender {pattern!r}; --list shows them, and * stands for anything"
            )
    return [c for c in known if any(fnmatch.fnmatchcase(c.name, p) for p in patterns)]


def _needs(contender: Contender) -> str:
    """Return the packages that a contender needs, in words, and whether they are here."""
    words = []
    for name in contender.needs:
        try:
            words.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            words.append(f"{name}, not installed")
    return f" ({'; '.join(words)})" if words else ""


def _default_gguf() -> Path | None:
    try:
        return find_gguf()
    except PreparationError:
        return None


if __name__ == "__main__":
    app(prog_name="bench/peers.py")
