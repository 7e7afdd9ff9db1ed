"""`BlockAllocator` as a state machine, and the promises of its docstrings."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omlx_cache.block_allocator import BlockAllocator
from omlx_kernels.errors import OutOfBlocksError

BUDGET = 6


class AllocatorMachine(RuleBasedStateMachine):
    """Mirrors the allocator by a plain list of holders: (space, block) once per holder."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(["hot", "cold"], max_blocks=BUDGET)
        self.held: list[tuple[str, int]] = []
        self.moving: dict[tuple[str, int], tuple[str, int]] = {}  # new -> old

    def used(self) -> int:
        return len(set(self.held)) - len(self.moving)

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        before = sorted(self.held)
        if self.used() + count > BUDGET:
            with pytest.raises(OutOfBlocksError) as error:
                self.allocator.allocate("hot", count)
            assert (error.value.needed, error.value.free) == (count, BUDGET - self.used())
            assert sorted(self.held) == before
            return
        ids = self.allocator.allocate("hot", count)
        assert not {("hot", i) for i in ids} & set(self.held), "a block is owned twice"
        self.held += [("hot", i) for i in ids]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data) -> None:
        block = data.draw(st.sampled_from(self.held))
        if block in self.moving or block in self.moving.values():
            return
        self.allocator.share(*block)
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.allocator.release(*block)
        self.held.remove(block)
        if block not in self.held:
            self.moving = {n: o for n, o in self.moving.items() if block not in (n, o)}

    @precondition(lambda self: any(space == "hot" for space, _ in self.held))
    @rule(data=st.data())
    def begin_replace(self, data) -> None:
        old = data.draw(st.sampled_from([b for b in self.held if b[0] == "hot"]))
        if old in self.moving.values():
            return
        new = ("cold", self.allocator.begin_replace(*old, "cold"))
        assert new not in self.held
        self.held += [new] * self.held.count(old)
        self.moving[new] = old

    @rule(space=st.sampled_from(["hot", "cold"]))
    def compact(self, space: str) -> None:
        held = [block for s, block in self.held if s == space]
        moves = self.allocator.compact(space)
        assert set(moves) <= set(held)
        assert not set(moves.values()) & set(held), "a block moved onto another"

        def follow(block: tuple[str, int]) -> tuple[str, int]:
            return (space, moves.get(block[1], block[1])) if block[0] == space else block

        self.held = [follow(block) for block in self.held]
        self.moving = {follow(new): follow(old) for new, old in self.moving.items()}
        assert self.allocator.capacity(space) == len(set(held))

    @invariant()
    def agrees(self) -> None:
        assert self.allocator.num_used == self.used()
        assert self.allocator.num_used + self.allocator.num_free == BUDGET
        for space, block in set(self.held):
            assert self.allocator.refs(space, block) == self.held.count((space, block))
            assert block < self.allocator.capacity(space)


TestAllocatorMachine = AllocatorMachine.TestCase


def test_lowest_ids_first():
    allocator = BlockAllocator(["hot"])
    allocator.allocate("hot", 4)
    for block in (3, 0, 2):
        allocator.release("hot", block)
    assert allocator.allocate("hot", 3) == [0, 2, 3]


def test_freed_twice_is_refused():
    allocator = BlockAllocator(["hot"])
    allocator.allocate("hot", 1)
    allocator.release("hot", 0)
    with pytest.raises(ValueError, match="must be in use, got free block 0 of hot"):
        allocator.release("hot", 0)


def test_unbounded_has_no_free_count():
    allocator = BlockAllocator(["hot"])
    assert allocator.num_free is None
    assert len(allocator.allocate("hot", 1000)) == 1000


def test_message_names_all_numbers():
    with pytest.raises(OutOfBlocksError, match="3 needed, 2 free, 2 configured"):
        BlockAllocator(["hot"], max_blocks=2).allocate("hot", 3)
