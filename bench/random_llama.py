"""A Llama of LLaMA-2-7B's shape with random weights: 4-bit GPTQ linears where they can be had.

Speed doesn't depend on what the weights say, so none are downloaded. The 4-bit weights are random
words in the format of a GPTQ checkpoint (``python_tests/models/gptq_checkpoint.py`` explains it),
read by transformers and gptqmodel as such a checkpoint would be, so the kernel is the one that
gptqmodel picks for the device. Everything is made on the device.
"""

from __future__ import annotations

import gc
from importlib.util import find_spec

import torch
from measuring import version
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

GROUP_SIZE = 128
SPREAD = 4.6
"""Standard deviation of random codes 0 ... 15."""


def config_of(*, tiny: bool, max_tokens: int) -> LlamaConfig:
    """Return LLaMA-2-7B's configuration, for texts of ``max_tokens`` (it was trained for 4096)."""
    shape = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "initializer_range": 0.02,
    }
    if tiny:
        shape = {
            "vocab_size": 128,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "initializer_range": 0.15,  # 0.02 would leave attention without a say at this size
        }
    return LlamaConfig(**shape, max_position_embeddings=max_tokens, eos_token_id=None)


def float_llama(config: LlamaConfig, device: torch.device) -> LlamaForCausalLM:
    """Return the model in bfloat16."""
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    return model.eval()


def gptq_llama(config: LlamaConfig, device: torch.device) -> LlamaForCausalLM:
    """Return the model with 4-bit linears, everything else in bfloat16.

    Raises:
        ImportError: where gptqmodel or optimum is missing.
    """
    for name in ("gptqmodel", "optimum"):
        if find_spec(name) is None:
            raise ImportError(f"{name} isn't installed")
    with torch.device("meta"):
        shapes = LlamaForCausalLM(config)
    state = {}
    for name, module in shapes.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            size = module.in_features, module.out_features
            parts = _random_linear(*size, config.initializer_range, device)
            state |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
    for name, parameter in shapes.named_parameters():
        if name.removesuffix(".weight") + ".qweight" not in state:
            tensor = torch.ones(parameter.shape, dtype=torch.bfloat16, device=device)
            state[name] = (
                tensor if "norm" in name else tensor.normal_(0.0, config.initializer_range)
            )
    quantized = LlamaConfig.from_dict(config.to_dict())
    quantized.quantization_config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP_SIZE,
        "desc_act": False,
        "sym": True,
    }
    model = LlamaForCausalLM.from_pretrained(
        None, config=quantized, state_dict=state, dtype=torch.bfloat16, device_map={"": str(device)}
    )
    return model.eval()


def _random_linear(
    inputs: int, outputs: int, std: float, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the tensors of a 4-bit linear layer with weights of this standard deviation."""
    groups = inputs // GROUP_SIZE
    words = {"dtype": torch.int32, "device": device}
    return {
        "qweight": torch.randint(-(2**31), 2**31, (inputs // 8, outputs), **words),
        "qzeros": torch.full((groups, outputs // 8), 0x77777777, **words),  # 7 stands for 8
        "scales": torch.full((groups, outputs), std / SPREAD, dtype=torch.float16, device=device),
        "g_idx": torch.arange(inputs, **words) // GROUP_SIZE,
    }


def random_llama(config: LlamaConfig, device: torch.device) -> tuple[PreTrainedModel, str, str]:
    """Return the model, its kind of weights, and why it is that kind."""
    try:
        model = gptq_llama(config, device)
        with torch.no_grad():
            model(torch.zeros(1, 2, dtype=torch.int64, device=device))
    except Exception as error:  # gptqmodel compiles kernels where it first runs
        model, reason = None, f"no GPTQ linears: {type(error).__name__}: {error}"[:300]
    else:
        linear = type(model.model.layers[0].self_attn.q_proj).__name__
        return model, "GPTQ 4-bit", f"gptqmodel {version('gptqmodel')}, {linear}"
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return float_llama(config, device), "bfloat16", reason
