"""Command-line tools around the cache: the demo, and the real model that it runs on."""
