"""Import auto-gptq under transformers 5, so that models loaded by it can be patched.

auto-gptq ended at 0.7.1 (March 2024; its authors point to GPTQModel). `import auto_gptq` fails
since transformers and peft moved four names that it imports; nothing else stands in the way of
`from_quantized` and generation. So `enable` imports auto_gptq while those names stand where it
looks for them, and takes them away again:

* Only for the time of the import, because auto-gptq binds the names then and never looks them up
  again. transformers and peft are left as they were, and no other library finds names there that
  their version doesn't have.
* Each name is the very object under its new name, not an imitation. A name that is there is left
  alone.
* `import omlx_cache` doesn't import this module; `omlx_cache.patch` needs neither it nor auto-gptq.

What it doesn't change, since these are auto-gptq's own ways:

* `from_quantized` replaces `torch.nn.init.normal_`, `uniform_` and `kaiming_uniform_` by nothing
  for the rest of the process: what bare torch builds afterwards has arbitrary memory for weights.
* A file without `lm_head.weight`, of a model that ties it to the embedding, loads wrongly
  (auto-gptq itself writes both).
* Its CUDA kernels were built for torch 2.2. Without them it dequantizes all weights in each step.
* `wrapper.generate` runs under autocast (bf16 on a CPU); `unwrap(wrapper).generate` doesn't.

The same checkpoints load without this module, and run faster, through transformers: rename the
weights to `model.safetensors`, put what `quantize_config.json` says into `config.json` as
`quantization_config`, install `omlx_cache[gptq]`.
"""

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# (module that auto-gptq imports from, name) -> (module that has it now, its name there)
_MOVED = {
    ("transformers.modeling_utils", "no_init_weights"): (
        "transformers.initialization",
        "no_init_weights",
    ),
    ("transformers.utils.hub", "create_commit"): ("huggingface_hub", "create_commit"),
    ("transformers.utils.hub", "create_repo"): ("huggingface_hub", "create_repo"),
    ("peft.peft_model", "PEFT_TYPE_TO_MODEL_MAPPING"): (
        "peft.mapping",
        "PEFT_TYPE_TO_TUNER_MAPPING",
    ),
}


def enable() -> None:
    """Import auto_gptq, whatever transformers 5 moved; call it before `from auto_gptq import …`.

    Calling it again, or where auto_gptq could be imported anyway, changes nothing.

    Raises:
        ImportError: auto-gptq isn't installed, or can't be imported beside these versions even so.

    Mutates:
        `sys.modules`, as any import does; transformers and peft are as before when it returns.

    Example:
        >>> from omlx_cache import auto_gptq_compat
        >>> auto_gptq_compat.enable()  # doctest: +SKIP
        >>> from auto_gptq import AutoGPTQForCausalLM  # doctest: +SKIP
        >>> model = AutoGPTQForCausalLM.from_quantized("…-GPTQ", device="cuda:0")  # doctest: +SKIP
        >>> omlx_cache.patch(model)  # doctest: +SKIP
    """
    if "auto_gptq" in sys.modules:
        return
    if importlib.util.find_spec("auto_gptq") is None:
        raise ImportError(
            "auto_gptq_compat.enable: auto-gptq must be installed, and isn't; "
            "pip install omlx_cache[auto-gptq] (where it has no wheel, as for Python 3.12 and "
            "newer, with BUILD_CUDA_EXT=0 in the environment)"
        )
    try:
        with _moved_names_put_back():
            importlib.import_module("auto_gptq")
    except ImportError as error:
        found = ", ".join(_version(name) for name in ("auto-gptq", "transformers", "peft"))
        raise ImportError(
            "auto_gptq_compat.enable: auto-gptq 0.7.1 must import once the names that transformers "
            f"5 moved are put back, got '{error}' with {found}; pip install omlx_cache[auto-gptq], "
            "or load the checkpoint through transformers and omlx_cache[gptq], as the docstring of "
            "omlx_cache.auto_gptq_compat says"
        ) from error


@contextmanager
def _moved_names_put_back() -> Iterator[None]:
    """Let each absent name of `_MOVED` stand in its old module inside the `with`."""
    added = []
    try:
        for (old_module, old_name), (new_module, new_name) in _MOVED.items():
            module = importlib.import_module(old_module)
            if hasattr(module, old_name):
                continue
            new_home = importlib.import_module(new_module)
            if not hasattr(new_home, new_name):
                raise ImportError(f"neither {old_module}.{old_name} nor {new_module}.{new_name}")
            setattr(module, old_name, getattr(new_home, new_name))
            added.append((module, old_name))
        yield
    finally:
        for module, name in added:
            delattr(module, name)


def _version(distribution: str) -> str:
    try:
        return f"{distribution} {importlib.metadata.version(distribution)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {distribution}"
