"""Options of a save and of a load. Everything that can be tuned is here; nothing here reads the environment.

A job's control secret is no option: see :mod:`.paddle_adapter.groups`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from .recipes import Recipe, placeholders, stored_keys

__all__ = ["LoadOptions", "SaveOptions", "as_integer", "checked"]

T = TypeVar("T")

_MAX_BLOCK_BYTES = 64 << 20
_LONGEST_TIMEOUT = 1_000_000
_AOA_KEYS = ("aoa_statements", "aoa_config_reverse", "enable_traceback")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How to save.

    Attributes:
        timeout: The longest silence of a rank, in seconds, before the others give up on it. Work of any length is
            fine: a rank that works is not silent.
        no_dist: Save this rank's state_dict alone, even in a job of many ranks.
        check_replicas: What to do when plain tensors or values that should be equal on every rank are not: ``"warn"``
            logs their names, ``"error"`` raises before anything is written, ``"off"`` does not compare, ``"auto"``
            raises if most of the tensors are not equal, which are no replicas then, and else logs the names. Also what
            to do when copies of parts of distributed tensors are not: all but ``"error"`` and ``"off"`` log who has
            which, ``"error"`` raises before the commit. ``"sampled"`` is ``"auto"`` with a tenth of these copies in
            each save, another one each time; so much is compared of them in the background and on devices anyway.
        user_metadata: Values to store in ``.metadata`` beside the state (the coordinator's are kept).
        block_bytes: Bytes that share a checksum; a power of two. Smaller blocks let slices be read with less waste.
        progress: Show a progress bar on the coordinator; None shows it when stderr is a terminal and it takes more than
            a second, but not for a save in the background.
        when_busy: What a save does while an earlier one of this group still goes on in the background: ``"wait"`` for
            its end, or ``"raise"``, on every rank.
        snapshot_bytes: The most memory, in bytes on each rank, that the snapshot of a save in the background may take.
            What does not fit in it is written before the call returns. None sets no bound.
        progress_timeout: The longest, in seconds, that one operation on a file may take on any rank: making or opening
            it, writing or reading a piece, an fsync. After that the disk, or the network to it, is taken to hang, and
            every rank raises :class:`CheckpointTimeoutError`. None waits for as long as it takes. It bounds neither
            files that an export writes, nor what a manager asks of folders themselves (whether one is a symlink, the
            removal of an empty one), nor functions without options.
        data_suffix: How the names of data files end: ``".safetensors"`` or ``".shards"``, the same on every rank. What
            is in them is the same. Tools that walk through folders for ``*.safetensors`` do not find the second ones,
            and so neither trip over names that repeat from step to step nor rename or remove them. None means the
            first, but in saves by functions that :func:`install` has replaced the second.
        separate_folders: Whether ranks of one host may save to several folders, each with a part of the checkpoint. If
            not, that raises, for it is a mistake more often than not. (Hosts may always have folders of their own.)
    """

    timeout: float = 300.0
    no_dist: bool = False
    check_replicas: Literal["auto", "warn", "error", "off", "sampled"] = "auto"
    user_metadata: Mapping[str, Any] | None = None
    block_bytes: int = 1 << 20
    progress: bool | None = None
    when_busy: Literal["wait", "raise"] = "wait"
    snapshot_bytes: int | None = None
    progress_timeout: float | None = None
    data_suffix: Literal[".safetensors", ".shards"] | None = None
    separate_folders: bool = False

    def __post_init__(self) -> None:
        _check_timeouts(self.timeout, self.progress_timeout)
        _check_choice("check_replicas", self.check_replicas, ("auto", "warn", "error", "off", "sampled"))
        _check_bools(no_dist=self.no_dist, progress=False if self.progress is None else self.progress)
        _check_bools(separate_folders=self.separate_folders)
        _check_choice("when_busy", self.when_busy, ("wait", "raise"))
        if self.data_suffix is not None:
            _check_choice("data_suffix", self.data_suffix, (".safetensors", ".shards"))
        bound = self.snapshot_bytes
        if bound is not None and (type(bound) is not int or bound < 0):
            raise ValueError(f"snapshot_bytes must be None or a number of bytes, not {bound!r}")
        size = self.block_bytes
        if type(size) is not int or size < 4096 or size > _MAX_BLOCK_BYTES or size & (size - 1):
            raise ValueError(f"block_bytes must be a power of two from 4096 to {_MAX_BLOCK_BYTES}, not {size!r}")
        if self.user_metadata is not None and not isinstance(self.user_metadata, Mapping):
            raise TypeError(f"user_metadata must be a mapping, not {type(self.user_metadata).__name__}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load.

    Attributes:
        timeout: The longest silence of a rank, in seconds, before the others give up on it.
        no_dist: Load this rank's state_dict alone, even in a job of many ranks.
        strict: Raise when a wanted key is missing or does not fit. With False, what fits is loaded and the report
            names the rest. With ``"all"``, a stored key that nothing asks for raises, too, and so does a statement of
            an ``aoa_config`` that changes nothing.
        allow_missing: Patterns (as :func:`fnmatch.fnmatchcase` has them) of wanted flat keys that need not be stored.
            Those that are not are left as they are, and the report names them.
        allow_unused: Patterns of stored flat keys that nothing need ask for, if ``strict`` is ``"all"``, or if they
            belong to an object of a user's own.
        resize: Along which axis a wanted tensor may be longer or shorter than the stored one, by patterns of wanted
            flat keys, of which the first counts: ``{"*embed.weight*": 0}``. A longer one keeps what it has beyond. With
            ``(axis, n)`` it may be shorter, too, and both must be at least n long; what is stored beyond is left out.
        cast: Convert where dtypes differ: float to float, int to a wider int, bool to int, real to complex. A finite
            value that the target cannot hold is an error.
        per_rank: What becomes of :class:`PerRank` values that another number of ranks has saved: ``"refuse"`` raises,
            ``"by_rank"`` gives each rank that of the rank of its number and leaves ranks of higher numbers as they are,
            ``"coordinator"`` gives all that of the lowest rank.
        exchange: ``"auto"`` reads a file on every rank of a host that wants it, and sends data between ranks when some
            cannot reach the file or when several hosts want it; ``"always"`` reads each byte once in the whole job;
            ``"never"`` makes every rank read for itself.
        key_map: Where wanted entries are stored, if not under their own keys: a mapping of wanted flat keys, or of
            first parts of some (of which the longest counts), to stored ones; or a function of a wanted key that
            returns the stored one. None instead of a key leaves the entry as it is.
        recipes: What wanted tensors are made of, if not of the stored tensor of their key: a mapping of wanted flat
            keys to expressions of stored tensors (see :func:`stored`). A key may have placeholders
            (``layers.{i}.weight``), each of which stands for a text without dots that is put into the stored keys.
        aoa_config: The same in Paddle's own language, as ``paddle.distributed.load_state_dict`` takes it: a mapping
            with ``aoa_statements``, and ``aoa_config_reverse`` and ``enable_traceback`` if need be; the same on every
            rank. Needs Paddle 3.3.
        staging_bytes: The most host memory, in bytes on each rank, through which data go to tensors on a device at a
            time, and the most memory of the device that an exchange uses; the same on every rank.
        progress: Show a progress bar on the coordinator; None shows it when stderr is a terminal and it takes more than
            a second.
        progress_timeout: The longest, in seconds, that one operation on a file may take on any rank; see
            :class:`SaveOptions`.
        separate_folders: Whether ranks of one host may load from several folders, which hold parts of one checkpoint.
            If not, that raises, for they might hold different ones.
    """

    timeout: float = 300.0
    no_dist: bool = False
    strict: bool | Literal["all"] = True
    allow_missing: Sequence[str] = ()
    allow_unused: Sequence[str] = ()
    resize: Mapping[str, int | tuple[int, int]] | None = None
    cast: bool = False
    per_rank: Literal["refuse", "by_rank", "coordinator"] = "refuse"
    exchange: Literal["auto", "always", "never"] = "auto"
    key_map: Mapping[str, str | None] | Callable[[str], str | None] | None = None
    recipes: Mapping[str, Recipe] | None = None
    aoa_config: Mapping[str, Any] | None = None
    staging_bytes: int = 256 << 20
    progress: bool | None = None
    progress_timeout: float | None = None
    separate_folders: bool = False

    def __post_init__(self) -> None:
        _check_timeouts(self.timeout, self.progress_timeout)
        _check_key_map(self.key_map)
        _check_recipes(self.recipes)
        _check_aoa(self.aoa_config)
        if (as_integer(self.staging_bytes) or 0) < 1:
            raise ValueError(f"staging_bytes must be a number of bytes above 0, not {self.staging_bytes!r}")
        _check_choice("per_rank", self.per_rank, ("refuse", "by_rank", "coordinator"))
        _check_choice("exchange", self.exchange, ("auto", "always", "never"))
        _check_bools(no_dist=self.no_dist, cast=self.cast, separate_folders=self.separate_folders)
        if not isinstance(self.strict, bool) and self.strict != "all":
            raise TypeError(f"strict must be True, False or 'all', not {self.strict!r}")
        _check_patterns(allow_missing=self.allow_missing, allow_unused=self.allow_unused)
        _check_resize(self.resize)
        _check_bools(progress=False if self.progress is None else self.progress)


def as_integer(value: Any) -> int | None:
    """An integer of some kind, Python's or numpy's, as Python's int; None if the value is none, or a bool."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def checked(name: str, value: T | None, kind: type[T]) -> T | None:
    """Return an argument that may be None.

    Raises:
        TypeError: it is neither that nor of this type.
    """
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} must be {kind.__name__}, not {type(value).__name__}")
    return value


