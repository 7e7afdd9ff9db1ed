"""`unwrap` and `gptq_bits` on real models, on PEFT, and on stand-ins for what isn't installed."""

import pytest
import torch
from gptq_checkpoint import tiny_llama, tiny_tokenizer
from torch import nn
from torch.optim.swa_utils import AveragedModel
from transformers import (
    AwqConfig,
    BitsAndBytesConfig,
    GPTQConfig,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
    TextGenerationPipeline,
)

from omlx_cache.unwrap import gptq_bits, unwrap


class Forwarding(nn.Module):
    """What all wrappers have in common: an unknown attribute is looked up in what they wrap."""

    def __init__(self, attribute, wrapped, **attributes):
        super().__init__()
        self.forward_to = attribute
        setattr(self, attribute, wrapped)
        for name, value in attributes.items():
            setattr(self, name, value)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "forward_to":
                raise
            return getattr(super().__getattr__(self.forward_to), name)


def stand_in(base, module, concrete, wrapped_as):
    """Return a class `concrete` that inherits from a class `base` of `module`."""
    base_class = type(base, (Forwarding,), {"__module__": module})
    concrete_class = type(concrete, (base_class,), {"__module__": module})
    return lambda wrapped, **attributes: concrete_class(wrapped_as, wrapped, **attributes)


class QuantizeConfig:
    def __init__(self, bits):
        self.bits = bits

    def __repr__(self) -> str:  # part of a test's name, which must not change
        return f"QuantizeConfig({self.bits})"


GPTQModel = stand_in("BaseQModel", "gptqmodel.models.base", "LlamaQModel", "model")
OldGPTQModel = stand_in("BaseGPTQModel", "gptqmodel.models.base", "LlamaGPTQ", "model")
AutoGPTQ = stand_in(
    "BaseGPTQForCausalLM", "auto_gptq.modeling._base", "LlamaGPTQForCausalLM", "model"
)
Tuner = stand_in("BaseTuner", "peft.tuners.tuners_utils", "LoraModel", "model")
Peft = stand_in("PeftModel", "peft.peft_model", "PeftModelForCausalLM", "base_model")
Mixed = stand_in("PeftMixedModel", "peft.mixed_model", "PeftMixedModel", "base_model")


def adapters(peft_type):
    return {"default": type("Config", (), {"peft_type": peft_type})()}


@pytest.fixture(scope="module")
def llama():
    return tiny_llama()


def test_a_plain_model_is_returned_not_its_decoder(llama):
    assert unwrap(llama) is llama


@pytest.mark.parametrize(
    "wrap",
    [
        GPTQModel,
        OldGPTQModel,
        AutoGPTQ,
        Tuner,
        lambda m: Peft(Tuner(m), peft_config=adapters("LORA")),
        lambda m: Peft(m, peft_config=adapters("PROMPT_TUNING")),
        lambda m: Mixed(Tuner(m)),
        lambda m: Peft(Tuner(AutoGPTQ(m)), peft_config=adapters("LORA")),
        lambda m: GPTQModel(Peft(Tuner(m), peft_config=adapters("LORA"))),
    ],
    ids=[
        *("gptqmodel", "old_gptqmodel", "auto_gptq", "peft_tuner", "peft_lora", "peft_prompt"),
        *("peft_mixed", "peft_in_auto_gptq", "gptqmodel_in_peft"),
    ],
)
def test_wrappers(llama, wrap):
    assert unwrap(wrap(llama)) is llama


def test_real_peft(llama):
    peft = pytest.importorskip("peft", reason="needs the extra dev")
    causal_lm = {"task_type": "CAUSAL_LM"}
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], **causal_lm)
    prompt = peft.PromptTuningConfig(num_virtual_tokens=4, **causal_lm)
    prefix = peft.PrefixTuningConfig(num_virtual_tokens=4, **causal_lm)
    model = tiny_llama()
    assert unwrap(peft.get_peft_model(model, prompt)) is model
    with pytest.raises(NotImplementedError, match="PREFIX_TUNING"):
        unwrap(peft.get_peft_model(model, prefix))
    assert unwrap(peft.get_peft_model(model, lora, mixed=True)) is model
    model = tiny_llama()
    wrapper = peft.get_peft_model(model, lora)
    assert unwrap(wrapper) is model is wrapper.get_base_model()
    assert unwrap(wrapper.base_model) is model


def test_prefix_tuning_is_refused(llama):
    with pytest.raises(NotImplementedError, match=r"'default' of type PREFIX_TUNING.*unpatched"):
        unwrap(Peft(llama, peft_config=adapters("PREFIX_TUNING")))


