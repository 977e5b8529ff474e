"""The other ranks, as one loader sees them: who shares its data, who reads for whom, and whether all of them fit together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from aioloader.bridge.agreed import AgreedFeed
from aioloader.bridge.cards import Card, digest, peers_of
from aioloader.bridge.groups import Group
from aioloader.bridge.matching import Matching
from aioloader.bridge.relay import PeerFeed, Relay, Sender
from aioloader.bridge.rounds import Rounds, has_other_ranks
from aioloader.engine.ending import num_steps
from aioloader.engine.plan import Plan, Run
from aioloader.errors import ConfigError
from aioloader.order.already_sharded import SplitStream
from aioloader.order.mesh import Mesh
from aioloader.order.mixed import MixedStream
from aioloader.protocols import RecordId
from aioloader.sources import IterableSource
from aioloader.state.elastic import quarantined

__all__ = ["Job"]

_FAR = 1 << 40
"""Steps between checks of deliveries where none are asked for."""


class Job:
    """The ranks that train on a loader's data together.

    Where no process group is initialised, or another number of ranks than the mesh has, a loader is alone: nothing is checked and
    nothing relayed.

    Args:
        plan: Of the loader.
        mesh: Where this rank stands.
        is_one_to_one: Whether each record makes one sample.
        check_every: Steps between checks of deliveries; None: no checks at all.
        read: "all": each rank reads for itself; "group": one reads for those that share its dp_rank and cp_rank.
        device: Where micro-batches arrive with "group".
        timeout_s: How long to wait for a rank.

    Raises:
        ConfigError: There is no such device, or none that groups can send to.
    """

    def __init__(
        self, plan: Plan, mesh: Mesh, *, is_one_to_one: bool, check_every: int | None, read: str, device: str | None, timeout_s: float
    ) -> None:
        self._plan = plan
        self._mesh = mesh
        self._is_one_to_one = is_one_to_one
        self._check_every = check_every
        self._reads_for_group = read == "group"
        self._device = _device(device)
        self._timeout_s = timeout_s
        self._rounds: Rounds | None = None
        self._agreed: AgreedFeed | None = None
        self._met_in: object = None
        self._relay: Relay | None = None
        self.quarantined: frozenset[RecordId] = frozenset()
        """What any rank knew to be left out when the pass began, where the ranks are compared then."""
        self.matching: Matching | None = None
        self.sender: Sender | None = None

    @property
    def has_other_ranks(self) -> bool:
        """Return whether there are other data-parallel ranks to agree with."""
        return self._plan.lanes.dp_size > 1 and has_other_ranks(self._num_ranks)

    def begin_pass(self, run: Run, *, is_resumed: bool) -> None:
        """Meet the other ranks; blocks until all are there, if there are any.

        Args:
            run: The pass.
            is_resumed: Whether it begins in a state that was loaded.

        Raises:
            SynchronizationError: They do not fit together, or one is missing.
            ConfigError: One rank shall read for others, and there is no process group to do it in.
        """
        self.sender, self.quarantined = None, frozenset()
        if self._agreed is not None and self._rounds is not None and self._rounds.is_current:
            self._agreed.leave()
        self._agreed = None
        if not self._is_whole:
            self._refuse_lonely_reader()
            self.matching = self._relay = None
            return
        if self._check_every is None and not self._reads_for_group:
            return
        if self.matching is None or not self.matching.is_current:
            lanes = len(self._plan.lanes.served)
            self.matching = Matching(self._mesh, every=self._check_every or _FAR, num_lanes=lanes, timeout_s=self._timeout_s)
        self._compare(run, self.matching, is_resumed=is_resumed)
        groups = self._groups(self.matching.cards)
        if self._reads_for_group and len(groups[0]) > 1:
            if self._relay is None or not self._relay.is_current:
                self._relay = Relay(groups, timeout_s=self._timeout_s, device=self._device)
            if self._relay.is_reader:
                self.sender = Sender(self._relay)

    def feed(self, run: Run, *, start: Callable[[Run], Any], leave: Callable[[], None]) -> Any:
        """Return where this rank gets the micro-batches of a pass from.

        Args:
            run: The pass.
            start: Starts an engine of this rank.
            leave: Ends it in the middle.
        """
        has_to_agree = self._has_to_agree(run)
        if has_to_agree:
            self._meet()
        if self._relay is not None and not self._relay.is_reader:
            return PeerFeed(self._relay)
        try:
            if not has_to_agree:
                return start(run)
            assert self._rounds is not None, "whoever reads has met the others"
            self._agreed = AgreedFeed(self._plan, run, self._rounds, start=start, leave=leave)
            return self._agreed
        except Exception as error:
            self._fail(error)
            raise

    def close(self) -> None:
        """Give all groups back."""
        for one in (self._rounds, self.matching, self._relay):
            if one is not None:
                one.close()
        self._rounds = self._agreed = self.matching = self._relay = self.sender = self._met_in = None

    def _fail(self, error: Exception) -> None:
        """Tell the other ranks that no pass has begun here."""
        if self.sender is not None:
            self.sender.fail(error)
        if self.matching is not None:
            self.matching.fail()

    @property
    def _is_whole(self) -> bool:
        """Return whether the ranks of the process group are those of the mesh."""
        return has_other_ranks() and self._num_ranks == torch.distributed.get_world_size()

    @property
    def _num_ranks(self) -> int:
        return self._mesh.dp_size * self._mesh.num_peers

    def _refuse_lonely_reader(self) -> None:
        if self._reads_for_group and self._mesh.num_peers > 1:
            world = torch.distributed.get_world_size() if has_other_ranks() else "no other rank"
            raise ConfigError(
                "Loader(read='group')",
                expected=f"an initialised process group of the {self._num_ranks} ranks of the mesh",
                got=world,
                do="call torch.distributed.init_process_group before iterating, or use read='all'",
            )

    def _compare(self, run: Run, matching: Matching, *, is_resumed: bool) -> None:
        plan, state = self._plan, run.state
        is_split = isinstance(plan.source, SplitStream)
        settings = {"lanes": plan.lanes.num_lanes, "check_every": self._check_every, "read": self._reads_for_group, "epochs": run.epochs}
        shared = {**plan.fingerprint, **settings}
        begins = plan.source.preview_order(int(state["source"]["epoch"])) if isinstance(plan.source, IterableSource | SplitStream) else None
        if is_split:
            shared.pop("source")
        else:
            shared["order"] = begins
        # Not where the source is to be read from: how far back that is depends on timing, and gives the same.
        own = {
            "source": plan.fingerprint["source"],
            "order": begins,
            "state": {name: state[name] for name in ("end_epoch", "turn", "lanes")},
        }
        card = Card(
            dp_rank=plan.lanes.dp_rank,
            dp_size=plan.lanes.dp_size,
            cp_rank=self._mesh.cp_rank,
            cp_size=self._mesh.cp_size,
            num_lanes=plan.lanes.num_lanes,
            shared=digest(shared),
            own=digest(own),
            epoch=int(state["source"]["epoch"]),
            step=min(int(lane["step"]) for lane in state["lanes"].values()),
            is_resumed=int(is_resumed),
        )
        repeats = plan.num_distinct is not None or isinstance(plan.source, MixedStream) or getattr(plan.source, "has_repeats", False)
        # Sources of their own may number their records alike; at the border of two epochs a micro-batch holds records of both.
        can_repeat = is_split or repeats or run.epochs != 1
        known = quarantined(state) | run.quarantined
        self.quarantined = matching.begin_pass(card, shared, own, quarantined=known, turn=int(state["turn"]), can_repeat=can_repeat)

    def _meet(self) -> None:
        """Have rounds for the ranks that read. All ranks of the job come here alike."""
        if self._met_in is torch.distributed.group.WORLD:
            return
        self._met_in = torch.distributed.group.WORLD
        readers = self._readers()
        if readers is None or torch.distributed.get_rank() in readers:
            self._rounds = Rounds(self._timeout_s, ranks=readers)
        else:
            Group(readers, timeout_s=self._timeout_s, operation="end of data")

    def _readers(self) -> list[int] | None:
        """Return the ranks that read, None if all do."""
        if self._relay is None or self.matching is None:
            return None
        return sorted(ranks[0] for ranks in self._groups(self.matching.cards))

    @staticmethod
    def _groups(cards: Sequence[Card]) -> list[tuple[int, ...]]:
        """Return which ranks get the same micro-batches, rising."""
        return sorted({tuple(peers_of(cards, card.dp_rank, card.cp_rank)) for card in cards})

    def _has_to_agree(self, run: Run) -> bool:
        """Return whether ranks could come to their ends at different steps."""
        if self._plan.lanes.dp_size == 1 or run.end_epoch is None:
            return False
        steps = num_steps(self._plan, is_one_to_one=self._is_one_to_one)
        is_even = steps is not None and steps.shortest == steps.longest
        if self._plan.end == "pad" and isinstance(run.state["source"]["cursor"], Mapping):  # what is left of an epoch was dealt anew
            is_even = False
        return not is_even and self.has_other_ranks


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or "cpu")
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type != "cpu" and not (device.type == "cuda" and torch.cuda.is_available()):
        has = "'cpu' or 'cuda'" if torch.cuda.is_available() else "'cpu', as there is no CUDA device"
        raise ConfigError("Loader(read_device=)", expected=has, got=repr(name), do="leave it out for the CPU")
    return device
