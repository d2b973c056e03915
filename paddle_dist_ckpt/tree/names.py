"""Whose an optimizer's variable is: the names that Paddle gives it, and those that are the same in every run.

Paddle numbers variables as it makes them, so its names mean something in one run only: there they say which parameter
they are of, by the name of that parameter's variable. Elsewhere a parameter is known by its key in the state_dict.

    key of an entry                          what it is                            who writes it so
    ---------------------------------------  ------------------------------------  --------------------------------
    linear_0.w_0_moment1_0                   moment1 of the parameter whose        Paddle's state_dict()
    linear_0.w_0_fp32_master_0_moment1_0     variable is linear_0.w_0
    linear_0.w_0_fp32_master_0               its master weight                     Paddle's static programs
    master_weights/linear_0.w_0              its master weight                     Paddle's state_dict()
    fc.weight.moment1                        moment1 of the parameter at the key   saves of whole objects
    d.fc.weight.moment1                      that is called fc.weight (in d)
    fc.weight.master_weight                  its master weight
    fc.weight.moment1_0, fc.weight.w_0       moment1, master weight                Paddle's sharded_state_dict()

A variable that is or was distributed may have ``.dist`` behind its name, which makes no difference.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from ..core.cached import cached_property
from .paths import parent_of, plain_key
from .variables import MASTERS, OptimizerVariable, VariablesOf

__all__ = [
    "SCHEDULER",
    "SHARDED_MASTER",
    "Names",
    "VariableOfRun",
    "is_accumulator",
    "last_part",
    "master_of_run",
    "may_be_of_run",
    "may_be_optimizers",
    "may_end_in_name",
    "parameter_of_run",
    "scheduler_of",
]

_DIST = ".dist"
_MASTER = "master_weight"
SHARDED_MASTER = ".w_0"
SCHEDULER = "/LR_Scheduler"
_ACCUMULATORS = (
    *("moment1", "moment2", "moment2_max", "moment", "velocity", "beta1_pow_acc", "beta2_pow_acc"),
    *("beta1_pow", "beta2_pow", "inf_norm", "momentum", "momentum_acc", "mean_square", "mean_grad"),
    *("_avg_squared_grad", "_avg_squared_update", "momentum_decay_pow", "mu_product", "rho", "d", "y", "m", "prevs"),
    *("learning_rates", "master_weight"),
)
# Tried once where a run of other signs begins, as from anywhere in it the same is found, in quadratic time.
_PARAMETER_OF_RUN = re.compile(r"(?<![^./])([^./]*_\d+\.[wb]_\d+)(?:\.dist)?_\w+_\d+$")
_ACCUMULATOR_OF_RUN = re.compile(rf"_(?:fp32_master|{'|'.join(_ACCUMULATORS)})_\d+(?:\.dist)?$")
_MASTER_KEY = re.compile(r"(.+)_fp32_master_\d+|(|.*?\.)master_weights\.(.+)")
_LEARNING_RATE = "learning_rate"
_OF_PROGRAMS = frozenset({_LEARNING_RATE, "loss_scaling", "num_good_steps", "num_bad_steps"})
_STRUCTURED = re.compile(rf"\.(?:({'|'.join(_ACCUMULATORS)})(?:_0)?|w_0)$")
_NUMBER = r"_\d+(?:\.dist)?(?:_deepcopy_\d+(?:\.dist)?)*"
# What follows a parameter's name. A copy of the parameter has a name that continues likewise, but is another parameter.
_REST = re.compile(rf"(?:_fp32_master{_NUMBER})?(?:_(?!deepcopy_\d)([^\W\d]\w*?){_NUMBER})?")


_LONGEST_REST = 128
"""Characters of a variable's name behind that of its parameter. What is longer Paddle has not made, and to look at each
beginning of it takes quadratic time."""


class VariableOfRun(NamedTuple):
    """The variable name of an optimizer variable's parameter, and the accumulator's name."""

    parameter: str
    accumulator: str


class Names:
    """What the tensors of a checkpoint or of a state_dict are called, and which of them are an optimizer's variables.

    Args:
        paths: Their paths.
        names: The framework's name of each one's variable, or None.
    """

    def __init__(self, paths: Sequence[str], names: Sequence[str | None]) -> None:
        self.paths, self.names = paths, names

    @cached_property
    def parameters(self) -> dict[str, list[str]]:
        """The paths of each parameter by its variable's name, ascending."""
        return self._table[0]

    @cached_property
    def _table(self) -> tuple[dict[str, list[str]], dict[str, VariableOfRun | None]]:
        """The parameters, and what each variable's name says of an optimizer variable."""
        bearers: dict[str, list[str]] = defaultdict(list)
        for path, name in zip(self.paths, self.names, strict=True):
            if name is not None:
                bearers[name].append(path)
        parameters: dict[str, list[str]] = {}
        parsed: dict[str, VariableOfRun | None] = {}
        latest = ""
        # A parameter's name comes before those of its accumulators. Of the parameters by whose names one begins, the
        # longest comes last; so if the latest of all is among these, it is the longest.
        for name in sorted(bearers):
            rest = name[len(latest) :] if latest and name.startswith(latest) else ""
            accumulator = _accumulator(rest) if rest else ""
            variable = VariableOfRun(latest, accumulator) if accumulator else _parse(name, parameters)
            parsed[name] = variable
            paths = bearers[name]
            if variable is not None and len(paths) == 1 and _is_at(paths[0], name):
                continue
            own = [path for path in paths if not _is_variables(path, name, variable)]
            if own:
                parameters[name], latest = sorted(own), name
        return parameters, parsed

    @cached_property
    def variables(self) -> dict[str, OptimizerVariable]:
        """The optimizer variables, as far as something says whose they are.

        That is their key, if it is Paddle's name of one; or their variable's name, if the key is structured; or else
        the key alone, if it begins with a parameter's key and ends with the name of one of Paddle's accumulators.
        """
        found: dict[str, OptimizerVariable] = {}
        groups = {name: tuple(own) for name, own in self.parameters.items()}
        parsed = self._table[1]
        for path, name in zip(self.paths, self.names, strict=True):
            if name is not None and _is_at(path, name):
                variable = parsed[name]
            else:
                variable = self.of_run(path) if may_end_in_name(path) else None
            if variable is not None:
                found[path] = OptimizerVariable(groups[variable[0]], variable[1])
                continue
            structured = self._by_name(path, name) or self.structured(path)
            if structured is not None:
                found[path] = structured
        return found

    def of_run(self, path: str) -> VariableOfRun | None:
        """Which variable a path is, if it ends in Paddle's own name of one of a parameter that is among these."""
        parameters, parsed = self._table
        container, _, key = path.rpartition("/")
        if "~" in key:
            key = last_part(path)
        if container.endswith(MASTERS):
            parameter = _table_name(key, parameters)
            return None if parameter is None else VariableOfRun(parameter, _MASTER)
        variable = parsed[key] if key in parsed else _parse(key, parameters)
        return None if self._is_parameter(path, key) else variable

    def _by_name(self, path: str, name: str | None) -> OptimizerVariable | None:
        """Which variable a path with a structured key is, by its variable's name."""
        variable = self._table[1].get(name) if name is not None else None
        if variable is None or self._is_parameter(path, name):
            return None
        last = last_part(path)
        end = next((end for end in _ends_of(variable.accumulator) if last.endswith(end)), None)
        if end is None:
            return None
        # Without one, the names are of several ranks that count for themselves, and this one says nothing.
        exact = self._by_name_and_key.get((variable.parameter, last[: -len(end)]))
        return None if exact is None else OptimizerVariable(exact, variable.accumulator)

    @cached_property
    def _by_name_and_key(self) -> Mapping[tuple[str, str], tuple[str, ...]]:
        """The paths of each parameter by its variable's name and its key, without and with its container's own name."""
        places: dict[tuple[str, str], list[str]] = defaultdict(list)
        for name, own in self.parameters.items():
            for path in own:
                key = last_part(path)
                places[name, key].append(path)
                places[name, f"{last_part(parent_of(path))}.{key}"].append(path)
        return {pair: tuple(own) for pair, own in places.items()}

    def _is_parameter(self, path: str, name: str | None) -> bool:
        """Whether a path is one of the parameters of this name."""
        return name in self.parameters and self._parameter_names.get(path) == name

    @cached_property
    def _parameter_names(self) -> dict[str, str]:
        return {path: name for name, own in self.parameters.items() for path in own}

    def structured(self, path: str) -> OptimizerVariable | None:
        """Which variable a path is by its structured key, of a parameter that is among these tensors.

        Such keys are ``fc.weight.moment1``, and as optimizers' ``sharded_state_dict()`` has them
        ``fc.weight.moment1_0`` and, for master weights, ``fc.weight.w_0``. With the container's own name before them,
        ``d.fc.weight.moment1``, they tell models apart.
        """
        match = _STRUCTURED.search(path)
        if match is None:
            return None
        candidates = self._by_key.get(last_part(path[: match.start()]), [])
        if len(candidates) > 1:
            candidates = [other for other in candidates if parent_of(other) == parent_of(path)]
        if len(candidates) != 1 or candidates[0] == path:
            return None
        return OptimizerVariable((candidates[0],), _MASTER if match[1] is None else match[1])

    @cached_property
    def _by_key(self) -> Mapping[str, list[str]]:
        places: dict[str, list[str]] = defaultdict(list)
        for path in self.paths:
            container, key = parent_of(path), last_part(path)
            places[key].append(path)
            if container:
                places[f"{last_part(container)}.{key}"].append(path)
        return places

    @cached_property
    def variables_of(self) -> VariablesOf:
        """The optimizer variables, by their parameters."""
        return VariablesOf(self.variables, {})

    @cached_property
    def of_programs(self) -> dict[str, str]:
        """What a static-graph program has once, by path: what it is, which its name says before a number. It is called
        so and is under that name."""
        named = ((path, name, name.rpartition("_")) for path, name in zip(self.paths, self.names, strict=True) if name)
        found = ((path, name, what) for path, name, (what, _, number) in named if number.isdecimal())
        return {path: what for path, name, what in found if what in _OF_PROGRAMS and last_part(path) == name}

    @cached_property
    def learning_rates(self) -> list[str]:
        """The paths of static-graph programs' learning rates."""
        return [path for path, what in self.of_programs.items() if what == _LEARNING_RATE]

    @cached_property
    def masters(self) -> Mapping[str | None, str]:
        """The path of each master weight by what that says of it, unless several say the same."""
        said = [(master_of_run(path), path) for path in self.paths]
        counts = Counter(name for name, _ in said)
        return {name: path for name, path in said if name is not None and counts[name] == 1}