class Holder(nn.Module):
    """A wrapper of no known library."""

    def __init__(self, model):
        super().__init__()
        self.model = model


class ImpostorBaseQModel(Holder):
    """Named like GPTQModel's class, but from another package."""


ImpostorBaseQModel.__name__ = "BaseQModel"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: None, "got NoneType; pass the model that"),
        (lambda m: "org/llama", "got the string 'org/llama'; load it first"),
        (lambda m: type(m), "got the class LlamaForCausalLM; pass a model, not its class"),
        (lambda m: tiny_tokenizer(), r"got \w+; pass the model, not its tokenizer"),
        (
            lambda m: TextGenerationPipeline(model=m, tokenizer=tiny_tokenizer()),
            r"got TextGenerationPipeline; pass its \.model, LlamaForCausalLM",
        ),
        (torch.compile, r"got OptimizedModule; pass its \._orig_mod, LlamaForCausalLM"),
        (AveragedModel, r"got AveragedModel; pass its \.module, LlamaForCausalLM"),
        (Holder, r"got Holder; pass its \.model, LlamaForCausalLM"),
        (ImpostorBaseQModel, r"got BaseQModel; pass its \.model, LlamaForCausalLM"),
        (lambda m: nn.Linear(2, 2), "got Linear; pass what AutoModelForCausalLM"),
        (lambda m: GPTQModel(Holder(m)), "got LlamaQModel around Holder; pass its .model"),
        (lambda m: GPTQModel(None), "got LlamaQModel around NoneType"),
    ],
    ids=[
        *("none", "string", "class", "tokenizer", "pipeline", "compiled", "averaged", "holder"),
        *("same_name_elsewhere", "linear", "holder_in_gptqmodel", "empty_gptqmodel"),
    ],
)
def test_other_things_are_refused_with_a_remedy(llama, make, message):
    thing = make(llama)
    for function in (unwrap, gptq_bits):
        with pytest.raises(TypeError, match=f"must be a Hugging Face PreTrainedModel.*{message}"):
            function(thing)


@pytest.mark.parametrize(
    "make",
    [lambda m: m.model, lambda m: LlamaForSequenceClassification(m.config)],
    ids=["decoder", "classifier"],
)
def test_a_model_without_a_language_head_is_refused(llama, make):
    headless = make(llama)
    for wrapped in (headless, AutoGPTQ(headless)):
        with pytest.raises(ValueError, match=r"got Llama.*load it with AutoModelForCausalLM"):
            unwrap(wrapped)


def test_an_encoder_decoder_is_refused():
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=8, decoder_start_token_id=0, **sizes))
    with pytest.raises(NotImplementedError, match="encoder-decoder T5ForConditionalGeneration"):
        unwrap(model)


@pytest.mark.parametrize(
    ("quantization_config", "expected"),
    [
        (None, None),
        (GPTQConfig(bits=4), 4),
        (GPTQConfig(bits=8), 8),
        (AwqConfig(bits=4), 4),
        (BitsAndBytesConfig(load_in_4bit=True), 4),
        (BitsAndBytesConfig(load_in_8bit=True), 8),
        ({"quant_method": "gptq", "bits": 3}, 3),
        ({"quant_method": "awq", "w_bit": 4}, 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}, 8),
        ({"quant_method": "exl3", "bits": 4.0}, 4),
        ({"quant_method": "exl3", "bits": 3.5}, None),
        ({"quant_method": "gguf", "bits": QuantizeConfig(5)}, 5),
        ({"quant_method": "fp8"}, None),
        ({"quant_method": "gptq", "bits": "4"}, None),
        ({"quant_method": "gptq", "bits": True}, None),
    ],
    ids=str,
)
def test_bits_of_a_quantization_config(quantization_config, expected):
    model = tiny_llama()
    if quantization_config is not None:
        model.config.quantization_config = quantization_config
    assert gptq_bits(model) == expected
    assert gptq_bits(AutoGPTQ(model)) == expected


def test_bits_of_a_wrapper_count_where_the_model_states_none(llama):
    assert gptq_bits(AutoGPTQ(llama, quantize_config=QuantizeConfig(4))) == 4
    wrapped = Peft(
        Tuner(AutoGPTQ(llama, quantize_config=QuantizeConfig(4))), peft_config=adapters("LORA")
    )
    assert gptq_bits(wrapped) == 4
    assert gptq_bits(GPTQModel(llama, quantize_config=None)) is None
