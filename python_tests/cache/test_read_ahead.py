"""What is read ahead is what a reader would have got: never wrong, only early or late."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest

from omlx_cache.storage.read_ahead import ReadAhead

VALUES = {bytes([i]): bytes([i]) * (i + 1) for i in range(40)}


def test_hits_in_order_and_misses():
    seen: list[bytes] = []

    def read(key):
        seen.append(key)
        return VALUES.get(key)

    ahead = ReadAhead(read, len, 10**6)
    ahead.expect([b"\x03", b"\x01", b"nothing"])
    ahead.wait()
    assert seen == [b"\x03", b"\x01", b"nothing"]
    assert [ahead.take(k) for k in (b"\x01", b"\x03", b"nothing", b"\x05")] == [
        *(VALUES[k] for k in (b"\x01", b"\x03")),
        None,
        VALUES[b"\x05"],
    ]
    assert (ahead.hits, ahead.misses) == (3, 1)
    assert ahead.take(b"\x03") == VALUES[b"\x03"]  # a value is given once
    assert ahead.misses == 2


def test_what_is_being_read_is_waited_for_and_saves_time():
    begun, may_end = threading.Event(), threading.Event()

    def read(key):
        begun.set()
        time.sleep(0.02)
        assert may_end.wait(60)
        return VALUES[key]

    ahead = ReadAhead(read, len, 10**6)
    ahead.expect([b"\x01"])
    assert begun.wait(60)
    time.sleep(0.02)
    threading.Timer(0.01, may_end.set).start()
    assert ahead.take(b"\x01") == VALUES[b"\x01"]
    assert (ahead.hits, ahead.misses) == (1, 0)
    assert ahead.seconds_saved > 0


def test_what_has_not_begun_is_read_by_whoever_asks():
    may_end, first = threading.Event(), threading.Event()

    def read(key):
        if key == b"\x01":
            first.set()
            assert may_end.wait(60)
        return VALUES[key]

    ahead = ReadAhead(read, len, 10**6)
    ahead.expect([b"\x01", b"\x02"])
    assert first.wait(60)
    assert ahead.take(b"\x02") == VALUES[b"\x02"]
    may_end.set()
    assert ahead.take(b"\x01") == VALUES[b"\x01"]
    assert (ahead.hits, ahead.misses) == (1, 1)


def test_a_failure_ahead_is_a_miss(caplog):
    main = threading.get_ident()

    def read(key):
        if threading.get_ident() != main:
            raise OSError("the disk is gone")
        return VALUES[key]

    ahead = ReadAhead(read, len, 10**6)
    ahead.expect(VALUES)
    ahead.wait()
    assert [ahead.take(key) for key in VALUES] == list(VALUES.values())
    assert ahead.hits == 0
    assert "reading ahead failed" in caplog.text


def test_the_bound_holds_and_what_is_old_leaves_for_what_is_new():
    ahead = ReadAhead(VALUES.get, len, 100)
    ahead.expect(VALUES)
    ahead.wait()
    assert 100 <= ahead._bytes < 100 + 40  # one more than fits may have been begun
    staged = [k for k, slot in ahead._slots.items() if slot.value is not None]
    ahead.expect([b"\x27", b"\x26"])
    ahead.wait()
    assert ahead._bytes + 40 >= 100
    assert ahead.take(b"\x27") == VALUES[b"\x27"]
    assert ahead.hits == 1
    assert ahead.take(staged[0]) == VALUES[staged[0]]  # whether it has left or not
    for key in VALUES:
        assert ahead.take(key) == VALUES[key]
    ahead.wait()
    assert ahead._bytes == 0


def test_a_forked_child_reads_by_itself():
    may_end = threading.Event()
    ahead = ReadAhead(lambda key: may_end.wait(60) and VALUES[key], len, 10**6)
    ahead.expect([b"\x01"])
    child = os.fork()
    if not child:
        may_end.set()
        os._exit(0 if ahead.take(b"\x01") == VALUES[b"\x01"] else 1)
    assert os.waitpid(child, 0)[1] == 0
    may_end.set()
    assert ahead.take(b"\x01") == VALUES[b"\x01"]


@pytest.mark.parametrize("seed", range(5))
def test_threads_delays_and_failures(seed):
    chance = random.Random(seed)
    main = {threading.get_ident()}

    def read(key):
        time.sleep(chance.random() / 1000)
        if threading.get_ident() not in main and chance.random() < 0.3:
            raise OSError("now and then")
        return VALUES.get(key)

    ahead = ReadAhead(read, len, 120)

    def use(number: int) -> None:
        main.add(threading.get_ident())
        own = random.Random(number)
        for _ in range(60):
            keys = own.sample(sorted(VALUES), 6)
            ahead.expect(keys)
            for key in keys if own.random() < 0.8 else keys[:2]:
                if ahead.take(key) != VALUES[key]:
                    wrong.append(key)

    wrong: list[bytes] = []
    threads = [threading.Thread(target=use, args=(seed * 10 + i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert ahead.hits
    ahead.wait()
    assert ahead._bytes == sum(slot.num_bytes for slot in ahead._slots.values())
    assert ahead._bytes <= 120 + 40