def may_be_optimizers(path: str) -> bool:
    """Whether a path may be an optimizer variable's, in any form. Many a state has none of these."""
    return may_end_in_name(path) or _STRUCTURED.search(path) is not None


def is_accumulator(name: str) -> bool:
    """Whether it is the name of an accumulator, or of master weights, of one of Paddle's own optimizers."""
    return name in _ACCUMULATORS


def may_be_of_run(path: str) -> bool:
    """Whether a path looks like that of an optimizer variable under Paddle's own name of it, of whatever parameter."""
    return MASTERS in path or parameter_of_run(path) is not None or _ACCUMULATOR_OF_RUN.search(path) is not None


def master_of_run(path: str) -> str | None:
    """Where a path says that a master weight is: the flat key of its container, and Paddle's name of its parameter.

    That is what remains of it without what makes it one, which differs in dynamic mode and in programs. None if it is
    the path of something else.
    """
    if MASTERS[1:] not in path and "_fp32_master_" not in path:
        return None
    match = _MASTER_KEY.fullmatch(plain_key(path))
    return match and (match[1] or f"{match[2] or ''}{match[3]}")


def parameter_of_run(key: str) -> str | None:
    """What Paddle calls the parameter of a key that looks like its own name of an optimizer variable: ``linear_0.w_0``
    of ``linear_0.w_0_moment1_0``. None of any other key."""
    match = _PARAMETER_OF_RUN.search(key)
    return match[1] if match else None


