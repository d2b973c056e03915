"""Optimizer variables in terms of a state_dict, and which there are of each parameter; see :mod:`.names`."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ..core.cached import cached_property

__all__ = ["MASTERS", "OptimizerVariable", "VariablesOf", "container_of"]

MASTERS = "/master_weights"
"""How the path ends of a dict of master weights in a container of an optimizer's entries."""


class OptimizerVariable(NamedTuple):
    """An optimizer's variable in terms of a state_dict: its parameter's path, and the accumulator's name.

    If only the name of the parameter's variable is known, and tensors at several paths have it, these are all there: as
    tied parameters have, models made under names of their own, and stages of a pipeline, which count for themselves.
    """

    parameters: tuple[str, ...]
    accumulator: str


class VariablesOf:
    """Where the optimizer variables of parameters are.

    Models whose parameters have equal names, of which there may be very many, have variables of all of them: such a
    group of parameters is looked at as one.

    Args:
        variables: The variables by path.
        moved: Paths in other containers, where some of them are.
    """

    def __init__(self, variables: Mapping[str, OptimizerVariable], moved: Mapping[str, str]) -> None:
        self._moved = moved
        self._paths: dict[OptimizerVariable, list[str]] = defaultdict(list)
        for path, variable in variables.items():
            self._paths[variable].append(path)
        self._groups: dict[str, list[tuple[str, ...]]] = defaultdict(list)  # by parameter, each the same object
        for group in dict.fromkeys(parameters for parameters, _ in self._paths):
            for one in group:
                self._groups[one].append(group)
        self._divided: dict[OptimizerVariable, Mapping[str, Sequence[str]]] = {}  # those with several paths

    def places(self, variable: OptimizerVariable) -> Mapping[str, Sequence[str]]:
        """The paths of a variable by container: of just its parameters, or else of some of them."""
        exact = self._paths.get(variable)
        if exact is None:
            groups = self._groups_of(variable.parameters)
            alike = (self._paths.get(OptimizerVariable(group, variable.accumulator), ()) for group in groups)
            return self._by_container(itertools.chain.from_iterable(alike))
        if len(exact) == 1:
            return self._by_container(exact)
        if variable not in self._divided:
            self._divided[variable] = self._by_container(exact)
        return self._divided[variable]

    def _by_container(self, paths: Iterable[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for path in paths:
            found.setdefault(container_of(self._moved.get(path, path)), []).append(path)
        return found

    def containers(self, parameters: Sequence[str]) -> set[str]:
        """Where any variables of parameters are."""
        return set().union(*(self._containers[group] for group in self._groups_of(parameters)))

    @cached_property
    def _containers(self) -> dict[tuple[str, ...], set[str]]:
        found: dict[tuple[str, ...], set[str]] = defaultdict(set)
        for (group, _), paths in self._paths.items():
            found[group].update(self._by_container(paths))
        return found

    def _groups_of(self, parameters: Sequence[str]) -> Collection[tuple[str, ...]]:
        if len(parameters) == 1:
            return self._groups.get(parameters[0], ())
        return {id(group): group for one in parameters for group in self._groups.get(one, ())}.values()


def container_of(path: str) -> str:
    """Where an entry is; that of a master weight in a dict of its own is its optimizer's."""
    return path.rpartition("/")[0].removesuffix(MASTERS)
