"""The values of a load, when everything is read: in which objects and containers they go."""

from __future__ import annotations

import bisect
import copy
from typing import Any

from ..tree.paths import is_own, parent_of
from ..tree.state_dict import PerRank, build_tree
from ..tree.values import decode_value, from_jsonable
from .messages import LoadAnswer
from .targets import Targets
from .wanted import WantedState

__all__ = ["collect_values"]


def collect_values(wanted: WantedState, answer: LoadAnswer, targets: Targets) -> dict[str, Any]:
    """The values by path: those of `.metadata`, and those that were read from entries of data files.

    Where the state_dict has None at a path below which values are stored, they become one tree.
    """
    values = {path: from_jsonable(tree) for path, tree in answer.values}
    entries = {path: decode_value(json) for path, json in targets.values().items()} | dict(targets.arrays())
    values |= {
        path: value if i == 0 else copy.deepcopy(value)
        for stored, value in entries.items()
        for i, path in enumerate(answer.renamed.get(stored, [stored]))
    }
    for path in [path for path in values if is_own(path) and path not in wanted.values]:
        values[parent_of(path)] = PerRank(values.pop(path))
    paths = sorted(values)
    for path, present in wanted.values.items():
        if present == "none" and path not in values:
            first, last = bisect.bisect_left(paths, path + "/"), bisect.bisect_left(paths, path + "0")
            if first < last:
                values[path] = build_tree((p[len(path) :], values.pop(p)) for p in paths[first:last])
    return values
