"""``merge``: the whole tensors of a checkpoint, for those who have no use for shards."""

from __future__ import annotations

from typing import Annotated

import typer

from .arguments import CheckpointPath, Identifier, Json
from .convert import Cast, Keys, MostBytes, Out, Prefix, Rules, Target, convert

__all__ = ["merge"]


def merge(
    path: CheckpointPath,
    out: Out,
    to: Annotated[Target, typer.Option("--to", help="The format; see convert.")] = Target.safetensors,
    unique_id: Identifier = None,
    prefix: Prefix = None,
    key: Keys = None,
    dtype: Cast = None,
    recipes: Rules = None,
    max_shard_bytes: MostBytes = 5_000_000_000,
    json: Json = False,
) -> None:
    """Put the shards of a checkpoint together: whole tensors, as safetensors unless told otherwise.

    The same as convert with --to safetensors.

    \b
    Examples:
      paddle-dist-ckpt merge checkpoints for_others --prefix model --dtype bfloat16
    """
    convert(path, out, to, unique_id, prefix, key, dtype, recipes, max_shard_bytes, json)
