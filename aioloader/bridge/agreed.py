"""A feed whose end is agreed on by all ranks: no rank delivers a step before it is known that every rank goes there.

before a step        known: go on, or end          not known: wait for the round, or for data to begin one with
after a step         next one not known: begin a round with what is there; its result is waited for in the next call, if at all
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from aioloader.bridge.agreement import Agreement, Verdict
from aioloader.bridge.feed import Engine
from aioloader.bridge.filler import can_fill
from aioloader.bridge.rounds import Rounds
from aioloader.engine.channel import Delivered
from aioloader.engine.ending import stopped_state
from aioloader.engine.host import Ended, HostDied
from aioloader.engine.output import Ready, make_filler
from aioloader.engine.plan import Plan, Run
from aioloader.errors import UnevenEndError
from aioloader.protocols import Json

__all__ = ["AgreedFeed"]

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02


class AgreedFeed:
    """The micro-batches of one rank, up to the end that all ranks have agreed on.

    Args:
        plan: Of the loader.
        run: The pass.
        rounds: The connection to the other ranks.
        start: Starts a pass.
        leave: Ends one in the middle.

    Attributes:
        engine: The running pass.
        awaits_ranks: Whether `try_receive` waits for other ranks, and not for the engine.
        has_awaited_engine: Whether the next micro-batch had to be waited for at the engine.
    """

    def __init__(self, plan: Plan, run: Run, rounds: Rounds, *, start: Callable[[Run], Engine], leave: Callable[[], None]) -> None:
        self._plan = plan
        self._rounds = rounds
        self._start = start
        self._leave = leave
        self._order = list(plan.lanes.served)
        self._run = run
        self._step = self._turn = self._num_delivered = 0
        self._load_last: Callable[[], Json] = dict
        self._has_ended = self._is_over = False
        self._end_state: Json = None
        self._pause_s = _SHORTEST_PAUSE_S
        self.awaits_ranks = self.has_awaited_engine = False
        self._agreement, self.engine = self._begin(run)

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self.engine.fileno()

    def try_receive(self) -> Ready | Delivered | None:
        """Return the next micro-batch or filler, None if it is not there or not agreed yet.

        Raises:
            Ended: All ranks end here.
            SynchronizationError: A rank is missing, or failed.
            UnevenEndError: The lanes do not end together and have to.
        """
        if self._turn == 0 and not self._is_agreed():
            return None
        received = None if self._has_ended else self._receive()
        if self._has_ended:
            return self._filler()
        if received is None:
            self.awaits_ranks, self.has_awaited_engine = False, True
        else:
            self._load_last = received.state_loader()
        return received

    def wait(self) -> None:
        """Wait, blocking, for the ranks or the engine; may return early."""
        if self.awaits_ranks:
            self._rounds.wait()
        else:
            self.engine.wait()

    def pause_s(self) -> float:
        """Return how long to sleep before asking again for what other ranks say; longer each time."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s

    def taken(self) -> None:
        """Note that a micro-batch was delivered; after a step, begin to agree on the next one where that is open."""
        if not self._has_ended:
            self.engine.taken()
        self._num_delivered += 1
        self._rest()
        self._turn += 1
        if self._turn == len(self._order):
            self._turn, self._step = 0, self._step + 1
            if self._agreement.is_open(self._step):
                self._look()
                self._rounds.begin(self._agreement.contribution())

    def leave(self) -> None:
        """Tell ranks that would go on with this pass that this one does not, if it was left in the middle."""
        if not self._is_over:
            self._is_over = True
            self._rounds.begin(self._agreement.departure())

    def _begin(self, run: Run) -> tuple[Agreement, Engine]:
        """Start a pass."""
        self._run = run
        self._step = min(lane["step"] for lane in run.state["lanes"].values())
        self._turn = int(run.state["turn"])
        self._num_delivered = 0
        self._load_last = dict
        self._has_ended, self._end_state, self._is_over = False, None, False
        self._rest()
        agreement = Agreement(self._plan.end, self._step, pass_number=self._rounds.begin_pass(), rank=self._rounds.rank)
        try:
            return agreement, self._start(replace(run, resumed=False))  # that nothing was left is found here, by all ranks together
        except Exception:
            agreement.fail()
            self._rounds.begin(agreement.contribution())
            raise

    def _rest(self) -> None:
        self._pause_s = _SHORTEST_PAUSE_S
        self.awaits_ranks = self.has_awaited_engine = False

    def _is_agreed(self) -> bool:
        """Return whether all ranks deliver the next step, if that is known; begin a round if that is what it takes."""
        while True:
            if self._rounds.is_running:
                result = self._rounds.take()
                if result is None:
                    self.awaits_ranks = True
                    return False
                self._agreement.learn(result)
            verdict = self._agreement.verdict(self._step)
            if verdict is Verdict.DELIVER:
                return True
            if verdict is Verdict.END:
                self._end()
                continue
            self._look(is_waiting=True)
            if not self._agreement.has_news:
                self.awaits_ranks, self.has_awaited_engine = False, True
                return False
            self._rounds.begin(self._agreement.contribution())

    def _look(self, *, is_waiting: bool = False) -> None:
        """Report what the engine has. Its failure is raised when it is waited for, and not before."""
        if self._has_ended:
            return
        ahead = self.engine.look()
        horizon = self._step - (-(self._turn + ahead.num_batches) // len(self._order))  # a step that is begun comes whole
        self._agreement.report(horizon)
        if ahead.num_batches:
            if ahead.then == "end":
                self._agreement.report(horizon, horizon)
        elif ahead.then == "end" or (ahead.then == "failure" and is_waiting):
            self._receive()

    def _receive(self) -> Ready | Delivered | None:
        """Return what the engine has. Note its end; tell the other ranks of its failure."""
        try:
            return self.engine.try_receive()
        except Ended as end:
            self._has_ended, self._end_state = True, end.state
            self._agreement.report(self._step, self._step, can_fill=can_fill(end.state["lanes"]))
        except UnevenEndError as uneven:  # raised on all ranks, once they know
            self._has_ended = True
            self._agreement.report(self._step, uneven.smallest, largest=uneven.largest)
        except HostDied:  # another one takes over
            raise
        except Exception:
            self._agreement.fail()
            self._rounds.begin(self._agreement.contribution())
            raise
        return None

    def _filler(self) -> Ready:
        """Return a filler for the next lane. Its state is that of the end of the data, but for the number of micro-batches."""
        assert self._plan.end == "pad", "only then a step is delivered that this rank does not have"
        lane = self._order[self._turn]
        lanes = self._end_state["lanes"]
        lanes = {**lanes, str(lane): {**lanes[str(lane)], "step": self._step + 1}}
        self._end_state = {**self._end_state, "lanes": lanes}
        place = self._end_state["source"]
        turn = (self._turn + 1) % len(self._order)
        state = {"end_epoch": self._run.end_epoch, "source": place, "turn": turn, "lanes": lanes}
        return make_filler(self._step, lane, max(0, place["epoch"] - 1), state)

    def _end(self) -> None:
        """End the pass; go on with the next one if this one was resumed where it ends, so that no loop is empty.

        Raises:
            Ended: The pass is over.
        """
        if self._plan.end == "drop":  # how much further this engine came is a matter of timing: the state must not tell
            assert self._run.end_epoch is not None, "a pass without end does not end"
            state = stopped_state(self._plan, {**self._run.state, **self._load_last()}, self._run.end_epoch)
            self._drain()
        else:
            while not self._has_ended:  # what is left is known to be its end
                self._receive()
            state = self._end_state
        self._is_over = True
        if self._num_delivered or not self._run.resumed:
            raise Ended(state)
        self._agreement, self.engine = self._begin(self._run.following(state))

    def _drain(self) -> None:
        """Let the engine end: take what is left if that is all there, else leave it."""
        while not self._has_ended and self.engine.look().then == "end" and self._receive() is not None:
            self.engine.taken()
        if not self._has_ended:
            self._leave()
