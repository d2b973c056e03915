"""What dicts are made of whose keys are from checkpoints of anybody."""

from __future__ import annotations

import sys

import pytest

from paddle_dist_ckpt.core.box import whole
from paddle_dist_ckpt.core.dtypes import DTYPES
from paddle_dist_ckpt.core.shards import Kind
from paddle_dist_ckpt.core.tensors import Geometry, LocalShard
from paddle_dist_ckpt.files.datafile import EntryKind
from paddle_dist_ckpt.saving.messages import Description

DTYPE = DTYPES["float32"]


def geometry(shape: tuple[int, ...]) -> Geometry:
    return Geometry(Kind.TENSOR, DTYPE, shape, True, (LocalShard(whole(shape)),))


def description(shape: tuple[int, ...]) -> Description:
    return Description("float32", Kind.TENSOR, True, shape, None, 0)


@pytest.mark.parametrize("make", [geometry, description, lambda shape: EntryKind(DTYPE, shape)])
def test_shapes_of_one_hash_are_told_apart(make: object) -> None:
    assert callable(make)
    a, b = (0, 0), (0, sys.hash_info.modulus)
    assert hash(a) == hash(b)
    assert hash(make(a)) == hash(make((0, 0))) != hash(make(b))
