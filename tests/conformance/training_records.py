"""What every training case has recorded: its files, the target's two tables, and how near values have to be."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_kernels.pytree import pytree

RTOL, ATOL = 1e-4, 2e-5
GRAD_RTOL, GRAD_ATOL = 1e-3, 1e-5
SHARING = r"same_.*as|same_as|start|inputs_and_target"  # keys of meta.json that name sibling cases


@pytree
class RecordedTables:
    """The two tables of a case."""

    embedding: jax.Array
    head: jax.Array

    def embed(self, ids: jax.Array) -> jax.Array:
        """Rows of the recorded table."""
        return self.embedding[ids]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The recorded head."""
        return hidden @ self.head.T


def meta_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "meta.json").read_text())


def find_part(folder: Path, name: str) -> Path | None:
    """A file of a case, or of a sibling that its meta says it shares it with; None if there is none."""
    if (folder / name).exists():
        return folder / name
    shared = [str(v) for key, v in meta_of(folder).items() if re.fullmatch(SHARING, key)]
    for word in re.findall(r"[^\s,;()]+", " ".join(shared)):
        sibling = folder.parent / word
        if sibling != folder and (sibling / "meta.json").is_file():
            found = find_part(sibling, name)
            if found is not None:
                return found
    return None


def part_of(folder: Path, name: str) -> Path:
    found = find_part(folder, name)
    assert found is not None, f"{folder.name}: no {name} here or in the cases that its meta names"
    return found


def near(name: str, ours: Any, theirs: Any, rtol: float = RTOL) -> None:
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=rtol, atol=ATOL, err_msg=name)


def close_grad(name: str, ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=GRAD_RTOL, atol=GRAD_ATOL, err_msg=name)
