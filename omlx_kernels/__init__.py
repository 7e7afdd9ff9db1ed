"""Paged-attention kernels over mixed-precision KV-cache blocks: contracts, oracle and implementations."""
