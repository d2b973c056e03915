"""Single statements of an ``aoa_config``: those that nothing comes of, and those that Paddle's engine takes wrongly."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from ..core.parts import IdleStatement

__all__ = ["OF_PARTS", "at_fault", "check_counts", "check_numbers", "check_rows", "idle_statements"]

_LAST_OF_NAMES = 3  # macros of a priority up to this put names in the place of patterns; later ones rewrite statements
_NOTHING = "_"
OF_PARTS = ("fused_ffn", "fused_qkv_old")
"""Macros for which it matters how many parts a tensor is in."""
_MOST_NAMES = 3  # in a message
_LEAST_STATEMENTS = 1000  # that one may stand for
_NUMBER = re.compile(r"\$[A-Z_]+")
_HEADS = re.compile(r"\b(num_heads|num_key_value_groups)\s*=\s*(\d+)")
_NAME = re.compile(r"[A-Za-z_$][\w.$*]*")


class _Line(NamedTuple):
    """A statement without patterns: the tensors that it takes, those that it makes, and its other words."""

    taken: list[str]
    made: list[str]
    words: list[str]


def at_fault(config: Mapping[str, Any], try_out: Callable[[dict[str, Any]], object]) -> str | None:
    """The statement with which an ``aoa_config`` begins to fail: without it and those after it, it does not.

    Args:
        config: The ``aoa_config``, which fails.
        try_out: Goes through all statements of a config, and raises if it cannot.

    Returns:
        The statement; None if the config does not fail, or fails without any.
    """
    statements, reverse = list(config["aoa_statements"]), bool(config.get("aoa_config_reverse"))

    def fails(count: int) -> bool:
        first = statements[len(statements) - count :] if reverse else statements[:count]
        try:
            try_out({**config, "aoa_statements": first, "enable_traceback": False})
        except Exception:
            return True
        return False

    if fails(0) or not fails(len(statements)):
        return None
    passing, failing = 0, len(statements)
    while failing - passing > 1:
        middle = (passing + failing) // 2
        passing, failing = (passing, middle) if fails(middle) else (middle, failing)
    return statements[-failing if reverse else failing - 1]


def check_numbers(config: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Refuse a statement that stands for very many more than there are tensors.

    Paddle 3.3.1 makes one for each layer's number with each expert's, whether or not the layer has such an expert.

    Args:
        config: The ``aoa_config``.
        stored: The stored tensors, by flat key.

    Raises:
        ValueError: there is such a statement.
    """
    for statement in config["aoa_statements"]:
        for name in _NAME.findall(statement):
            numbers = dict.fromkeys(_NUMBER.findall(name))
            if len(numbers) < 2:
                continue
            pattern = re.compile(_NUMBER.sub(r"(\\d+)", re.escape(name).replace(r"\$", "$")))
            found = list(zip(*(match.groups() for match in map(pattern.fullmatch, stored) if match), strict=True))
            count = math.prod(len(set(values)) for values in found) if found else 0
            if count > max(_LEAST_STATEMENTS, 2 * len(stored)):
                raise ValueError(
                    f"{statement!r} stands for {count:,} statements, one for all combinations of numbers in keys like "
                    f"{name}, and the checkpoint has {len(stored):,} tensors; write several statements for fewer keys"
                )


def check_counts(
    module: ModuleType, config: Mapping[str, Any], stored: Mapping[str, Any], wanted: Mapping[str, Any] | None
) -> None:
    """Refuse statements taken in reverse that need to know how many parts a fused tensor is in.

    Of one that is taken apart, Paddle 3.3.1 looks for it among the wanted tensors then, where it is not, and goes on
    with 1; and Q, K and V are equal parts of it. Of one that is made, it fails.

    Args:
        module: The module with the engine.
        config: The ``aoa_config``.
        stored, wanted: The parts of tensors, as the engine takes them.

    Raises:
        ValueError: there is such a statement, and the tensor is made, or is in more parts than one, or it is not known
            in how many, or has fewer heads of K and V than of Q.
    """
    if not config.get("aoa_config_reverse"):
        return
    for statement, lines in _lines(module, config, stored, wanted):
        for line in lines:
            if not any(word in OF_PARTS for word in line.words):
                continue
            if len(line.made) == 1 < len(line.taken):
                other = f"{', '.join(line.taken)} -> {line.made[0]}"
                raise ValueError(
                    f"{statement!r} is not taken in reverse, since Paddle's engine fails on it; write it the other way "
                    f"round, as '{other}, ...', without aoa_config_reverse"
                )
            if len(line.made) < 2:
                continue
            advice = f"write {statement!r} forwards, without aoa_config_reverse"
            heads = dict(_HEADS.findall(statement))
            if "fused_qkv_old" in line.words and len({*map(int, heads.values())}) > 1:
                raise ValueError(
                    f"{statement!r} is not taken in reverse, since Paddle's engine takes equal parts for Q, K and V; "
                    f"write '{line.taken[0]} -> {', '.join(line.made)}, ...' in its place, without aoa_config_reverse"
                )
            for key in _family(module, line.taken, stored):
                try:
                    counts = [len(stored[key])]
                except ValueError as error:
                    raise ValueError(f"{error}, or {advice}") from None
                if wanted is not None and key in wanted:
                    counts.append(len(wanted[key]))
                if max(counts) > 1:
                    raise ValueError(
                        f"{key} is in {max(counts)} parts, which Paddle's engine takes for one where {statement!r} is "
                        f"taken in reverse, so that something else would come out; {advice}"
                    )


