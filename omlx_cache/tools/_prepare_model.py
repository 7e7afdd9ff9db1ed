"""The child process that converts and quantizes the real model.

    python -m omlx_cache.tools._prepare_model JOB SOURCE TARGET [GROUP_SIZE]

A process of its own, because gptqmodel patches transformers, safetensors and Triton when it is
imported, starts threads, needs ``GPTQMODEL_CPU_WORKERS`` before that import, and prints without
end. Here its noise goes to standard error (the parent keeps it in a log file) and standard output
carries nothing but one JSON object a line for each sign of progress: ``{"step": "quantizing
layers", "done": 3, "total": 30}``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from omlx_cache.tools.child import ProgressLines

CALIBRATION_TEXTS = 32
CALIBRATION_TOKENS = 256
CALIBRATION_BATCH = 4


class _LayerProgress:
    """What gptqmodel calls when a layer is done; the method and its arguments are its interface."""

    def __init__(self, events: ProgressLines, num_layers: int) -> None:
        self._events = events
        self._num_layers = num_layers
        self._finished = 0

    def layer_complete(self, *, layer_idx: int, submodule_finalized: bool) -> None:
        """Count a layer once its packed weights are final, not already when its codes are known."""
        if submodule_finalized:
            self._finished += 1
            self._events("quantizing layers", self._finished, self._num_layers)


def convert(gguf: Path, target: Path, events: ProgressLines) -> None:
    """Write the GGUF file's model as a float32 checkpoint with tokenizer and chat template.

    A model loaded from a GGUF file refuses ``save_pretrained`` because its configuration still says
    "gguf"; a new model from the same configuration without that entry takes over the weights.
    """
    events("loading the GGUF file")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    events("writing the float checkpoint")
    fields = loaded.config.to_dict()
    fields.pop("quantization_config", None)
    plain = type(loaded)(type(loaded.config).from_dict(fields))
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = GenerationConfig.from_model_config(plain.config)
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


def quantize(source: Path, target: Path, group_size: int, events: ProgressLines) -> None:
    """Quantize a float checkpoint to GPTQ 4-bit, calibrated on that part of our texts."""
    events("starting gptqmodel")
    from gptqmodel import GPTQModel, QuantizeConfig
    from transformers import AutoTokenizer

    from omlx_cache.tools.texts import token_ids

    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = token_ids("calibration", tokenizer, CALIBRATION_TEXTS * CALIBRATION_TOKENS)
    calibration = [
        {
            "input_ids": ids[start : start + CALIBRATION_TOKENS],
            "attention_mask": [1] * CALIBRATION_TOKENS,
        }
        for start in range(0, len(ids), CALIBRATION_TOKENS)
    ]
    model = GPTQModel.load(
        str(source), QuantizeConfig(bits=4, group_size=group_size, offload_to_disk=False)
    )
    num_layers = model.model.config.num_hidden_layers
    events("quantizing layers", 0, num_layers)
    model.layer_callback = _LayerProgress(events, num_layers)
    model.quantize(calibration, batch_size=CALIBRATION_BATCH)
    events("writing the GPTQ checkpoint")
    model.save(str(target))


def main(arguments: list[str]) -> None:
    """Run the job that the arguments name."""
    job, source, target = arguments[0], Path(arguments[1]), Path(arguments[2])
    events = ProgressLines()
    if job == "convert":
        convert(source, target, events)
    elif job == "quantize":
        quantize(source, target, int(arguments[3]), events)
    else:
        raise ValueError(f"_prepare_model: job must be 'convert' or 'quantize', got {job!r}")


if __name__ == "__main__":
    main(sys.argv[1:])
