"""What does not fit between what ranks want and a checkpoint: found on ranks, raised by the coordinator.

Texts say it, and what to do about it follows from the words in them that :mod:`.wording` has names for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from ..core.parts import IdleStatement
from ..core.text import counted, ranks_text
from ..errors import StateDictMismatchError
from ..files.metadata import Metadata
from ..options import LoadOptions
from ..planning.recipe_parts import NOT_CAST, WRONG_DTYPE
from ..tree.names import parameter_of_run
from ..tree.paths import plain_key
from ..visible import each_visible
from .answering import Answering
from .key_map import matcher
from .messages import Mismatch, WantedPaths
from .recipes import idle_hints
from .wording import MEANT, MISSING, NEEDED, NO_ENTRY, OF_ALL_RANKS, TRANSPOSE, some_of

__all__ = ["NOT_YET", "MismatchCheck", "idle_text"]

NOT_YET = "the object there, whose class has its own state_dict(), has no such entry"
_MOST = 5  # patterns in an advice
_MOST_LINES = 100  # problems in an error's text


@dataclass(slots=True)
class MismatchCheck:
    """Judges what ranks have found, by the options.

    Attributes:
        location: The folder.
        metadata: What the checkpoint holds.
        answering: What ranks were told of it.
        wanted: What they want, the different ones.
        options: How to load.
        unmatched: What is to be said of keys of the key_map that match nothing on any rank; nothing when it was said.
    """

    location: str
    metadata: Metadata
    answering: Answering
    wanted: Sequence[WantedPaths]
    options: LoadOptions
    unmatched: list[str] = field(default_factory=list)

    def check(
        self,
        by_rank: Mapping[int, Sequence[Mismatch]],
        unused: Sequence[str] = (),
        left: Sequence[Mismatch] = (),
        idle: Sequence[IdleStatement] = (),
    ) -> None:
        """Raise all problems at once, as far as the options say that they are problems.

        Args:
            by_rank: What each rank found not to fit. Each problem is said once, with the ranks that have it.
            unused: The stored keys that nothing asks for; problems with ``strict="all"``.
            left: Stored entries of objects that would not be loaded.
            idle: Statements that change nothing; problems with ``strict="all"``.

        Raises:
            StateDictMismatchError: there are problems, and ``strict`` is not False.
        """
        ranks: dict[Mismatch, list[int]] = {}
        for rank, problems in sorted(by_rank.items()):
            for problem in dict.fromkeys(Mismatch(one.key, one.text) for one in problems):
                ranks.setdefault(problem, []).append(rank)
        ranks.update((problem, list(by_rank)) for problem in left)
        surplus = self._surplus(ranks, unused, idle)
        if not (ranks or surplus) or not self.options.strict:
            return
        everyone = len(by_rank)
        hint = idle_hints(idle)
        lines = [
            f"{problem}{hint(problem.key)}{'' if len(having) == everyone else f' ({ranks_text(having)})'}"
            for problem, having in ranks.items()
        ] + surplus
        advice = "; ".join(self._advice(list(ranks), lines, bool(surplus), bool(left), bool(idle)))
        text = (
            f"checkpoint {self.metadata.unique_id} in {self.location} does not fit the state_dict, which was left as "
            f"it was; {counted(len(lines), 'problem')}:"
        )
        more = len(lines) - _MOST_LINES
        shown = each_visible(lines[:_MOST_LINES])
        shown += [f"and {more} more, which are in the error's `problems`"] * (more > 0)
        raise StateDictMismatchError("\n".join([text, *shown, f"({advice})"]), lines)

    def empty_texts(self) -> list[str]:
        """What is to be said of parts of the state_dict that ask for nothing, though something is stored there."""
        if not any(one.tensors or one.values or one.kept or one.moved for one in self.wanted):
            return ["the state_dict has no entries, so nothing is loaded"] if self.metadata.table.paths else []
        tensors = [path for one in self.wanted for path in (*one.tensors, *one.others)]
        return [
            f"{key or 'the state_dict'} has no tensors, so none of the {count} that are stored there are loaded; an "
            "optimizer's state_dict() is empty before its first step: pass the optimizer itself, beside its model; or, "
            "for its sharded_state_dict(), take a step first; or pass nothing for one without a state, such as SGD"
            for key, count in self.answering.nothing_asked(tensors).items()
        ]

    def _advice(
        self, problems: Sequence[Mismatch], lines: Sequence[str], surplus: bool, left: bool, idle: bool
    ) -> Iterator[str]:
        """What to do about problems, which are in these lines with all others."""
        strictest = self.options.strict == "all"
        yield "LoadOptions(strict=False) loads what fits"
        if surplus:
            yield "strict=True lets stored keys be unused, allow_unused=[...] some of them"
        if idle and strictest:
            yield "strict=True lets statements change nothing"
        if self.unmatched:
            yield (
                "strict=True lets keys of key_map match nothing" if strictest else f"key_map: {some_of(self.unmatched)}"
            )
        if not self.options.cast and any(WRONG_DTYPE in line and NOT_CAST not in line for line in lines):
            yield "LoadOptions(cast=True) converts dtypes"
        yield from self._advice_on_transposed(problems)
        if any(NO_ENTRY in line or NOT_YET in line for line in lines):
            yield "tensors that an object makes later must be made before the load, to be in its state_dict()"
        if any(problem.text.endswith(OF_ALL_RANKS) for problem in problems):
            yield "what every rank has saved of its own is loaded into PerRank(None), in the place of the value"
        for problem in problems:
            if problem.text.endswith(NEEDED):
                yield f"LoadOptions(key_map={{{problem.key!r}: None}}) leaves {problem.key} as it is"
        if left:
            yield "LoadOptions(allow_unused=[...]) leaves some entries out"
        missing = (parameter_of_run(problem.key) for problem in problems if MISSING in problem.text)
        yield from self._advice_on_names({parameter for parameter in missing if parameter is not None})
        made = {plain_key(path) for one in self.wanted for path in one.made}
        lacking = [problem.text for problem in problems if MISSING in problem.text and problem.key not in made]
        if any(MEANT in text for text in lacking) and (hint := self.answering.hints.advice()):
            yield hint
        if untrained := list(self.answering.untrained):
            yield (
                "an optimizer has entries here for parameters that had none, as where they were not trained: "
                f"LoadOptions(allow_missing={untrained[:_MOST]}) keeps what it has{', ...' * (len(untrained) > _MOST)}"
            )
        if lacking and self.options.key_map is None:
            yield from filter(None, [self.answering.hints.advice_on_containers()])
        yield from self.empty_texts()

    def _advice_on_transposed(self, problems: Sequence[Mismatch]) -> list[str]:
        """How to load matrices of which the stored ones are the transposes, with the first of them for an example."""
        transposed = [problem.key for problem in problems if TRANSPOSE in problem.text]
        moved = {plain_key(path): key for one in self.wanted for path, key in one.moved.items()} if transposed else {}
        for key in transposed:
            stored = moved.get(key, key)
            if stored in self.metadata.flat_mapping:
                return [
                    f"LoadOptions(recipes={{{key!r}: stored({stored!r}).T}}) transposes what is stored; square "
                    "matrices may need it too, which fit either way"
                ]
        return []

    def _advice_on_names(self, parameters: Set[str]) -> list[str]:
        """What to do about names of a run that are not there, by the parameters that are meant."""
        here = {name for paths in self.wanted for name in (*paths.names, *paths.others.values()) if name}
        table = self.metadata.table
        of_run = {parameter for path in table.paths if (parameter := parameter_of_run(path)) is not None}
        calls = ["save"] * bool(of_run - set(table.names)) + ["load"] * here.isdisjoint(parameters)
        text = f"an optimizer's entries are told by its parameters: {' and '.join(calls)} the model in the same call"
        return [text] if calls and parameters else []

    def _surplus(self, problems: Iterable[Mismatch], unused: Sequence[str], idle: Sequence[IdleStatement]) -> list[str]:
        """With ``strict="all"`` a line for each unused key that no other problem names and that may not be unused, for
        each idle statement, and for each key of the key_map that matches nothing."""
        if self.options.strict != "all":
            return []
        said, allowed = {problem.key for problem in problems}, matcher(self.options.allow_unused)
        lines = [f"{key}: stored, but nothing asks for it" for key in unused if key not in said and not allowed(key)]
        lines += map(idle_text, idle)
        return lines + [f"key_map: {text}" for text in self.unmatched]


def idle_text(statement: IdleStatement) -> str:
    """That a statement changes nothing, in words."""
    return f"aoa_config: {statement.text!r} changes nothing: {statement.reason}"
