"""Paged attention over mixed-precision KV-cache blocks: contracts, oracle, implementations."""
