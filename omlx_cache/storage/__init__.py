"""The cache at rest: files of blocks and of whole caches, how they are compressed and checked."""
