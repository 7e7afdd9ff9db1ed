"""Fixtures of the cache's tests."""

import textwrap

import pytest


@pytest.fixture
def write(tmp_path):
    """Write text or bytes to a file, whose path has a short name."""

    def write(content, name="c.yaml"):
        path = tmp_path / name
        raw = content if isinstance(content, bytes) else textwrap.dedent(content).encode()
        path.write_bytes(raw)
        return path

    return write
