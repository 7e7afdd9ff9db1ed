"""What a step does to one sequence: the plan decides it, and the tables are built from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from omlx_cache.sequences import Sequence, StoredBlock


@dataclass
class RowPlan:
    """What a step does to one sequence.

    Attributes:
        sequence: as it was before the step.
        new_tokens: real tokens that it gets.
        blocks: what it holds during the step.
        recalled: those of its blocks in CPU memory that it attends to.
        taken: blocks that were allocated for the step.
        given_up: shared blocks, of which ``taken`` has copies because the step writes to them.
        sink_page: during the step; None where it has none.
        old_sink_page: before the step.
    """

    sequence: Sequence
    new_tokens: int
    blocks: list[StoredBlock] = field(default_factory=list)
    recalled: list[StoredBlock] = field(default_factory=list)
    taken: list[StoredBlock] = field(default_factory=list)
    given_up: list[StoredBlock] = field(default_factory=list)
    sink_page: int | None = None
    old_sink_page: int | None = None

    @property
    def length(self) -> int:
        """Tokens after the step."""
        return self.sequence.length + self.new_tokens
