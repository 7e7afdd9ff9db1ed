"""Reports are cheap plain data, and what Prometheus gets to see are their numbers."""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import urllib.request

import prometheus_client
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import omlx_cache
from omlx_cache.monitoring import CacheCollector


def tiny_model(**config):
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, eos_token_id=None)).eval()
    return omlx_cache.patch(model, block_size=64, **config)


def generate(model, tokens: int = 200) -> None:
    ids = torch.arange(tokens)[None] % 100
    mask = torch.ones_like(ids)
    model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False)


@pytest.fixture(scope="module")
def model():
    model = tiny_model(prefix_cache=True)
    generate(model)
    generate(model)
    return model


class NoTensors(TorchDispatchMode):
    """Fails at any work on tensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"a report computed {func}")


def test_a_report_touches_no_tensor_and_is_json(model):
    cache = omlx_cache.PagedCache(model)
    ids = torch.arange(300)[None] % 100
    with torch.inference_mode():
        model(ids, cache=cache)
    with NoTensors():
        reports = [omlx_cache.report(model), omlx_cache.report(cache)]
    for report in reports:
        assert json.loads(json.dumps(report.to_dict())) == report.to_dict()


def value(registry, gauge: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"omlx_cache_{gauge}", labels)


def test_the_gauges_are_the_report(model):
    registry = prometheus_client.CollectorRegistry(auto_describe=True)
    other = tiny_model()
    registry.register(CacheCollector(chat=model, other=other))
    report = omlx_cache.report(model)
    assert report.reused_tokens > 100
    for tier, size in report.bytes_by_tier.items():
        assert value(registry, "bytes", model="chat", tier=tier) == size
    fields = report.to_dict()
    fields["sequences"] = fields.pop("num_sequences")
    del fields["bytes_by_tier"], fields["total_bytes"]  # the sum is Prometheus's to make
    for name, number in fields.items():
        assert value(registry, name, model="chat") == number
    assert value(registry, "active_blocks", model="other") is None, "it has not run yet"
    generate(other)
    assert value(registry, "seen_tokens", model="other") == 203


def test_the_page_that_is_scraped(model):
    registry = prometheus_client.CollectorRegistry()
    registry.register(CacheCollector(chat=model))
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
    try:
        port = server.server_port
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
            text = page.read().decode()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert "# TYPE omlx_cache_bytes gauge" in text
    assert 'omlx_cache_bytes{model="chat",tier="k8v8"} ' in text
    assert 'omlx_cache_block_utilization{model="chat"} 0.' in text


def test_a_model_that_is_gone_or_unpatched_has_no_samples():
    models = [tiny_model(), tiny_model()]
    for own in models:
        generate(own)
    registry = prometheus_client.CollectorRegistry()
    registry.register(CacheCollector(a=models[0], b=models[1]))
    assert value(registry, "sequences", model="a") == 1
    omlx_cache.unpatch(models[0])
    assert value(registry, "sequences", model="a") is None
    assert value(registry, "sequences", model="b") == 1
    del models, own
    gc.collect()
    assert value(registry, "sequences", model="b") is None


def test_an_unpatched_model_is_refused(model):
    stock = omlx_cache.unpatch(tiny_model())
    with pytest.raises(ValueError, match="must be patched"):
        CacheCollector(chat=model, stock=stock)


def test_without_the_package_it_says_how_to_get_it(model, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'omlx_cache\[prometheus\]'"):
        CacheCollector(chat=model)


def test_the_library_logs_under_its_name_and_sets_nothing_up():
    names = [name for name in logging.root.manager.loggerDict if name.startswith("omlx")]
    assert names
    for name in names:
        assert name.partition(".")[0] in ("omlx_cache", "omlx_kernels")
        logger = logging.getLogger(name)
        assert (logger.handlers, logger.level, logger.propagate) == ([], logging.NOTSET, True)
