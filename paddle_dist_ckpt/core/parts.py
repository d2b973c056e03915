"""Parts of stored tensors of which a wanted tensor is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from .box import Box, intersect
from .dtypes import DType, dtype_named

__all__ = ["NEW", "Arranged", "Arranger", "IdleStatement", "Part", "SourceTensor", "WantedTensor", "is_cast"]


NEW = -1
"""In the place of a stored tensor's dimension: one that only the wanted tensor has."""


class SourceTensor(NamedTuple):
    """What a checkpoint says of a tensor.

    Attributes:
        shape: Its global shape.
        dtype: Its element type.
        offsets: Where the boxes start that ranks of the job had of it that saved it, each once, ascending; empty if
            that is not known.
        columns: Where the columns start that ranks had together, with rows from 0, if only that is known.
    """

    shape: tuple[int, ...]
    dtype: DType
    offsets: Sequence[tuple[int, ...]] = ()
    columns: Sequence[tuple[int, ...]] = ()


class WantedTensor(NamedTuple):
    """What a load's ranks say together of a tensor that they want.

    Attributes:
        shape: Its global shape.
        dtype: The name of its element type.
        offsets: Where the boxes that ranks have of it start, or those from which their parts are cut; each once,
            ascending.
    """

    shape: tuple[int, ...]
    dtype: str
    offsets: Sequence[tuple[int, ...]] = ()


class Part(NamedTuple):
    """A box of a stored tensor that is a box of a wanted one.

    Attributes:
        key: The stored tensor's flat key.
        box: The box there.
        axes: For each dimension of the wanted tensor, which dimension of the stored tensor becomes it; :data:`NEW` for
            one that the stored tensor does not have. Along that, and along dimensions of the stored tensor that are not
            among them, the box has one element.
        place: The box in the wanted tensor.
        dtype: The name of the element type that is asked for; None for the stored one.
    """

    key: str
    box: Box
    axes: tuple[int, ...]
    place: Box
    dtype: str | None = None

    def within(self, region: Box) -> Part | None:
        """What of it lies in a region of the wanted tensor; None if nothing does."""
        common = intersect(self.place, region)
        if common is None:
            return None
        offset, shape = list(self.box.offset), list(self.box.shape)
        for low, first, extent, axis in zip(common.offset, self.place.offset, common.shape, self.axes, strict=True):
            if axis != NEW:
                offset[axis] += low - first
                shape[axis] = extent
        return self._replace(box=Box(tuple(offset), tuple(shape)), place=common)

    def of_box(self, box: Box) -> Part:
        """What of it a box is that lies in its box of the stored tensor."""
        offset, shape = list(self.place.offset), list(self.place.shape)
        for d, axis in enumerate(self.axes):
            if axis != NEW:
                offset[d] += box.offset[axis] - self.box.offset[axis]
                shape[d] = box.shape[axis]
        return self._replace(box=box, place=Box(tuple(offset), tuple(shape)))

    def permuted(self, axes: Sequence[int]) -> Part:
        """The same for a wanted tensor with its axes in this order."""
        place = Box(tuple(self.place.offset[a] for a in axes), tuple(self.place.shape[a] for a in axes))
        return self._replace(axes=tuple(self.axes[a] for a in axes), place=place)

    def moved(self, axis: int, distance: int) -> Part:
        """The same, further along an axis of the wanted tensor."""
        offset = list(self.place.offset)
        offset[axis] += distance
        return self._replace(place=Box(tuple(offset), self.place.shape))


class Arranged(NamedTuple):
    """What a wanted tensor is made of.

    Attributes:
        shape: The shape of what is made.
        parts: The parts, which tile it.
        dtype: The name of its element type, where the parts do not say it because there are none.
        cast: Whether that is asked for, where they do not say it.
    """

    shape: tuple[int, ...]
    parts: list[Part]
    dtype: str | None = None
    cast: bool = False

    @property
    def is_cast(self) -> bool:
        """Whether its element type is one that is asked for."""
        return is_cast(self.parts, self.cast)

    def dtype_of(self, stored: Mapping[str, SourceTensor]) -> DType:
        """Its element type."""
        if self.parts and self.parts[0].dtype is None:
            return stored[self.parts[0].key].dtype
        name = self.parts[0].dtype if self.parts else self.dtype
        assert name is not None, "it has parts, or says it"
        return dtype_named(name)


def is_cast(parts: Sequence[Part], otherwise: bool) -> bool:
    """Whether an element type is asked for of any of these; ``otherwise`` says it if there are none."""
    return any(part.dtype is not None for part in parts) if parts else otherwise


class IdleStatement(NamedTuple):
    """Something that a user says of tensors, and that changes nothing.

    Attributes:
        text: The statement.
        reason: Why nothing comes of it.
        names: The flat keys that it names, with a star for a number that may be any.
        endings: What may follow these, as the name of a parameter's state.
    """

    text: str
    reason: str
    names: tuple[str, ...] = ()
    endings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.text!r} ({self.reason})"


class Arranger(Protocol):
    """Says for a framework which stored tensors become which wanted ones.

    Attributes:
        rules: All that the user says of it, in words that :meth:`by` takes on another rank.
        idles: Whether the user says nothing here, and may on another rank.
    """

    rules: str
    idles: bool

    def by(self, rules: str) -> Arranger:
        """One that goes by what the user says on another rank."""
        ...

    def corner(self, value: Any) -> tuple[int, ...] | None:
        """Where the box starts from which a tensor's part on this rank is cut, if the tensor itself says that."""
        ...

    def arrange(
        self, stored: Mapping[str, SourceTensor], wanted: Mapping[str, WantedTensor] | None
    ) -> dict[str, Arranged | None]:
        """What wanted tensors are made of.

        Args:
            stored: The stored tensors, by flat key.
            wanted: The wanted ones of all ranks, by flat key; None for all that can be made.

        Returns:
            What it is for each wanted key about which there is anything to say; None for one that is left as it is.

        Raises:
            ValueError: what is asked for cannot be done.
            UnsupportedValueError: the framework cannot do it.
        """
        ...

    def idle(
        self, stored: Mapping[str, SourceTensor], wanted: Mapping[str, WantedTensor] | None
    ) -> list[IdleStatement]:
        """What the user says and nothing comes of, such as a mistyped name. The arguments are those of ``arrange``,
        which has raised nothing."""
        ...
