"""How far a pass has come: the state as of each micro-batch, and which epoch is the last."""

from __future__ import annotations

from aioloader.engine.assembler import Assembler, Turn
from aioloader.engine.plan import Run
from aioloader.engine.producer import CursorLog
from aioloader.errors import SourceError
from aioloader.protocols import Json

__all__ = ["Progress"]


class Progress:
    """The arithmetic of a pass, shared by the running engine and the inline one."""

    def __init__(self, run: Run) -> None:
        self.cursors = CursorLog()
        self.num_delivered = 0
        self._run = run
        self._num_before_epoch = 0
        self._num_tokens = {lane: state["counts"]["delivered_tokens"] for lane, state in run.state["lanes"].items()}
        self._first_epoch = run.state["source"]["epoch"]
        self._last_begun_epoch = max(lane["epoch"] for lane in run.state["lanes"].values())

    def state_after(self, turn: Turn, num_tokens: int) -> Json:
        """Return what of the rank's state is new once a micro-batch with so many real tokens is delivered."""
        lane = str(turn.batch.lane)
        self._num_tokens[lane] += num_tokens
        turn.lanes[lane]["counts"]["delivered_tokens"] = self._num_tokens[lane]
        return {
            "end_epoch": self._run.end_epoch,
            "source": self.cursors.before(turn.place),
            "turn": turn.turn,
            "lanes": turn.lanes,
        }

    def is_over(self, epoch: int) -> bool:
        """Return whether the pass ends before this epoch."""
        return self._run.end_epoch is not None and epoch >= self._run.end_epoch

    def check_epoch(self, epoch: int) -> None:
        """Check, after an epoch that is not the last one, that the pass gets on.

        Raises:
            SourceError: A whole epoch gave nothing, and the pass would go on for ever.
        """
        # Up to the last epoch that a lane had begun when it was saved, what is read may be a rest that fills nothing.
        if self.num_delivered == self._num_before_epoch and epoch > self._last_begun_epoch:
            raise SourceError(
                f"expected epoch {epoch} to give at least one micro-batch, got none, and would go on for ever; "
                "use fewer samples per micro-batch, fewer lanes, or end='pad'"
            )
        self._num_before_epoch = self.num_delivered

    def next_pass(self, assembler: Assembler) -> Json:
        """Return the state at the start of the pass after this one."""
        assert self._run.end_epoch is not None
        epoch = max(self._run.end_epoch, self._first_epoch)
        place = {"epoch": epoch, "position": 0, "cursor": None}
        rank_state = assembler.next_pass(epoch)
        for lane, num_tokens in self._num_tokens.items():
            rank_state["lanes"][lane]["counts"]["delivered_tokens"] = num_tokens
        return {**self._run.state, **rank_state, "end_epoch": None, "source": place}

    def following(self, state: Json) -> Run | None:
        """Return what to run next if this pass was a resumed one that had nothing left to deliver."""
        return self._run.following(state) if self._run.resumed and not self.num_delivered else None
