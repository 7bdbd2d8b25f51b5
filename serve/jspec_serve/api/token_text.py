"""Tokens as replies spell them: log-probabilities name each token by its text and its bytes."""

from typing import Any

from jspec.results import TokenLogProb
from jspec.text.detokenize import Detokenizer
from jspec.text.tokenizer import Tokenizer


class TokenText:
    """Text and bytes of single tokens."""

    def __init__(self, tokenizer: Tokenizer):
        """`tokenizer` is the target's."""
        self._tokenizer = tokenizer

    def bytes_of(self, id_: int) -> bytes:
        """What a token spells; nothing for an id of a padded head."""
        token = self._tokenizer.backend.id_to_token(id_)
        if token is None:
            return b""
        if self._tokenizer.spelling is None or id_ in self._tokenizer.special_ids:
            return token.encode()
        return self._tokenizer.spelling.token_bytes(token)

    def chat_log_probs(self, rows: tuple[TokenLogProb, ...]) -> dict[str, Any]:
        """ "logprobs" of a chat's choice."""

        def entry(id_: int, log_prob: float) -> dict[str, Any]:
            raw = self.bytes_of(id_)
            return {"token": raw.decode(errors="replace"), "logprob": _finite(log_prob), "bytes": list(raw)}

        content = [
            entry(row.token_id, row.log_prob) | {"top_logprobs": [entry(*best) for best in row.top]}
            for row in rows
        ]
        return {"content": content, "refusal": None}

    def name_of(self, id_: int) -> str:
        """A token's text; bytes that are no text of their own are written as "bytes:\\xe2\\x82"."""
        raw = self.bytes_of(id_)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class CompletionLogProbs:
    """ "logprobs" of one choice of a completion, which also tell where in the text each token begins."""

    def __init__(self, tokenizer: Tokenizer, *, offset: int = 0):
        """At the beginning of a text that begins at `offset` of the choice's."""
        self._text = TokenText(tokenizer)
        self._detokenizer = Detokenizer(tokenizer)
        self._offset = offset

    def prompt(self, first: int, rows: tuple[TokenLogProb, ...]) -> dict[str, Any]:
        """A whole prompt: nothing is known of its first token, as nothing stands before it."""
        part: dict[str, Any] = {
            "tokens": [self._text.name_of(first)],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._offset],
        }
        self._offset += len(self._detokenizer.push([first]))
        return {key: [*part[key], *rest] for key, rest in self.push(rows).items()}

    def push(self, rows: tuple[TokenLogProb, ...]) -> dict[str, Any]:
        """Takes the next tokens; returns their part."""
        part: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for row in rows:
            part["tokens"].append(self._text.name_of(row.token_id))
            part["token_logprobs"].append(_finite(row.log_prob))
            part["top_logprobs"].append(
                {self._text.name_of(id_): _finite(log_prob) for id_, log_prob in reversed(row.top)}
            )
            part["text_offset"].append(self._offset)
            self._offset += len(self._detokenizer.push([row.token_id]))
        return part


def _finite(log_prob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for what cannot be."""
    return max(log_prob, -9999.0)
