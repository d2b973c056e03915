"""Options of a save and of a load. Everything that can be tuned is here; nothing here reads the environment.

A job's control secret is no option: see :mod:`.paddle_adapter.groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .arguments import as_integer, checked_timeout
from .recipes import Recipe, placeholders, stored_keys

__all__ = ["LoadOptions", "SaveOptions"]

_MAX_BLOCK_BYTES = 64 << 20
_AOA_KEYS = ("aoa_statements", "aoa_config_reverse", "enable_traceback")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How to save.

    Attributes:
        timeout: How long a rank may be silent, in seconds, before the others give up on it. A rank that is working is
            not silent, however long the work takes. Less than one second counts as one.
        no_dist: Save this rank's state_dict alone, even in a job of many ranks.
        check_replicas: What to do when plain tensors or values that should be equal on every rank are not: ``"warn"``
            logs their names; ``"error"`` raises before anything is written; ``"off"`` does not compare; ``"auto"``
            raises if most of the tensors differ, since they are not replicas then, and otherwise logs the names. It
            also applies to copies of the same part of a distributed tensor: ``"error"`` raises before the commit if
            they differ, ``"off"`` does not compare, and the others log which ranks differ. ``"sampled"`` is ``"auto"``
            but compares only a tenth of these copies in each save, a different tenth each time, as background saves and
            saves from devices always do.
        user_metadata: Values to store in ``.metadata`` in addition to the state (those of the coordinator are stored).
        block_bytes: How many bytes share a checksum; a power of two. With smaller blocks, reading slices wastes less.
        progress: Show a progress bar on the coordinator; None shows it when stderr is a terminal and it takes more than
            a second, but not for a background save.
        when_busy: What to do if an earlier save of this group is still running in the background: ``"wait"`` for it, or
            ``"raise"`` on every rank.
        snapshot_bytes: How much memory, in bytes on each rank, the snapshot of a background save may take. What does
            not fit is written before the call returns. None means nine tenths of the memory that the host, or the
            container, has free, divided among its ranks.
        progress_timeout: How long, in seconds, a single file operation may take on any rank: creating or opening a
            file, writing or reading a piece, an fsync. After that the disk, or the network to it, is considered to
            hang, and every rank raises :class:`CheckpointTimeoutError`. None waits as long as it takes.
        data_suffix: How the names of data files end: ``".safetensors"`` or ``".shards"``, the same on every rank. The
            contents are the same. Tools that search folders for ``*.safetensors`` do not find ``.shards``, so they
            neither trip over tensor names that repeat from step to step nor rename or remove the files. None means
            ``".safetensors"``, or ``".shards"`` in saves by functions that :func:`install` has put in place.
        separate_folders: Whether ranks of one host may save to several folders, each with a part of the checkpoint. If
            False, that raises, since it is usually a mistake. (Different hosts may always have their own folders.)

    Examples:
        >>> import paddle
        >>> from paddle_dist_ckpt import SaveOptions, read_metadata, save_state_dict
        >>> options = SaveOptions(timeout=60, check_replicas="error", user_metadata={"run": "baseline"})
        >>> report = save_state_dict({"weight": paddle.ones([4, 2])}, "checkpoint", options=options)
        >>> read_metadata("checkpoint").user_metadata
        {'run': 'baseline'}
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
        _set_timeouts(self)
        _check_choice("check_replicas", self.check_replicas, ("auto", "warn", "error", "off", "sampled"))
        _check_bools(no_dist=self.no_dist, progress=False if self.progress is None else self.progress)
        _check_bools(separate_folders=self.separate_folders)
        _check_choice("when_busy", self.when_busy, ("wait", "raise"))
        if self.data_suffix is not None:
            _check_choice("data_suffix", self.data_suffix, (".safetensors", ".shards"))
        if self.snapshot_bytes is not None:
            _set_integer(self, "snapshot_bytes", "None or an integer of bytes", lambda number: number >= 0)
        powers = f"a power of two from 4096 to {_MAX_BLOCK_BYTES}"
        _set_integer(
            self, "block_bytes", powers, lambda size: 4096 <= size <= _MAX_BLOCK_BYTES and size & (size - 1) == 0
        )
        if self.user_metadata is not None and not isinstance(self.user_metadata, Mapping):
            raise TypeError(f"user_metadata must be a mapping, not {type(self.user_metadata).__name__}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load.

    Attributes:
        timeout: How long a rank may be silent, in seconds, before the others give up on it. Less than one
            second counts as one.
        no_dist: Load this rank's state_dict alone, even in a job of many ranks.
        strict: Raise if a wanted key is missing or does not fit. With False, what fits is loaded and the report names
            the rest. With ``"all"``, also raise for stored keys that nothing asks for, for statements of an
            ``aoa_config`` that have no effect, and for keys of a ``key_map`` that match nothing.
        allow_missing: Patterns (as in :func:`fnmatch.fnmatchcase`) of wanted flat keys that need not be stored. Those
            that are not stored, or are made of something that is not, are left as they are, and the report names them;
            but master weights are set to their parameters, if these are loaded.
        allow_unused: Patterns of stored flat keys that need not be asked for, where ``strict`` is ``"all"``, or where
            they belong to an object of a user-defined class.
        resize: Along which axis a wanted tensor may be longer or shorter than the stored one, by patterns of wanted
            flat keys, of which the first match counts: ``{"*embed.weight*": 0}``. A longer tensor keeps its contents
            beyond the stored length. With ``(axis, n)`` it may also be shorter; both must be at least n long, and what
            is stored beyond is left out. A single element that is stored as one, such as a power of Adam's betas, is
            loaded whatever the rule. Where there is a recipe, what it makes counts as stored.
        cast: Convert where dtypes differ: float to any float, integer to an integer type that holds all its values,
            bool to any integer, float or complex to any complex; nothing else. A finite value that the target cannot
            hold is an error; infinities become NaN in float8_e4m3fn, which has none.
        per_rank: What to do with :class:`PerRank` values that another number of ranks saved: ``"refuse"`` raises,
            ``"by_rank"`` gives each rank the value of the rank with the same number and leaves additional ranks as they
            are, ``"coordinator"`` gives all ranks the value of the lowest rank.
        exchange: ``"auto"`` lets each rank read what it needs, and sends data between ranks if some cannot reach a file
            or if several hosts need it; ``"always"`` reads each byte only once in the whole job; ``"never"`` makes
            every rank read for itself.
        key_map: Where wanted entries are stored, if not under their own keys: a mapping from wanted flat keys, or
            leading parts of them (the longest match counts), to stored ones; or a function from a wanted key to the
            stored one. None instead of a stored key leaves the entry as it is.
        recipes: What wanted tensors are made of, if not simply the stored tensor of the same key: a mapping from wanted
            flat keys to expressions of stored tensors (see :func:`stored`). A key may have placeholders
            (``layers.{i}.weight``), each of which matches a text without dots that is inserted in the stored keys.
        aoa_config: The same in Paddle's own language, as for ``paddle.distributed.load_state_dict``: a mapping with
            ``aoa_statements``, and optionally ``aoa_config_reverse`` and ``enable_traceback``. Each rank may have
            statements of its own, or an empty list, if all have an ``aoa_config``. Needs Paddle 3.3.
        staging_bytes: How much host memory, in bytes on each rank, may hold data on its way to a device at a time, and
            how much device memory an exchange may use; the same on every rank.
        progress: Show a progress bar on the coordinator; None shows it if stderr is a terminal and the load
            takes more than a second.
        progress_timeout: How long, in seconds, a single file operation may take on any rank; see :class:`SaveOptions`.
        separate_folders: Whether ranks of one host may load from several folders that hold parts of one checkpoint. If
            False, that raises, since the folders might hold different checkpoints; so does a path where there is no
            folder, unless it is that of another rank of this host, which sees one.

    Examples:
        >>> import paddle
        >>> from paddle_dist_ckpt import LoadOptions, load_state_dict, save_state_dict
        >>> report = save_state_dict({"body": paddle.ones([4])}, "checkpoint")
        >>> state = {"body": paddle.zeros([4], dtype="float16"), "head": paddle.zeros([3])}
        >>> options = LoadOptions(cast=True, allow_missing=["head"])
        >>> load_state_dict(state, "checkpoint", options=options).skipped
        ('head: left as it is, for the checkpoint does not have it',)
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
        _set_timeouts(self)
        _check_key_map(self.key_map)
        _check_recipes(self.recipes)
        _check_aoa(self.aoa_config)
        _set_integer(self, "staging_bytes", "an integer of bytes above 0", lambda number: number > 0)
        _check_choice("per_rank", self.per_rank, ("refuse", "by_rank", "coordinator"))
        _check_choice("exchange", self.exchange, ("auto", "always", "never"))
        _check_bools(no_dist=self.no_dist, cast=self.cast, separate_folders=self.separate_folders)
        if not isinstance(self.strict, bool) and self.strict != "all":
            raise TypeError(f"strict must be True, False or 'all', not {self.strict!r}")
        _check_patterns(allow_missing=self.allow_missing, allow_unused=self.allow_unused)
        _check_resize(self.resize)
        _check_bools(progress=False if self.progress is None else self.progress)


def _set_timeouts(options: SaveOptions | LoadOptions) -> None:
    object.__setattr__(options, "timeout", checked_timeout("timeout", options.timeout))
    if options.progress_timeout is not None:
        bound = checked_timeout("progress_timeout", options.progress_timeout)
        object.__setattr__(options, "progress_timeout", bound)


def _set_integer(options: object, name: str, allowed: str, check: Callable[[int], bool]) -> None:
    """Make an option Python's integer: numpy's have a largest one, and cannot be sent to other ranks."""
    value = getattr(options, name)
    number = as_integer(value)
    if number is None or not check(number):
        raise ValueError(f"{name} must be {allowed}, not {value!r}")
    object.__setattr__(options, name, number)


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
        given = map(as_integer, rule if isinstance(rule, tuple) and len(rule) == 2 else (rule,))
        if not isinstance(pattern, str) or any(one is None or one < 0 for one in given):
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
