"""What could be called can be called, with the same arguments: names and commands are added to, never taken away."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from test.golden.make_public import public

GOLDEN = json.loads(Path(__file__).with_name("public.json").read_text("utf-8"))


def broken(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is no more as it was."""
    return [*of_names(before["names"], now["names"]), *of_commands(before["commands"], now["commands"])]


def of_names(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    for name, was in before.items():
        if name not in now:
            yield f"{name} is gone"
            continue
        yield from of_parameters(name, was["parameters"], now[name]["parameters"])
        yield from (f"{name} is no {base}" for base in set(was.get("bases", ())) - set(now[name].get("bases", ())))
        for member, parameters in was.get("members", {}).items():
            if member not in now[name].get("members", {}):
                yield f"{name}.{member} is gone"
            else:
                yield from of_parameters(f"{name}.{member}", parameters, now[name]["members"][member])


def of_parameters(name: str, before: dict[str, list[str]] | None, now: dict[str, list[str]] | None) -> Iterator[str]:
    if before is None or now is None:
        if before is not None:
            yield f"{name} cannot be called"
        return
    for parameter, was in before.items():
        if now.get(parameter) != was:
            yield f"{name}: {parameter} was {was}, and is {now.get(parameter, 'gone')}"
    for parameter, (kind, default) in now.items():
        if parameter not in before and default == "required" and not kind.startswith("VAR_"):
            yield f"{name}: {parameter} is new and required"
    placed = [parameter for parameter, (kind, _) in before.items() if kind.startswith("POSITIONAL")]
    if placed != [parameter for parameter, (kind, _) in now.items() if kind.startswith("POSITIONAL")][: len(placed)]:
        yield f"{name}: the order of {', '.join(placed)} has changed"


def of_commands(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    for command, options in before.items():
        if command not in now:
            yield f"the command {command} is gone"
            continue
        for option, was in options.items():
            found = now[command].get(option)
            if found is None or not set(was["texts"]) <= set(found["texts"]):
                yield f"{command}: {', '.join(was['texts'])} is gone"
            elif (was["required"], was["default"]) != (found["required"], found["default"]):
                yield f"{command}: {option} was {was}, and is {found}"
        for option, found in now[command].items():
            if found["required"] and option not in options:
                yield f"{command}: {option} is new and required"


def test_nothing_is_taken_away() -> None:
    assert broken(GOLDEN, public()) == []


def test_all_that_there_is_will_be_kept() -> None:
    """Whoever adds something writes the file anew, with ``python -m test.golden.make_public``."""
    assert broken(public(), GOLDEN) == []


def test_what_is_taken_away_is_found() -> None:
    now = copy.deepcopy(GOLDEN)
    del now["names"]["stack"]
    del now["names"]["SaveReport"]["members"]["files"]
    now["names"]["CollectiveError"]["bases"].remove("RankFailureError")
    now["names"]["SaveOptions"]["parameters"]["block_bytes"][1] = "4096"
    load = now["names"]["load"]["parameters"]
    load["path"] = load.pop("path")  # now the last
    del now["names"]["export"]["parameters"]["dtype"]
    now["names"]["verify"]["parameters"]["level"] = ["KEYWORD_ONLY", "required"]
    del now["commands"]["report"]
    now["commands"]["cat"]["region"]["texts"] = ["--part"]
    now["commands"]["diff"]["prefix_a"]["default"] = "'model'"
    assert broken(GOLDEN, now) == [
        "CollectiveError is no RankFailureError",
        "SaveOptions: block_bytes was ['KEYWORD_ONLY', '1048576'], and is ['KEYWORD_ONLY', '4096']",
        "SaveReport.files is gone",
        "export: dtype was ['KEYWORD_ONLY', 'None'], and is gone",
        "load: the order of path, model, optimizer, map_location, nthreads has changed",
        "stack is gone",
        "verify: level is new and required",
        "cat: --slice is gone",
        "the command report is gone",
        "diff: prefix_a was {'texts': ['--prefix-a'], 'required': False, 'default': 'None'}, and is "
        "{'texts': ['--prefix-a'], 'required': False, 'default': \"'model'\"}",
    ]
