"""An optimizer's state by names that are the same in every run, as saves have it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paddle_dist_ckpt.paddle_adapter.objects import optimizer_state
from paddle_dist_ckpt.tree.canonical import canonical_paths


def flat(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The paths of an optimizer's entries, those of the master weights' own dict among them."""
    for key, value in state.items():
        if key == "master_weights" and isinstance(value, dict):
            yield from ((f"{key}/{name}", master) for name, master in value.items())
        else:
            yield key, value


def named_state(optimizer: Any, structured: Mapping[str, str]) -> dict[str, Any]:
    """Its state; ``structured`` has the structured name for each parameter's variable name."""
    entries = dict(flat(optimizer_state(optimizer)))
    paths = [*(f"/model/{name}" for name in structured.values()), *(f"/optimizer/{path}" for path in entries)]
    found = canonical_paths(paths, [*structured, *[None] * len(entries)])
    return {found.get(f"/optimizer/{key}", key).rpartition("/")[2]: value for key, value in entries.items()}
