"""A paged, quantized KV cache for Hugging Face models, in one call: ``omlx_cache.patch(model)``."""
