"""The README's blocks, from the files in ``bench/results/``; each is a function of their data."""

from __future__ import annotations

import textwrap

MIB = 2**20
WIDTH = 120

GENERATE = {
    "stock": "transformers, `DynamicCache`",
    "stock fp8": "transformers, `QuantizedCache` (fp8)",
    "stock hqq": "transformers, `QuantizedCache` (hqq, 8 bits)",
    "8-bit": "**omlx_cache, 8-bit** (default)",
    "window 1024": "**omlx_cache, `window_size=1024`**",
}
QUALITY = {
    "8 bits (default)": "`cache_bits: 8` (default)",
    "K 8, V 4 bits": "`cache_bits: {k: 8, v: 4}`",
    "1024 tokens K 8, V 4; then 4 bits": "`tiers: {k8v4: 1024, k4v4: null}`",
    "4 bits": "`cache_bits: 4`",
    "8 bits, window 1024": "8 bits, `window_size: 1024`",
    "8 bits, window 1024, no sinks": "the same, `sink_tokens: 0`",
}


def generate_block(data: dict) -> str:
    """Return the table of tokens per second, and what the first token takes."""
    results = data["results"]
    lengths = list(results)
    last = results[lengths[-1]]
    head = [f"tokens/s after | {' | '.join(lengths)} tokens", f"cache at {lengths[-1]}"]
    lines = [f"| {' | '.join(head)} |", "|---" * (len(lengths) + 2) + "|"]
    for key, label in _measured(last).items():
        cells = [f"{results[n][key]['tokens_per_s']:.1f}" for n in lengths]
        size = f"{last[key]['cache_bytes'] / MIB:.1f} MiB"
        if not key.startswith("stock"):
            ratio = last[key]["tokens_per_s"] / last["stock"]["tokens_per_s"]
            cells[-1], size = f"**{cells[-1]}** ({ratio:.2f}x)", f"**{size}**"
        lines.append(f"| {label} | {' | '.join(cells)} | {size} |")
    first = {key: f"{found['first_token_s']:.1f}" for key, found in last.items()}
    text = (
        f"The first token of a prompt of {lengths[-1]} tokens comes after {first['8-bit']} s, with "
        f"the window after {first['window 1024']}, with the stock model after {first['stock']}. "
        f"Each chunk of a prompt reads the history back from 8 bits; later turns compute only "
        f"their new tokens."
    )
    return "\n".join([*lines, "", *textwrap.wrap(text, WIDTH)])


def _measured(found: dict) -> dict[str, str]:
    """Return the contenders of which there are figures, and their names."""
    return {key: label for key, label in GENERATE.items() if key in found}


def attention_block(data: dict) -> str:
    """Return the sentence on the attention kernel alone."""
    found = data["decode_8192_ms"][f"{data['machine']['threads']} threads"]
    wide, small = found["32/32/128"], found["9/3/64"]

    def times(shape: dict, name: str) -> str:
        return f"{shape['sdpa-bf16'] / shape[name]:.1f}x"

    text = (
        "The attention kernel alone, one query on 8192 tokens, against PyTorch's SDPA in bfloat16 "
        "on a contiguous cache, two threads of the Xeon (`bench/bench_paged_attention.py`): "
        f"8-bit {times(wide, '8-bit')} for 32 heads of 128 channels "
        f"({wide['read'] / wide['8-bit']:.0%} of the speed of merely reading the bytes) "
        f"and {times(small, '8-bit')} for 9 query and 3 key heads of 64; mixed 8- and 4-bit tiers "
        f"{times(wide, 'mixed')} and {times(small, 'mixed')}."
    ).replace("% of", " % of")
    return "\n".join(textwrap.wrap(text, WIDTH))


def extend_block(data: dict) -> str:
    """Return the sentence on a chunk of a prompt."""
    ratios = {
        name: " / ".join(f"{shape[name]['ratio']:.1f}x" for shape in data["extend"].values())
        for name in ("8-bit", "mixed")
    }
    text = (
        f"512 queries of a prompt on 7,680 tokens of history, against the same on an unquantized "
        f"contiguous cache (`bench/bench_extend.py`; heads {', '.join(data['extend'])}): 8-bit "
        f"{ratios['8-bit']}, mixed {ratios['mixed']}."
    )
    return "\n".join(textwrap.wrap(text, WIDTH))


def quality_block(data: dict) -> str:
    """Return the table of what each setting saves and costs."""
    lines = [
        "| setting | saved | KL divergence | same top token | perplexity |",
        "|---|---|---|---|---|",
    ]
    for key, label in QUALITY.items():
        row = data["results"][key]
        lines.append(
            f"| {label} | {row['saved']:.1%} | {row['kld']:.6f} | {row['top1']:.2%} | "
            f"{row['perplexity_ratio']:+.2%} |"
        )
    return "\n".join(lines)


def paint_generate(axes, data: dict) -> None:
    """Draw tokens per second over the length of the text, a line for each contender."""
    results = data["results"]
    lengths = [int(n) for n in results]
    colors = {"8-bit": "#175cd3", "window 1024": "#039855", "stock": "#344054"}
    colors |= {"stock hqq": "#dc6803"}
    for key, label in _measured(results[str(lengths[0])]).items():
        speeds = [results[str(n)][key]["tokens_per_s"] for n in lengths]
        words = label.replace("*", "").replace("`", "")
        axes.plot(lengths, speeds, "o-", label=words, color=colors.get(key, "#98a2b3"))
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in the cache")
    axes.set_ylabel("tokens per second")
    axes.legend()
