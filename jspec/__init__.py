"""Speculative decoding in JAX: decode and serve language models faster, with exactly their distribution."""

from jspec.decode import Method, Models
from jspec.drafters.tree_shape import dynamic_tree, static_tree
from jspec.engine import Engine
from jspec.grammar.grammar import Grammar, StructuralTag
from jspec.loading import load, with_drafter
from jspec.results import Counters, Piece, Result, TokenLogProb
from jspec.session import Session
from jspec.settings import Settings

__all__ = [
    "Counters",
    "Engine",
    "Grammar",
    "Method",
    "Models",
    "Piece",
    "Result",
    "Session",
    "Settings",
    "StructuralTag",
    "TokenLogProb",
    "dynamic_tree",
    "load",
    "static_tree",
    "with_drafter",
]