def _check_timeouts(timeout: float, progress_timeout: float | None) -> None:
    for name, seconds in (("timeout", timeout), ("progress_timeout", progress_timeout)):
        if name == "progress_timeout" and seconds is None:
            continue
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds <= _LONGEST_TIMEOUT:
            allowed = f"a number of seconds above 0 and up to {_LONGEST_TIMEOUT:,}"
            raise ValueError(f"{name} must be {allowed}, not {seconds!r}")


def _check_key_map(key_map: object) -> None:
    if key_map is None or callable(key_map):
        return
    if not isinstance(key_map, Mapping):
        raise TypeError(f"key_map must be a mapping or a function, not {type(key_map).__name__}")
    for wanted, stored in key_map.items():
        if not isinstance(wanted, str) or not (stored is None or isinstance(stored, str)):
            raise TypeError(f"key_map must have keys for keys (or None), not {wanted!r}: {stored!r}")


def _check_patterns(**options: object) -> None:
    for name, patterns in options.items():
        if isinstance(patterns, str) or not isinstance(patterns, Sequence) or not all(map(_is_str, patterns)):
            raise TypeError(f"{name} must be a list or tuple of patterns of keys, not {patterns!r}")


def _check_resize(resize: object) -> None:
    if resize is not None and not isinstance(resize, Mapping):
        raise TypeError(f"resize must be a mapping of patterns of keys to axes, not {type(resize).__name__}")
    for pattern, rule in (resize or {}).items():
        numbers = rule if isinstance(rule, tuple) and len(rule) == 2 else (rule,)
        if not isinstance(pattern, str) or not all(type(one) is int and one >= 0 for one in numbers):
            raise TypeError(
                f"resize must have patterns of keys for axes from 0, or for (axis, length), not {pattern!r}: {rule!r}"
            )


