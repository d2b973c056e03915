"""Which stored tensor is wanted: by equal keys, or by what the keys say of a parameter and its optimizer variables.

A key such as ``linear_0.w_0.dist_moment1_0`` means something only in the run that made it. It is translated by a table
of that run's variable names: the wanted keys by those of the tensors that are to be filled, the stored ones by those in
`.metadata`. What no table knows is only found under an equal key, so that no tensor gets another one's data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property

from ..core.naming import (
    OptimizerVariable,
    is_learning_rate,
    parameters_of,
    structured_variables,
    variables_of_run,
)

__all__ = ["StoredNames", "WantedNames"]


class WantedNames:
    """What is wanted.

    Args:
        paths: The wanted tensors.
        of_run: The optimizer variables among them whose keys depend on the run that wants them.
        moved: The stored path for each wanted one that the user has named.
    """

    def __init__(
        self, paths: Sequence[str], of_run: Mapping[str, OptimizerVariable], moved: Mapping[str, str] | None = None
    ) -> None:
        self.paths, self.of_run, self.moved = paths, of_run, moved or {}

    @cached_property
    def variables(self) -> Mapping[str, OptimizerVariable]:
        """All optimizer variables that are recognised."""
        rest = [path for path in self.paths if path not in self.of_run]
        return {**structured_variables(rest, rest), **self.of_run}

    def variable(self, path: str) -> OptimizerVariable | None:
        """Which optimizer variable a path is, in terms of the stored parameters' paths."""
        found = self.variables.get(path)
        return None if found is None else found._replace(parameter=self.stored(found.parameter))

    def has_learning_rate_beside(self, path: str) -> bool:
        """Whether a static-graph program's learning rate is wanted in the container in which a scheduler's value is."""
        return any(path.startswith(_container(rate) + "/") for rate in self._learning_rates)

    @cached_property
    def _learning_rates(self) -> list[str]:
        return [path for path in self.paths if is_learning_rate(path)]

    def stored(self, path: str) -> str:
        """The path under which something is to be looked for first."""
        return self.moved.get(path, path)


class StoredNames:
    """What a checkpoint has.

    Args:
        index: The number of each tensor by its path.
        paths: Their paths.
        names: The names that their variables had in the run that saved them.
    """

    def __init__(self, index: Mapping[str, int], paths: Sequence[str], names: Sequence[str | None]) -> None:
        self._index, self._paths, self._names = index, paths, names

    def place(self, path: str, wanted: WantedNames) -> int | None:
        """The number of the tensor that is wanted under a path, or None."""
        own = wanted.stored(path)
        if own in self._index and (path not in wanted.of_run or path in wanted.moved):
            return self._index[own]
        variable = wanted.variable(path)
        if variable is None:
            return self._learning_rate(own) if is_learning_rate(own) else self._by_structured_name(own)
        place = self._of_variable(own, variable)
        if place is not None or own in self._variables:
            return place
        return self._index.get(own)  # it is not known which parameter that is of, so only its name speaks for it

    def _of_variable(self, path: str, variable: OptimizerVariable) -> int | None:
        """An optimizer variable: that of the same container, or one of which either side is beside the parameter."""
        found = self._by_variable.get(variable, [])
        container, beside = _container(path), _container(variable.parameter)
        same = [other for other in found if _container(other) == container]
        if not same and container != beside:
            found = [other for other in found if _container(other) == beside]
        found = same or found
        return self._index[found[0]] if len(found) == 1 else None

    def _learning_rate(self, path: str) -> int | None:
        """The learning rate of a static-graph program: that of the same container, or the only one."""
        same = [other for other in self._learning_rates if _container(other) == _container(path)]
        found = same or self._learning_rates
        return self._index[found[0]] if len(found) == 1 else None

    @property
    def has_learning_rate(self) -> bool:
        """Whether there is a learning rate of a static-graph program."""
        return bool(self._learning_rates)

    @cached_property
    def _learning_rates(self) -> list[str]:
        return [path for path in self._paths if is_learning_rate(path)]

    def _by_structured_name(self, path: str) -> int | None:
        """An optimizer variable whose parameter is not wanted, but called alike by its structured name."""
        variable = structured_variables([path], self._paths).get(path)
        return None if variable is None else self._of_variable(path, variable)

    @cached_property
    def _parameters(self) -> dict[str, str]:
        return parameters_of(self._paths, self._names)

    @cached_property
    def _variables(self) -> Mapping[str, OptimizerVariable]:
        """The optimizer variables that are recognised, by path."""
        of_run = variables_of_run(self._paths, self._names, self._parameters)
        rest = [path for path in self._paths if path not in of_run]
        return {**structured_variables(rest, rest), **of_run}

    @cached_property
    def _by_variable(self) -> Mapping[OptimizerVariable, list[str]]:
        places: dict[OptimizerVariable, list[str]] = defaultdict(list)
        for path, variable in self._variables.items():
            places[variable].append(path)
        return places


def _container(path: str) -> str:
    """Where an entry is; that of a master weight is its optimizer's."""
    return path.rpartition("/")[0].removesuffix("/master_weights")
