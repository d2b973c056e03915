"""Which stored tensor is wanted: by equal keys, or by what the keys say of a parameter and its optimizer variables.

A key such as ``linear_0.w_0.dist_moment1_0`` means something only in the run that made it. It is translated by a table
of that run's variable names: the wanted keys by those of the tensors that are to be filled, the stored ones by those in
`.metadata`; see :mod:`.names`. The first line that holds counts:

    what is wanted                          what is stored                          on what evidence
    --------------------------------------  --------------------------------------  --------------------------------
    what the user has moved                 what is at the path that they name      they say so
    what is called by a name of a run, and  as below, in the container that they    they say so, and the rest
      of which they have moved containers     name
    no optimizer variable, for all we know  what is at the same path                equal keys
    accumulator A of parameter P            A of P at the same path                 equal keys, and both tables
    A of P                                  A of P in the same container, if one    both tables
    A of P, which is not wanted itself      the same                                the stored table, P's key
    A of P                                  A of P in another container, if one:    both tables, and neither has
                                            P's own here or there (a program's)     another optimizer of P
    what a program has once                 that of the container, or the only one  its name, learning_rate_N
    A of P, which has other paths as well   the same of P at any of these           both tables
    A of P                                  what is at the same path, of which      equal keys alone
                                            nothing is known
    master weight of an unknown parameter   that in the same container, under the   equal names of the parameter
                                            name of the other mode

What is found otherwise than at its own path is given to one wanted tensor only. All else has no match: no tensor gets
another one's data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from functools import cache
from types import MappingProxyType

from ..core.cached import cached_property
from .names import Names, last_part, master_of_run, may_be_of_run, may_be_optimizers
from .variables import OptimizerVariable, VariablesOf, container_of

__all__ = ["NameMatch"]


class NameMatch:
    """Finds the stored tensors for wanted ones.

    Args:
        stored: What the stored tensors are called.
        index: The number of each by its path.
        wanted: What the wanted ones, and others of the same state_dict, are called.
        moved: Where the user says that some of these are stored.
        tied: The paths of each wanted tensor that has several, by path. What is stored for one is stored for all.
    """

    def __init__(
        self,
        stored: Names,
        index: Mapping[str, int],
        wanted: Names,
        moved: Mapping[str, str],
        tied: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        self._stored, self._index, self._wanted, self._moved, self._tied = stored, index, wanted, moved, tied

    def places(self, paths: Sequence[str]) -> list[int | None]:
        """The number of the stored tensor for each of these wanted paths; None where there is none."""
        index, moved = self._index, self._moved
        if not moved and (self._is_alike or not any(map(may_be_optimizers, self._wanted.paths))):
            return self._own if paths == self._wanted.paths else list(map(index.get, paths))
        found: dict[str, int] = {}
        by_name: dict[str, int] = {}
        stored, asked = self._stored.variables, set(paths)
        for path in paths:
            at = moved.get(path, path)
            place, variable = index.get(at), self._variables.get(path)
            if place is not None and (variable is None or stored.get(at) == variable or self._is_said(path, at, asked)):
                found[path] = place
            elif (named := self._by_any_name(path, at, variable)) is not None:
                by_name[path] = named
            elif place is not None and at not in stored:
                found[path] = place  # it is not known which parameter that is of, so only its key speaks for it
            elif variable is None and at == path and (said := master_of_run(path)) in self._stored.masters:
                by_name[path] = index[self._stored.masters[said]]
        counts, taken = Counter(by_name.values()), set(found.values())
        for path, place in by_name.items():
            if path in moved or (counts[place] == 1 and place not in taken):  # else it cannot be both
                found[path] = place
        return list(map(found.get, paths))

    def _is_said(self, path: str, at: str, asked: Set[str]) -> bool:
        """Whether the user says what is meant by a wanted variable: not who moves what it is in, if it is called by a
        name that means something in one run only, and its parameter, which is asked for too, tells which it is."""
        if path not in self._moved:
            return False
        if not may_be_of_run(path) or asked.isdisjoint(self._wanted.variables[path].parameters):
            return True
        ours, theirs = f".{last_part(path)}", f".{last_part(at)}"
        return not (ours.endswith(theirs) or theirs.endswith(ours))

    @cached_property
    def _variables(self) -> Mapping[str, OptimizerVariable]:
        """The wanted optimizer variables, with the paths at which their parameters are stored."""
        variables, moved = self._wanted.variables, self._moved
        if not moved:
            return variables
        stored = cache(lambda parameters: tuple(sorted(moved.get(one, one) for one in parameters)))
        return {path: OptimizerVariable(stored(own), accumulator) for path, (own, accumulator) in variables.items()}

    @cached_property
    def _own(self) -> list[int | None]:
        """The number of what is stored at each wanted path."""
        return list(map(self._index.get, self._wanted.paths))

    @cached_property
    def _is_alike(self) -> bool:
        """Whether the same names are at the same paths, so that equal keys mean the same; as nearly always."""
        names = self._stored.names
        return all(
            place is not None and names[place] == name
            for place, name in zip(self._own, self._wanted.names, strict=True)
        )

    def _by_any_name(self, path: str, own: str, variable: OptimizerVariable | None) -> int | None:
        """What is found by the names, or else by those that the parameter has as well."""
        found = self._by_name(path, own, variable)
        if found is not None or variable is None or not self._tied:
            return found
        paths = (other for one in variable.parameters for other in self._tied.get(one, (one,)))
        return self._by_name(path, own, OptimizerVariable(tuple(dict.fromkeys(paths)), variable.accumulator))

    def _by_name(self, path: str, own: str, variable: OptimizerVariable | None) -> int | None:
        if own != path and _tail(own) != _tail(path):  # the user has named something else
            return None
        if (what := self._wanted.of_programs.get(path)) is not None:
            return self._of_program(own, what)
        alone = variable is None
        if variable is None:  # its parameter may be stored, though it is not wanted
            variable = self._stored.structured(own)
        if variable is None:
            return None
        container, found = container_of(own), self._stored.variables_of.places(variable)
        same = found.get(container, ())
        if len(same) > 1 and own in same and self._stored.variables[own] == variable:
            same = [own]
        if not same and not alone and self._is_beside(container, variable):
            same = [other for paths in found.values() for other in paths]
        return self._index[same[0]] if len(same) == 1 else None

    def _is_beside(self, container: str, variable: OptimizerVariable) -> bool:
        """Whether either side has optimizer variables in the parameters' own container, and neither has others."""
        stored = self._stored.variables_of.containers(variable.parameters)
        wanted = self._wanted_variables_of.containers(variable.parameters)
        beside = set(map(container_of, variable.parameters))
        return len(stored) == len(wanted) == 1 and (container in beside or not stored.isdisjoint(beside))

    def _of_program(self, path: str, what: str) -> int | None:
        """What a static-graph program has once, as its learning rate: that of the same container, or the only one."""
        same = [other for other, one in self._stored.of_programs.items() if one == what]
        found = [other for other in same if container_of(other) == container_of(path)] or same
        return self._index[found[0]] if len(found) == 1 else None

    @cached_property
    def _wanted_variables_of(self) -> VariablesOf:
        return VariablesOf(self._variables, self._moved)


def _tail(path: str) -> str:
    """The last of the parts of a key that dots separate."""
    return path.rpartition("/")[2].rpartition(".")[2]
