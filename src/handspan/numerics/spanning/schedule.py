"""When span does what, as functions of the round and of what has been decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from handspan.core.data import Round

RACE, PERSONAL, COMMON = 0, 1, 2  # modes of the server's record
# Shares of the rounds: the race's looks at both sides, the two cuts, and the moment of shrinking.
# Nobody trains on validation rows before the last decision.
_RACE, _CUTS, _SHRINK = (0.05, 0.1, 0.15, 0.2), (0.35, 0.45), 0.55
_SPLIT_EVERY = 2  # rounds; Lloyd's steps in between let the halves find their places


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Rounds at which decisions are made; those that are not made have none."""

    rounds: int
    first_mode: int
    races: tuple[int, ...]
    cuts: tuple[int, ...]
    shrink: int | None

    @classmethod
    def of(cls, rounds: int, *, race: bool, cut: bool, shrink: bool) -> Schedule:
        """Place the decisions in a run of so many rounds."""

        def at(share: float, least: int = 1) -> int:
            return max(least, int(share * rounds))

        return cls(
            rounds=rounds,
            first_mode=RACE if race else PERSONAL,
            races=tuple(sorted({at(share, 2) for share in _RACE})) if race else (),  # both trained
            cuts=tuple(sorted({at(share, 2 if race else 1) for share in _CUTS})) if cut else (),
            shrink=at(_SHRINK) if shrink else None,
        )

    @property
    def settled(self) -> int:
        """First round in which nothing is left to decide: validation rows train from then on."""
        return max([0, *self.races, *self.cuts, self.shrink or 0])

    @property
    def clusters_from(self) -> int:
        """First round whose coordinates are clustered."""
        return max([0, *self.races[-1:], *self.cuts[:1]])

    def judges(self, server: Any, round: Round) -> bool:
        """Whether both sides of the race are measured in this round."""
        is_due = int(round.index) in self.races or self.must_end(round)
        return int(server.mode) == RACE and is_due

    def must_end(self, round: Round) -> bool:
        """Whether the race ends whatever is measured; later, if that round was abandoned."""
        return int(round.index) >= max([0, *self.races])

    def cuts_now(self, server: Any, round: Round) -> bool:
        """Whether the number of directions is chosen in this round."""
        due = sum(cut <= int(round.index) for cut in self.cuts)
        return int(server.mode) == PERSONAL and int(server.num_cuts) < due

    def weighs(self, server: Any, round: Round) -> bool:
        """Whether the shrinkage is chosen in this round."""
        is_due = self.shrink is not None and int(round.index) >= self.shrink
        return int(server.mode) == PERSONAL and is_due and not int(server.weighed)

    def races_common(self, server: Any, round: Round) -> bool:
        """Whether the cohort trains one model for all, which may yet lose."""
        return int(server.mode) == RACE and int(round.index) % 2 == 0

    def is_common(self, server: Any, round: Round) -> bool:
        """Whether the cohort trains one model for all."""
        return int(server.mode) == COMMON

    def explores(self, server: Any, round: Round) -> bool:
        """Whether the cohort trains personal heads, validation rows being kept."""
        if int(server.mode) == RACE:
            return int(round.index) % 2 == 1
        return int(server.mode) == PERSONAL and int(round.index) < self.settled

    def is_personal(self, server: Any, round: Round) -> bool:
        """Whether the cohort trains personal heads on all its rows."""
        return int(server.mode) == PERSONAL and int(round.index) >= self.settled

    def clusters(self, server: Any, round: Round) -> bool:
        """Whether centres are moved."""
        has_begun = int(round.index) >= self.clusters_from
        return self.shrink is not None and int(server.mode) == PERSONAL and has_begun

    def splits(self, round: Round) -> bool:
        """Whether centres are split."""
        since, left = int(round.index) - self.clusters_from, (self.shrink or 0) - int(round.index)
        return since % _SPLIT_EVERY == 1 and left >= _SPLIT_EVERY

    def averages(self, round: Round, share: float) -> bool:
        """Whether the round counts for the averaged model."""
        return int(round.index) >= (1 - share) * self.rounds