def _is_str(value: object) -> bool:
    return isinstance(value, str)


def _check_recipes(recipes: object) -> None:
    if recipes is None:
        return
    if not isinstance(recipes, Mapping):
        raise TypeError(f"recipes must be a mapping, not {type(recipes).__name__}")
    for wanted, recipe in recipes.items():
        if not isinstance(wanted, str) or not isinstance(recipe, Recipe):
            raise TypeError(f"recipes must have expressions of stored(...) for keys, not {wanted!r}: {recipe!r}")
        for key in stored_keys(recipe):
            unknown = [name for name in placeholders(key) if name not in placeholders(wanted)]
            if unknown:
                raise ValueError(f"recipes: {wanted!r} has no {{{unknown[0]}}}, which the stored key {key!r} asks for")


def _check_aoa(config: object) -> None:
    if config is None:
        return
    if not isinstance(config, Mapping):
        raise TypeError(f"aoa_config must be a mapping, not {type(config).__name__}")
    unknown = [key for key in config if key not in _AOA_KEYS]
    if unknown or "aoa_statements" not in config:
        found = f"it has {unknown[0]!r}" if unknown else "it has none"
        raise TypeError(f"aoa_config must have aoa_statements, and may have {' and '.join(_AOA_KEYS[1:])}; {found}")
    _check_bools(**{f"{key} of aoa_config": config.get(key, False) for key in _AOA_KEYS[1:]})
    statements = config["aoa_statements"]
    if not isinstance(statements, (list, tuple)) or not all(isinstance(one, str) for one in statements):
        raise TypeError(f"aoa_config must have a list of str as aoa_statements, not {str(statements)[:200]}")


def _check_bools(**options: bool) -> None:
    for name, value in options.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, not {value!r}")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")