def may_end_in_name(path: str) -> bool:
    """Whether a path may end in Paddle's own name of an optimizer variable. Many a state has none of these."""
    if path[-1:].isdigit() or path.endswith(_DIST):
        return "_" in path.rpartition("/")[2] or MASTERS in path
    return MASTERS in path


def _parse(key: str, parameters: Mapping[str, object]) -> VariableOfRun | None:
    first = max(0, len(key) - _LONGEST_REST)
    end = key.rfind("_", first)
    while end > 0:
        parameter = _table_name(key[:end], parameters)
        if parameter is not None:
            accumulator = _accumulator(key[end:])
            if accumulator:
                return VariableOfRun(parameter, accumulator)
        end = key.rfind("_", first, end)
    return None


def _accumulator(rest: str) -> str:
    """Which accumulator what follows a parameter's name is of; none is ""."""
    return _accumulator_of(rest) if len(rest) <= _LONGEST_REST else ""


@lru_cache(maxsize=4096)
def _accumulator_of(rest: str) -> str:
    """The same of what is not too long. The same few follow all the names."""
    match = _REST.fullmatch(rest)
    return "" if match is None else match[1] or _MASTER


def _table_name(name: str, parameters: Mapping[str, object]) -> str | None:
    """A variable's name as a table has it, distributed or not; None if it does not."""
    if name in parameters:
        return name
    other = name[: -len(_DIST)] if name.endswith(_DIST) else name + _DIST
    return other if other in parameters else None


def scheduler_of(path: str) -> str | None:
    """The path of the learning rate's scheduler in which a value is, or that it is."""
    before, found, after = path.partition(SCHEDULER)
    return before + found if found and after[:1] in ("", "/") else None


def last_part(path: str) -> str:
    """The last part of a path, as a str."""
    part = path.rpartition("/")[2]
    return part if "~" not in part else plain_key("/" + part)


def _is_at(path: str, name: str) -> bool:
    """Whether a path's last part is this name, and it is none of a master weight; not of all is that seen."""
    return path.endswith("/" + name) and "~" not in name and MASTERS not in path


def _is_variables(path: str, name: str, variable: VariableOfRun | None) -> bool:
    """Whether a path is that of an optimizer variable, if its variable's name is so, and says so."""
    if MASTERS in path and parent_of(path).endswith(MASTERS):
        return True
    if variable is None:
        return False
    last = last_part(path)
    return last == name or last.endswith(_ends_of(variable.accumulator))


@lru_cache(maxsize=4096)
def _ends_of(accumulator: str) -> tuple[str, ...]:
    """How structured keys end that are an accumulator's, here or in ``sharded_state_dict()``."""
    ends = (f".{accumulator}", f".{accumulator}_0")
    return (*ends, SHARDED_MASTER) if accumulator == _MASTER else ends
