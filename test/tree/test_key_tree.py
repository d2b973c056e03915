"""Flat keys as a tree."""

from __future__ import annotations

from paddle_dist_ckpt.tree.key_tree import KeyNode, KeyTree


def tree(*keys: str, most_depth: int = 9) -> KeyTree:
    return KeyTree.of(keys, [10**i for i in range(len(keys))], most_depth)


def below(found: KeyTree, node: KeyNode) -> dict[str, KeyNode]:
    return {child.name: child for child in found.below(node)}


def test_what_is_below_a_node_is_side_by_side_whatever_stands_beside_it() -> None:
    found = tree("a.x", "a", "a-b", "b", "a.y.z")
    nodes = below(found, found.root)
    assert {name: (node.tensors, found.nbytes(node)) for name, node in nodes.items()} == {
        "a": (3, 10011),
        "a-b": (1, 100),
        "b": (1, 1000),
    }
    assert found.is_tensor(nodes["a"])
    assert not found.is_leaf(nodes["a"])
    assert found.is_leaf(nodes["b"])
    assert list(below(found, nodes["a"])) == ["x", "y"]
    assert found.joined(below(found, nodes["a"])["y"]).name == "y.z"
    assert found.joined(nodes["a"]) == nodes["a"]
    assert not below(found, nodes["b"])


def test_empty_parts_are_parts() -> None:
    found = tree("", ".", "a", "a.", "a..b")
    assert list(below(found, found.root)) == ["", "a"]
    a = below(found, found.root)["a"]
    assert (a.tensors, found.is_tensor(a), list(below(found, a))) == (3, True, [""])
    assert [found.order[node.first] for node in found.below(found.root)] == [0, 2]


def test_what_is_deeper_stays_together() -> None:
    found = tree("a.b.c.d", "a.b.c.e", most_depth=2)
    assert [node.name for node in found.below(found.joined(found.root))] == ["c.d", "c.e"]


def test_there_may_be_nothing() -> None:
    found = tree()
    assert (found.root.tensors, found.nbytes(found.root), list(found.below(found.root))) == (0, 0, [])
    assert found.joined(found.root) == found.root
