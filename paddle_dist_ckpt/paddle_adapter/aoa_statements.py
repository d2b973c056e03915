"""Single statements of an ``aoa_config``: those that nothing comes of, and those that Paddle's engine takes wrongly."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from paddle.distributed.flex_checkpoint.aoa import aoa_engine as paddles
from paddle.distributed.flex_checkpoint.aoa import macros

from ..core.cached import cached_property
from ..core.parts import IdleStatement

__all__ = ["OF_PARTS", "Statements", "at_fault", "check_numbers"]

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


class Statements:
    """The statements of an ``aoa_config``, each with what it is without patterns, by the macros of Paddle and of
    programs.

    Args:
        config: The ``aoa_config``.
        stored, wanted: The parts of tensors, as the engine takes them.
    """

    def __init__(self, config: Mapping[str, Any], stored: Mapping[str, Any], wanted: Mapping[str, Any] | None) -> None:
        self._texts: Sequence[str] = config["aoa_statements"]
        self._reverse = bool(config.get("aoa_config_reverse"))
        self._stored, self._wanted = stored, wanted

    @cached_property
    def _lines(self) -> list[tuple[str, list[_Line]]]:
        lexer = paddles.Lexer(paddles.AOAShardInfoContext(self._stored, self._wanted, self._reverse))
        found = []
        for statement in self._texts:
            texts = [statement]
            for macro in macros.macro_registry.macros:
                if macro["priority"] <= _LAST_OF_NAMES:
                    texts = lexer.apply_single_macro_to_all(texts, macro["func"])
            found.append((statement, [_line(lexer.tokenize(text), self._reverse) for text in texts]))
        return found

    def _of_parts(self) -> Iterator[tuple[str, _Line]]:
        """Those for which it matters how many parts a tensor is in."""
        for statement, lines in self._lines:
            yield from ((statement, line) for line in lines if any(word in OF_PARTS for word in line.words))

    def check_counts(self) -> None:
        """Refuse statements taken in reverse that need to know how many parts a fused tensor is in.

        Of one that is taken apart, Paddle 3.3.1 looks for it among the wanted tensors then, where it is not, and goes
        on with 1; and Q, K and V are equal parts of it. Of one that is made, it fails.

        Raises:
            ValueError: there is such a statement, and the tensor is made, or is in more parts than one, or it is not
                known in how many, or has fewer heads of K and V than of Q.
        """
        for statement, line in self._of_parts() if self._reverse else ():
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
            for key in _family(line.taken, self._stored):
                try:
                    counts = [len(self._stored[key])]
                except ValueError as error:
                    raise ValueError(f"{error}, or {advice}") from None
                if self._wanted is not None and key in self._wanted:
                    counts.append(len(self._wanted[key]))
                if max(counts) > 1:
                    raise ValueError(
                        f"{key} is in {max(counts)} parts, which Paddle's engine takes for one where {statement!r} is "
                        f"taken in reverse, so that something else would come out; {advice}"
                    )

    def check_rows(self, engine: Any, tells_rows: Callable[[str], bool]) -> None:
        """Refuse to fuse a tensor anew of whose parts only the columns are known, for ranks that want rows of it each.

        Of these Paddle 3.3.1 counts the rows as well, so that a tensor would change whose layout does not.

        Args:
            engine: The engine, which has gone through all statements.
            tells_rows: Whether it is known how a stored tensor was cut along its rows, too.

        Raises:
            ValueError: there is a statement about such a tensor.
        """
        wanted = self._wanted or {}
        some = any(word in statement for word in OF_PARTS for statement in self._texts)  # else no lines are made for it
        for statement, line in self._of_parts() if wanted and some else ():
            if not len(line.taken) == len(line.made) == 1:
                continue
            source = engine.context.resolve_mapping_chain(line.taken[0], reverse=not self._reverse)
            made = _family([engine.context.resolve_mapping_chain(line.made[0], reverse=self._reverse)], wanted)
            rows = {part.global_offset[:1] for key in made for part in wanted[key]}
            if len(rows) > 1 and not tells_rows(source):
                raise ValueError(
                    f"{statement!r} depends on how many parts {source} was in, of which the checkpoint tells only the "
                    f"columns, and ranks want rows of {made[0]} each; LoadOptions(recipes=...) can say what is meant"
                )

    def idle(self) -> list[IdleStatement]:
        """Those that change nothing."""
        there = set(_parameters(self._stored))
        asked = None if self._wanted is None else set(_parameters(self._wanted))
        found = []
        for statement, lines in self._lines if self._reverse else reversed(self._lines):
            used = [line for line in lines if _is_used(line, there, asked)]
            if asked is not None:
                asked.update(name for line in used for name in line.taken)
            if not used:
                names = tuple(_NUMBER.sub("*", name) for name in _NAME.findall(statement))
                found.append(IdleStatement(statement, _reason(lines), names, tuple(paddles.OPTIMIZER_STATE_NAME)))
        return found if self._reverse else found[::-1]


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


def _parameters(keys: Iterable[str]) -> Iterable[str]:
    return (paddles.split_optimizer_state_key(key)[0] for key in keys)


def _family(names: Sequence[str], stored: Mapping[str, Any]) -> list[str]:
    """The stored keys of parameters, or of those of their states that are cut as they are."""
    return [
        key
        for key in stored
        if (split := paddles.split_optimizer_state_key(key))[0] in names and "_pow_acc" not in (split[1] or "")
    ]


def _line(tokens: Sequence[Any], reverse: bool) -> _Line:
    kinds = [token.type.name for token in tokens]
    arrow = kinds.index("RARROW") if "RARROW" in kinds else len(kinds)
    names = [(i, token.value) for i, token in enumerate(tokens) if kinds[i] == "IDENTIFIER"]
    left = [name.removesuffix("^T") for i, name in names if i < arrow]
    right = [name for i, name in names if i > arrow]
    end = next((i for i, name in enumerate(right) if name in macros.GLOBAL_ATTRIBUTE_KEYWORDS), len(right))
    taken, made = (right[:end], left) if reverse else (left, right[:end])
    return _Line(taken, made, right[end:])
