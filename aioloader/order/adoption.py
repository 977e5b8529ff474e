"""Going on with a saved mixture after its sources or weights have changed: only what is named is accepted, and it is recorded."""

from __future__ import annotations

from collections.abc import Collection

from aioloader.errors import ResumeError
from aioloader.order.mixture import Mixture
from aioloader.protocols import Json

__all__ = ["adopt"]


def adopt(state: Json, mixture: Mixture, *, added: Collection[str] = (), removed: Collection[str] = (), reweighted: bool = False) -> Json:
    """Return a drawer's state as the state of `mixture`, which may have other sources than it was saved with.

    Positions go on, and with them the schedule. Sources that are new begin with no draws; targets of all sources are counted afresh
    from here, so nothing is caught up. The change is kept under `"changes"`: position, names, and the draws of sources that left.
    Names accepted that have not changed are ignored, so that a script can be run again; a state that fits is returned as it is.

    Args:
        state: What `state()` of a drawer returned.
        mixture: The mixture to go on with.
        added: Names that may be new.
        removed: Names that may be missing.
        reweighted: Weights or schedule have changed, and this is meant.

    Raises:
        ResumeError: A name is new or missing and was not accepted, or the mixture weighs differently; each difference is listed.
    """
    new = [name for name in mixture.names if name not in state["drawn"]]
    gone = [name for name in state["drawn"] if name not in mixture.sources]
    differences: list[tuple[str, object, object]] = [
        (f"source {name!r} of the mixture", "absent", "present") for name in new if name not in added
    ]
    differences += [(f"source {name!r} of the mixture", "present", "absent") for name in gone if name not in removed]
    if state["weigh"] != mixture.weigh:
        differences.append(("weigh of the mixture", state["weigh"], mixture.weigh))
    if differences:
        raise ResumeError(differences, do="give the mixture that was saved, or name the sources that are meant to come or go")
    if not (new or gone or reweighted):
        return state
    change = {
        "position": state["position"],
        "added": new,
        "removed": {name: state["drawn"][name] for name in gone},
        "reweighted": reweighted,
    }
    drawn = {name: state["drawn"].get(name, 0) for name in mixture.names}
    passes = {name: state["passes"].get(name, 0) for name in mixture.names}
    adopted = {**state, "drawn": drawn, "passes": passes, "changes": [*state["changes"], change]}
    if mixture.weigh == "records":
        return {**adopted, "since": {"position": state["position"], "drawn": dict(drawn)}}
    tokens = {name: state["tokens"].get(name, 0) for name in mixture.names}
    since = mixture.place(state["position"], state["num_tokens"])
    return {**adopted, "since": since, "tokens": tokens, "deficits": dict.fromkeys(mixture.names, 0)}
