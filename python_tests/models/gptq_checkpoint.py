"""Write a tiny random Llama as a 4-bit GPTQ checkpoint, and give the float model it must equal.

The format is the one that auto-gptq writes and every GPTQ reader knows (v1). For a linear layer
`weight [out, in]`, input channel `i` in group `g_idx[i]` and code `q` in 0 … 15:

    weight[o, i] = scales[g_idx[i], o] * (q[o, i] - zero[g_idx[i], o])

    qweight  int32 [in / 8, out]      word r of a column: channels 8r … 8r+7, lowest bits first
    qzeros   int32 [groups, out / 8]  word c of a row: `zero - 1` of outputs 8c … 8c+7, likewise
    scales   fp16  [groups, out]
    g_idx    int32 [in]               i // group_size; with `desc_act` any assignment
    bias     fp16  [out]              auto-gptq writes one, of zeros, where the layer has none

Storing `zero - 1` is what tells v1 from `gptq_v2`. The codes come from plain rounding: a reader
unpacks good and bad codes alike.
"""

import copy
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BITS = 4
CODES_PER_WORD = 32 // BITS
GROUP_SIZE = 32
VOCAB_SIZE = 96
AUTO_GPTQ_BASENAME = f"gptq_model-{BITS}bit-{GROUP_SIZE}g"


