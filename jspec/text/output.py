"""A request's text as it grows: token ids in, final text out, stop strings watched for."""

from collections.abc import Sequence

from jspec.text.detokenize import Detokenizer
from jspec.text.stop_strings import StopStrings
from jspec.text.tokenizer import Tokenizer


class Output:
    """Decodes what a request emits, however many tokens come at once."""

    def __init__(self, *, tokenizer: Tokenizer | None, stop: Sequence[str]):
        """Starts at the beginning of an answer.

        Args:
          tokenizer: None = no text; ids only.
          stop: strings that end the request; the text stops before the first one found.
        """
        self.text = ""
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stop_strings = StopStrings(stop)

    def push(self, token_ids: Sequence[int], *, last: bool) -> tuple[str, int | None]:
        """Takes the tokens of one round.

        Args:
          token_ids: in any number; none is fine too.
          last: nothing will follow, so text that was held back becomes final.

        Returns:
          The text that became final, and the index in `token_ids` of the token that completed a stop
          string, or None. An incomplete character that ends the text may complete one, too: with the
          last token.
        """
        if self._detokenizer is None:
            return "", None
        final = ""
        for index, token in enumerate(token_ids):
            text, stop = self._stop_strings.push(self._detokenizer.push([token]))
            final += text
            if stop is not None:
                self.text += final
                return final, index
        stopped_at = None
        if last:
            text, stop = self._stop_strings.push(self._detokenizer.flush())
            if stop is None:
                text += self._stop_strings.flush()
            elif token_ids:
                stopped_at = len(token_ids) - 1
            final += text
        self.text += final
        return final, stopped_at
