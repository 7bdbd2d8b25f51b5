"""Which bytes a token stands for, read from the tokenizer's own decoder."""

import dataclasses
import json
import re
from collections.abc import Callable

import tokenizers

# SentencePiece's stand-in for a space, and its spelling of a single byte.
SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_SENTENCEPIECE_DECODERS = [
    {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_DROP_LEADING_SPACE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spelling:
    """Text = the tokens' bytes one after the other, read as UTF-8, bad bytes replaced by U+FFFD."""

    token_bytes: Callable[[str], bytes]
    drop_leading_space: bool  # the encoder put one space before the text


def spelling_of(backend: tokenizers.Tokenizer) -> Spelling | None:
    """The spelling of a byte-level or SentencePiece-like tokenizer; None for decoders that work on words.

    Raises:
      ValueError: the decoder falls back to bytes in an order of steps that is not known here.
    """
    decoder = backend.decoder
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    if state["type"] == "ByteLevel":
        return Spelling(token_bytes=_byte_level_bytes, drop_leading_space=False)
    steps = state.get("decoders", [state])
    if steps[:3] == _SENTENCEPIECE_DECODERS and steps[3:] in ([], [_DROP_LEADING_SPACE]):
        return Spelling(token_bytes=_sentencepiece_bytes, drop_leading_space=len(steps) == 4)
    if any(step["type"] in ("ByteLevel", "ByteFallback") for step in steps):
        names = [step["type"] for step in steps]
        raise ValueError(
            f"tokenizer: expected a ByteLevel decoder or Replace, ByteFallback, Fuse[, Strip], got {names}; "
            "pass token ids instead of text"
        )
    return None


def byte_characters() -> dict[int, str]:
    """The printable character by which GPT-2's byte-level vocabularies write each byte.

    Printable Latin-1 bytes stand for themselves; the others take the code points from 256 on, in order.
    """
    kept = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = {character: byte for byte, character in byte_characters().items()}


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()  # an added token written as plain text


def _sentencepiece_bytes(token: str) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(SPACE_MARK, " ").encode()
