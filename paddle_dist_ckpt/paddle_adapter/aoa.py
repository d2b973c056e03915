"""Paddle's ``aoa_config``: statements that say which stored tensors become which wanted ones.

The statements are read by Paddle's own engine, macros that programs have registered included. It is told what is
stored and what is wanted, and says of which slices of which stored tensors each wanted one is made; those become parts.
Three things are done otherwise than Paddle 3.3 does them: a cast of a parameter is not one of its optimizer's states, a
key that no statement gives anything to is looked up as in any other load, and what cannot be known is an error.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import paddle

from ..core.box import Box
from ..core.dtypes import DTYPES
from ..core.parts import Arranged, IdleStatement, Part, SourceTensor, WantedTensor
from ..errors import UnsupportedValueError
from .sharded_weight import is_sharded_weight

__all__ = ["PaddleArranger"]

_logger = logging.getLogger("paddle_dist_ckpt")
_STATEMENT_ERRORS = (AssertionError, ArithmeticError, LookupError, RuntimeError, SyntaxError, TypeError, ValueError)

# Statements that are tried first, and what must come of them: whether the engine is the one that is known here.
_PROBE = ["a^T, b -> t, axis=0", "t -> x, dtype='float16'"]
_PROBE_TENSORS = (
    {key: SourceTensor(shape, DTYPES["float32"], [(0, 0)]) for key, shape in (("a", (2, 3)), ("b", (1, 2)))},
    {"x": WantedTensor((4, 2), "float16", [(0, 0)])},
)
_PROBE_ANSWER = {
    "x": Arranged(
        (4, 2),
        [
            Part("a", Box((0, 0), (2, 3)), (1, 0), Box((0, 0), (3, 2)), "float16"),
            Part("b", Box((0, 0), (1, 2)), (0, 1), Box((3, 0), (1, 2)), "float16"),
        ],
    )
}


class PaddleArranger:
    """What an ``aoa_config`` says. Implements :class:`..core.parts.Arranger`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = dict(config)
        self.idles = not self._config.get("aoa_statements")
        self.rules = json.dumps(self._config, sort_keys=True)

    def by(self, rules: str) -> PaddleArranger:
        """See :class:`..core.parts.Arranger`."""
        return PaddleArranger(json.loads(rules))

    def corner(self, value: Any) -> tuple[int, ...] | None:
        """See :class:`..core.parts.Arranger`."""
        if not is_sharded_weight(value):
            return None
        corner = tuple(map(int, value.global_offset))
        return corner if value.global_shape else ()

    def arrange(
        self, stored: Mapping[str, SourceTensor], wanted: Mapping[str, WantedTensor] | None
    ) -> dict[str, Arranged | None]:
        """See :class:`..core.parts.Arranger`."""
        if self.idles and wanted is not None:
            return {}
        _check_engine()
        if wanted is not None and not wanted:
            return {}  # statements about what is not there, such as master weights of a job in float32
        from .aoa_engine import arranged

        try:
            return arranged(self._config, stored, wanted)
        except _STATEMENT_ERRORS as error:
            text = str(error.args[0] if error.args else error)
            raise ValueError(f"aoa_config: {text}{self._at_fault(stored, wanted, text)}") from error
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise _unknown_engine(f"{text}{self._at_fault(stored, wanted, text)}") from error

    def _at_fault(
        self, stored: Mapping[str, SourceTensor], wanted: Mapping[str, WantedTensor] | None, text: str
    ) -> str:
        """What an error's text leaves out: the statement that it is about, if there is one."""
        from .aoa_engine import engine_of
        from .aoa_statements import at_fault

        statement = at_fault(self._config, lambda config: engine_of(config, stored, wanted))
        return "" if statement is None or statement in text else f", in the statement {statement!r}"

    def idle(
        self, stored: Mapping[str, SourceTensor], wanted: Mapping[str, WantedTensor] | None
    ) -> list[IdleStatement]:
        """See :class:`..core.parts.Arranger`."""
        if self.idles or (wanted is not None and not wanted):
            return []
        _check_engine()
        from .aoa_engine import idle_statements

        try:
            return idle_statements(self._config, stored, wanted)
        except Exception as error:  # of internals of an engine whose answers are right
            _logger.debug("aoa_config: not looked for statements that do nothing: %r", error)
            return []


def _check_engine() -> None:
    """See whether Paddle has the engine as it is known here.

    Raises:
        UnsupportedValueError: there is none, or it does something else than what is made use of here.
    """
    try:
        from .aoa_engine import arranged
    except ImportError:
        raise UnsupportedValueError(
            f"aoa_config needs a Paddle that has it, 3.3 or newer, and this is {paddle.__version__}"
        ) from None
    try:
        found = arranged({"aoa_statements": _PROBE, "enable_traceback": False}, *_PROBE_TENSORS)
    except Exception as error:
        raise _unknown_engine(f"{type(error).__name__}: {error}") from error
    if found != _PROBE_ANSWER:
        raise _unknown_engine(f"it makes something else of {_PROBE[0]!r}")


def _unknown_engine(reason: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"aoa_config: the engine of Paddle {paddle.__version__} is not as this library knows it from Paddle 3.3 "
        f"({reason}); LoadOptions(recipes=...) does without it"
    )
