"""Text with answers marked in it, as token ids with a loss mask."""

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

from jspec.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """A tokenised text."""

    ids: np.ndarray  # int32 [length]
    loss_mask: np.ndarray  # bool [length]
    exact: bool  # each answer begins after exactly the ids that the text before it has alone


def tokenise(tokenizer: Tokenizer, text: str, answers: Sequence[tuple[int, int]]) -> Tokens:
    """Token ids of a text with the ids of each prompt as a server would send it.

    As `tokenise_whole`; but if a prompt alone has other ids than it has in the whole (its last characters
    merge with the answer's first), the text is encoded in pieces that begin with the answers, unless the
    tokenizer changes pieces (some put a space before each).

    Args:
      tokenizer: no special tokens are added; the text holds them.
      text: rendered.
      answers: spans of characters, in order.

    Raises:
      ValueError: see `Tokenizer.encode`.
    """
    whole = tokenise_whole(tokenizer, text, answers)
    if whole.exact:
        return whole
    edges = [0, *(start for start, _ in answers), len(text)]
    pieces = [tokenise_whole(tokenizer, text[: edges[1]], ())] + [
        tokenise_whole(tokenizer, text[start:following], ((0, end - start),))
        for (start, end), following in zip(answers, edges[2:], strict=True)
    ]
    ids = np.concatenate([piece.ids for piece in pieces])
    decode = tokenizer.backend.decode
    if decode(ids.tolist(), skip_special_tokens=False) != decode(
        whole.ids.tolist(), skip_special_tokens=False
    ):
        return whole
    return Tokens(ids=ids, loss_mask=np.concatenate([piece.loss_mask for piece in pieces]), exact=True)


def tokenise_whole(tokenizer: Tokenizer, text: str, answers: Sequence[tuple[int, int]]) -> Tokens:
    """Token ids of a text encoded in one piece, and which of them lie in its answers.

    An answer's tokens are those past as many as the text before it has when it is encoded alone; so a token
    over the boundary, which no prompt contains, is not trained on.

    Args, errors: as for `tokenise`.
    """
    try:
        encoding = tokenizer.backend.encode(text, add_special_tokens=False)
    except TypeError:
        tokenizer.encode(text)  # says what is wrong with the text
        raise
    ids = encoding.ids
    specials = [
        (end, start, index)
        for index, (start, end) in enumerate(encoding.offsets)
        if ids[index] in tokenizer.special_ids
    ]

    def tokens_before(character: int) -> tuple[int, bool]:
        """Number of tokens of text[:character] alone, and whether `ids` begins with them."""
        found = bisect.bisect_right(specials, character, key=lambda special: special[0]) - 1
        # A special token parts the text: what stands before it is encoded alike either way.
        _, start, index = specials[found] if found >= 0 else (0, 0, 0)
        piece = tokenizer.encode(text[start:character], add_special=False)
        return index + len(piece), ids[index : index + len(piece)] == piece

    mask, exact = np.zeros(len(ids), np.bool_), True
    for start, end in answers:
        first, same = tokens_before(start)
        exact = exact and same
        mask[first : tokens_before(end)[0]] = True
    return Tokens(ids=np.asarray(ids, np.int32), loss_mask=mask, exact=exact)