def check_rows(
    module: ModuleType,
    config: Mapping[str, Any],
    stored: Mapping[str, Any],
    wanted: Mapping[str, Any],
    engine: Any,
    tells_rows: Callable[[str], bool],
) -> None:
    """Refuse to fuse a tensor anew of whose parts only the columns are known, for ranks that want rows of it each.

    Of these Paddle 3.3.1 counts the rows as well, so that a tensor would change whose layout does not.

    Args:
        module, config, stored, wanted: See :func:`check_counts`.
        engine: The engine, which has gone through all statements.
        tells_rows: Whether it is known how a stored tensor was cut along its rows, too.

    Raises:
        ValueError: there is a statement about such a tensor.
    """
    reverse = bool(config.get("aoa_config_reverse"))
    for statement, lines in _lines(module, config, stored, wanted):
        for line in lines:
            if not (len(line.taken) == len(line.made) == 1 and any(word in OF_PARTS for word in line.words)):
                continue
            source = engine.context.resolve_mapping_chain(line.taken[0], reverse=not reverse)
            made = _family(module, [engine.context.resolve_mapping_chain(line.made[0], reverse=reverse)], wanted)
            rows = {part.global_offset[:1] for key in made for part in wanted[key]}
            if len(rows) > 1 and not tells_rows(source):
                raise ValueError(
                    f"{statement!r} depends on how many parts {source} was in, of which the checkpoint tells only the "
                    f"columns, and ranks want rows of {made[0]} each; LoadOptions(recipes=...) can say what is meant"
                )


def idle_statements(
    module: ModuleType, config: Mapping[str, Any], stored: Mapping[str, Any], wanted: Mapping[str, Any] | None
) -> list[IdleStatement]:
    """The statements that change nothing. For the arguments see :func:`check_counts`."""
    there = set(_parameters(module, stored))
    asked = None if wanted is None else set(_parameters(module, wanted))
    found = []
    statements = _lines(module, config, stored, wanted)
    for statement, lines in statements if config.get("aoa_config_reverse") else reversed(statements):
        used = [line for line in lines if _is_used(line, there, asked)]
        if asked is not None:
            asked.update(name for line in used for name in line.taken)
        if not used:
            names = tuple(_NUMBER.sub("*", name) for name in _NAME.findall(statement))
            found.append(IdleStatement(statement, _reason(lines), names, tuple(module.OPTIMIZER_STATE_NAME)))
    return found if config.get("aoa_config_reverse") else found[::-1]


def _is_used(line: _Line, stored: set[str], asked: set[str] | None) -> bool:
    if line.made == [_NOTHING]:
        return any(name in stored for name in line.taken)
    return asked is None or any(name in asked for name in line.made)


def _reason(lines: Sequence[_Line]) -> str:
    if not lines:
        return "no stored tensor is like it"
    if lines[0].made == [_NOTHING]:
        return f"{_listed(lines[0].taken)} is not stored"
    return f"nothing asks for {_listed(name for line in lines for name in line.made)}"


def _listed(names: Iterable[str]) -> str:
    all_of_them = list(dict.fromkeys(names))
    return ", ".join(all_of_them[:_MOST_NAMES]) + (", ..." if len(all_of_them) > _MOST_NAMES else "")


def _parameters(module: ModuleType, keys: Iterable[str]) -> Iterable[str]:
    return (module.split_optimizer_state_key(key)[0] for key in keys)


def _family(module: ModuleType, names: Sequence[str], stored: Mapping[str, Any]) -> list[str]:
    """The stored keys of parameters, or of those of their states that are cut as they are."""
    return [
        key
        for key in stored
        if (split := module.split_optimizer_state_key(key))[0] in names and "_pow_acc" not in (split[1] or "")
    ]


def _lines(
    module: ModuleType, config: Mapping[str, Any], stored: Mapping[str, Any], wanted: Mapping[str, Any] | None
) -> list[tuple[str, list[_Line]]]:
    """All statements, each with what it is without patterns; by the macros of Paddle and of programs."""
    from paddle.distributed.flex_checkpoint.aoa import macros

    reverse = bool(config.get("aoa_config_reverse"))
    lexer = module.Lexer(module.AOAShardInfoContext(stored, wanted, reverse))
    found = []
    for statement in config["aoa_statements"]:
        texts = [statement]
        for macro in macros.macro_registry.macros:
            if macro["priority"] <= _LAST_OF_NAMES:
                texts = lexer.apply_single_macro_to_all(texts, macro["func"])
        found.append((statement, [_line(lexer.tokenize(text), reverse) for text in texts]))
    return found


def _line(tokens: Sequence[Any], reverse: bool) -> _Line:
    from paddle.distributed.flex_checkpoint.aoa import macros

    kinds = [token.type.name for token in tokens]
    arrow = kinds.index("RARROW") if "RARROW" in kinds else len(kinds)
    names = [(i, token.value) for i, token in enumerate(tokens) if kinds[i] == "IDENTIFIER"]
    left = [name.removesuffix("^T") for i, name in names if i < arrow]
    right = [name for i, name in names if i > arrow]
    end = next((i for i, name in enumerate(right) if name in macros.GLOBAL_ATTRIBUTE_KEYWORDS), len(right))
    taken, made = (right[:end], left) if reverse else (left, right[:end])
    return _Line(taken, made, right[end:])
