"""Shapes of trees, and what is refused."""

import pytest

from jspec.drafters.tree_shape import chain_shape, dynamic_tree, parse_tree, static_tree


def test_static_shape_is_ordered_by_depth_then_rank():
    tree = static_tree([[1], [0, 0], [0], [0, 1, 2], [0, 1]])
    assert tree.paths == ((0,), (1,), (0, 0), (0, 1), (0, 1, 2))
    assert (tree.width, tree.depth, tree.draft_length, tree.is_chain) == (3, 3, 5, False)
    assert tree.frontier(1) == ((0,),)
    assert tree.frontier(2) == ((0, 1),)


def test_chain_is_a_tree_of_width_one():
    assert chain_shape(4).is_chain
    assert static_tree([[0], [0, 0], [0, 0, 0]]).is_chain
    assert (chain_shape(4).draft_length, chain_shape(4).depth, chain_shape(4).generated) == (4, 4, 4)


def test_generated_candidates_are_counted():
    tree = dynamic_tree(width=3, depth=3, draft_length=21)
    assert [tree.frontier_length(d) for d in (1, 2)] == [3, 3]
    assert tree.generated == 3 + 9 + 9
    assert dynamic_tree(width=3, depth=3, draft_length=4, beam=5).generated == 3 + 9 + 15


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([], "paths: expected at least one path, got none"),
        ([[0], []], r"paths\[1\]: expected at least one rank, got none"),
        ([[0], [0, -1]], r"paths\[1\]: expected ranks from 0 up, got \[0, -1\]"),
        ([[0], [1], [0]], r"paths\[2\]: expected each path once, got \[0\] again"),
        ([[0], [1, 0], [2]], r"paths\[1\]: expected \[1\] among the paths too, since \[1, 0\] hangs on it"),
    ],
)
def test_paths_that_are_no_tree_are_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        static_tree(paths)


def test_sizes_as_text():
    assert parse_tree("10x6x60") == dynamic_tree(width=10, depth=6, draft_length=60)
    for text in ("10x6", "10x6x60x1", "ax6x60", "10x-6x60", ""):
        with pytest.raises(ValueError, match='tree: expected "WIDTHxDEPTHxTOKENS", got'):
            parse_tree(text)
    with pytest.raises(ValueError, match="draft_length: expected at most 6"):
        parse_tree("2x2x7")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(width=0, depth=2, draft_length=3), "width: expected at least 1, got 0"),
        (dict(width=2, depth=0, draft_length=3), "depth: expected at least 1, got 0"),
        (dict(width=2, depth=2, draft_length=0), "draft_length: expected at least 1, got 0"),
        (dict(width=2, depth=2, draft_length=3, beam=0), "beam: expected at least 1, got 0"),
        (
            dict(width=2, depth=3, draft_length=11),
            r"draft_length: expected at most 10 \(width 2, depth 3, beam 2\), got 11",
        ),
    ],
)
def test_sizes_that_are_no_tree_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        dynamic_tree(**sizes)