def tiny_llama(*, tie_word_embeddings: bool = False) -> LlamaForCausalLM:
    """Build a random float32 Llama: 2 layers, 4 query and 2 KV heads of 32, peaked attention."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.15,  # the default .02 leaves attention uniform at this size
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=tie_word_embeddings,
    )
    return LlamaForCausalLM(config).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with a word per id ("w5" is 5); GPTQModel wants one in a checkpoint."""
    words = {"<pad>": 0, "<s>": 1} | {f"w{i}": i for i in range(2, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>")


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack int64 `codes [n, m]` in 0 … 15 into int32 `[n / 8, m]`, lowest bits first."""
    if codes.min() < 0 or codes.max() >= 2**BITS or codes.shape[0] % CODES_PER_WORD:
        raise ValueError(
            f"pack: codes must be 0 … {2**BITS - 1}, rows a multiple of {CODES_PER_WORD}, got "
            f"{int(codes.min())} … {int(codes.max())} and {codes.shape[0]} rows"
        )
    shifts = torch.arange(0, 32, BITS).view(1, CODES_PER_WORD, 1)
    words = (codes.view(-1, CODES_PER_WORD, codes.shape[1]) << shifts).sum(dim=1)
    return (words - (words >> 31 << 32)).to(torch.int32)  # the same 32 bits, as a signed number


def quantize_linear(
    weight: torch.Tensor, g_idx: torch.Tensor, *, sym: bool
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Round a weight to 4 bits.

    Args:
        weight: float32 [out, in].
        g_idx: int64 [in], the group of each input channel.
        sym: zero point 8 everywhere; otherwise one in 1 … 15 per group and output.

    Returns:
        The tensors of the format, and the float32 [out, in] weight that they stand for
        (exactly: an fp16 scale times a 5-bit integer fits into float32).
    """
    columns = weight.T  # [in, out], as the format has it
    index = g_idx[:, None].expand_as(columns)
    nothing = torch.zeros(int(g_idx.max()) + 1, columns.shape[1])
    low = nothing.scatter_reduce(0, index, columns, "amin")
    high = nothing.scatter_reduce(0, index, columns, "amax")
    if sym:
        scales = (torch.maximum(-low, high) / 7.5).half()
        zeros = torch.full(scales.shape, 8)
    else:
        scales = ((high - low) / 15).half()
        zeros = torch.round(-low / scales.float()).long().clamp(1, 15)
    per_channel_scales, per_channel_zeros = scales.float()[g_idx], zeros[g_idx]
    codes = (torch.round(columns / per_channel_scales).long() + per_channel_zeros).clamp(0, 15)
    tensors = {
        "qweight": pack(codes),
        "qzeros": pack((zeros - 1).T).T.contiguous(),
        "scales": scales,
        "g_idx": g_idx.to(torch.int32),
        "bias": torch.zeros(weight.shape[0], dtype=torch.float16),
    }
    return tensors, (per_channel_scales * (codes - per_channel_zeros)).T.contiguous()


def write_auto_gptq_checkpoint(
    directory: Path,
    *,
    desc_act: bool = False,
    sym: bool = True,
    tie_word_embeddings: bool = False,
) -> LlamaForCausalLM:
    """Write what auto-gptq's `save_quantized` would, and return the checkpoint's float32 twin.

    Args:
        directory: an existing folder; gets config.json, quantize_config.json, the tokenizer and
            gptq_model-4bit-32g.safetensors.
        desc_act: scatter the input channels over the groups, as the activation order does.
        sym: see `quantize_linear`.
        tie_word_embeddings: the head is the embedding (and, as auto-gptq has it, is stored twice).

    Returns:
        A model of ordinary linear layers with the dequantized weights: whoever reads the
        checkpoint right gets its logits.
    """
    twin = tiny_llama(tie_word_embeddings=tie_word_embeddings)
    for parameter in twin.parameters():  # the file is fp16, so the twin holds fp16 values
        parameter.data = parameter.data.half().float()
    state = {name: tensor.half().clone() for name, tensor in twin.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    for name, module in twin.model.layers.named_modules(prefix="model.layers"):
        if not isinstance(module, torch.nn.Linear):
            continue
        g_idx = torch.arange(module.in_features) // GROUP_SIZE
        if desc_act:
            g_idx = g_idx[torch.randperm(module.in_features, generator=generator)]
        tensors, module.weight.data = quantize_linear(module.weight.detach(), g_idx, sym=sym)
        del state[f"{name}.weight"]
        state |= {f"{name}.{part}": tensor for part, tensor in tensors.items()}

    settings = {
        "bits": BITS,
        "group_size": GROUP_SIZE,
        "damp_percent": 0.01,
        "desc_act": desc_act,
        "static_groups": False,
        "sym": sym,
        "true_sequential": True,
        "model_name_or_path": None,
        "model_file_base_name": None,
        "is_marlin_format": False,
        "quant_method": "gptq",
    }
    twin.config.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"dtype": "float16", "quantization_config": settings}
    _write_json(directory / "config.json", config)
    _write_json(directory / "quantize_config.json", settings)
    tiny_tokenizer().save_pretrained(directory)
    save_file(state, directory / f"{AUTO_GPTQ_BASENAME}.safetensors", metadata={"format": "pt"})
    return twin


def as_transformers_checkpoint(source: Path, destination: Path) -> None:
    """Turn auto-gptq's checkpoint into one that transformers and GPTQModel load.

    This is what the user of an old checkpoint does. The weights keep their bytes and get the
    standard name; `is_marlin_format` goes, for GPTQModel refuses the key whatever its value.

    Args:
        source: a folder that `write_auto_gptq_checkpoint` wrote.
        destination: another, existing folder.
    """
    settings = json.loads((source / "quantize_config.json").read_text())
    del settings["is_marlin_format"]
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = settings
    _write_json(destination / "config.json", config)
    _write_json(destination / "quantize_config.json", settings)
    for tokenizer_file in source.glob("tokenizer*.json"):
        shutil.copy(tokenizer_file, destination)
    shutil.copy(source / f"{AUTO_GPTQ_BASENAME}.safetensors", destination / "model.safetensors")


def relative_error(logits: torch.Tensor, twin: LlamaForCausalLM, ids: torch.Tensor) -> float:
    """Return |logits - exact| / |exact|, where `exact` is what the twin computes in float64."""
    with torch.no_grad():
        exact = copy.deepcopy(twin).double()(ids).logits
    return ((logits.double() - exact).norm() / exact.norm()).item()


def allowed_error(twin: LlamaForCausalLM, ids: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the tolerance for a reader that computes in `dtype`.

    The reader holds the same weights and may only round and add up in another order, so it gets
    twice the error that ordinary linear layers make in that dtype on the same input.
    """
    peer = copy.deepcopy(twin)
    for parameter in peer.parameters():  # not the buffers: models keep RoPE's in float32
        parameter.data = parameter.data.to(dtype)
    with torch.no_grad():
        return 2 * relative_error(peer(ids).logits, twin, ids)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2))
