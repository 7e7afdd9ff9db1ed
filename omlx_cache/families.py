"""The families that the tests compare with the stock model.

Whether a model is served is decided by what it does (`omlx_cache.inspection`), not by this list: a
family that isn't in it is served with a warning. `python_tests/models/test_every_family.py` keeps
the list equal to what is served of everything that transformers has.
"""

# fmt: off
TESTED_FAMILIES = frozenset((
    "afmoe", "apertus", "apertus1p5_text", "arcee", "aria_text", "beam", "biogpt", "bitnet",
    "codegen", "cohere", "cohere2", "cohere2_moe", "ctrl", "cwm", "dots1", "emu3_text_model",
    "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "flint", "gemma",
    "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox",
    "gpt_oss", "gptj", "granite", "granite_swa", "granitemoe", "granitemoe_swa",
    "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3",
    "hyperclovax", "jais2", "kolibri1", "laguna", "llama", "mellum", "mimo_v2_flash",
    "minimax_m2", "ministral", "ministral3", "mistral", "mixtral",
    "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3",
    "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open",
    "stablelm", "starcoder2", "vaultgemma",
))
"""``config.model_type`` of the text models."""
# fmt: on
