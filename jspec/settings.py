"""What a request may ask for, checked where it enters."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.grammar.grammar import Grammar, grammar_from_json

WHOLE = (int, np.integer)
NUMBER = (int, float, np.integer, np.floating)
MAX_LOG_PROBS = 20
MAX_SEED = 2**32 - 1
LEAST_SCALE = 1e-6  # of what logits are divided by
LARGEST = 3.4e38  # settings become float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How one request is decoded; requests of one batch may differ in every field.

    The order in which the settings act on the target's logits: repetition, presence and frequency
    penalties, logit bias, allowed tokens, grammar, minimum length, temperature, top-k, top-p, min-p.
    Construction raises ValueError for what is wrong whatever the model is; `check_against` does the rest.
    """

    max_tokens: int = 256  # the most tokens to emit, a final stop token included
    min_tokens: int = 0  # no stop id is emitted before this many tokens
    temperature: float = 0.0  # 0 = greedy
    top_k: int | None = None  # None = off; tokens that tie with the k-th best are kept
    top_p: float = 1.0  # 1 = off
    min_p: float = 0.0  # least probability kept, as a fraction of the best token's; 0 = off
    repetition_penalty: float = 1.0  # divides (or multiplies, if negative) logits of ids in prompt or output
    presence_penalty: float = 0.0  # subtracted once from ids in the output
    frequency_penalty: float = 0.0  # subtracted per occurrence in the output
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)  # -inf = never
    allowed_token_ids: Sequence[int] | None = None  # None = all
    seed: int | None = None  # set: the output depends on seed and prompt alone, see `jspec.verify.coupled`
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()  # besides the model's end-of-sequence ids
    ignore_eos: bool = False  # the model's end-of-sequence ids neither stop nor wait for min_tokens
    log_probs: int | None = (
        None  # None = off; n = of the chosen token and of the n best, before any setting acts
    )
    # Log-probabilities of the prompt's tokens, too; then none of them is taken from the prefix cache.
    prompt_log_probs: bool = False
    draft_length: int | None = None  # most draft tokens a round; None = the drafter's, 0 = no speculation
    grammar: Grammar | None = None  # the form of the answer, which ends where it is complete
    # Draft tokens are verified if the drafter's confidence gives them, and those before them, at least this
    # probability together; 0 = off.
    min_confidence: float = 0.0

    def __post_init__(self) -> None:
        _check_whole("max_tokens", self.max_tokens, 1, None, "ask for at least one token")
        _check_whole("min_tokens", self.min_tokens, 0, self.max_tokens, "lower it or raise max_tokens")
        _check_number("temperature", self.temperature, 0.0, None, "use 0 for greedy decoding")
        if 0 < self.temperature < LEAST_SCALE:
            raise ValueError(
                f"temperature: expected 0 or at least {LEAST_SCALE:g}, got {self.temperature!r}; "
                "use 0 for greedy decoding"
            )
        if self.top_k is not None:
            _check_whole("top_k", self.top_k, 1, None, "use None to turn it off")
        _check_number("top_p", self.top_p, 0.0, 1.0, "use 1 to turn it off", open_below=True)
        _check_number("min_p", self.min_p, 0.0, 1.0, "use 0 to turn it off")
        _check_number(
            "repetition_penalty", self.repetition_penalty, LEAST_SCALE, None, "use 1 to turn it off"
        )
        _check_number("presence_penalty", self.presence_penalty, None, None, "use 0 to turn it off")
        _check_number("frequency_penalty", self.frequency_penalty, None, None, "use 0 to turn it off")
        self._normalise_ids()
        if self.seed is not None:
            _check_whole("seed", self.seed, 0, MAX_SEED, "use None for a fresh seed")
        if not _is_list(self.stop) or not all(isinstance(text, str) for text in self.stop):
            raise ValueError(
                f"stop: expected a sequence of strings, got {self.stop!r}; "
                "wrap a single one in a tuple, or use () for none"
            )
        if "" in self.stop:
            raise ValueError(
                f"stop: expected strings of at least one character, got {self.stop!r}; drop the empty one"
            )
        object.__setattr__(self, "stop", tuple(self.stop))
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos: expected True or False, got {self.ignore_eos!r}; pass a bool")
        if self.log_probs is not None:
            _check_whole(
                "log_probs", self.log_probs, 0, MAX_LOG_PROBS, "ask for fewer, or None to turn them off"
            )
        if not isinstance(self.prompt_log_probs, bool) or (self.prompt_log_probs and self.log_probs is None):
            raise ValueError(
                "prompt_log_probs: expected True or False, and log_probs with True, got "
                f"{self.prompt_log_probs!r} with log_probs {self.log_probs}; set log_probs, or leave both out"
            )
        if self.draft_length is not None:
            _check_whole(
                "draft_length", self.draft_length, 0, None, "use 0 to turn speculation off, None for all"
            )
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise ValueError(
                f"grammar: expected a jspec.Grammar, got {self.grammar!r:.80}; write Grammar(regex=...)"
            )
        _check_number("min_confidence", self.min_confidence, 0.0, 1.0, "use 0 to turn it off")

    def _normalise_ids(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(
                f"logit_bias: expected a mapping of token ids to numbers, got {self.logit_bias!r}; "
                "use {} for none"
            )
        for id_, bias in self.logit_bias.items():
            _check_whole("logit_bias", id_, 0, None, "use token ids as keys")
            if (
                not isinstance(bias, NUMBER)
                or isinstance(bias, bool)
                or not (bias == -math.inf or abs(bias) <= LARGEST)
            ):
                raise ValueError(
                    f"logit_bias: expected a finite number or -inf for id {id_}, got {bias!r}; "
                    "use -inf to ban a token"
                )
        object.__setattr__(
            self, "logit_bias", {int(id_): float(bias) for id_, bias in self.logit_bias.items()}
        )
        object.__setattr__(self, "stop_token_ids", _checked_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            object.__setattr__(
                self, "allowed_token_ids", _checked_ids("allowed_token_ids", self.allowed_token_ids)
            )
            if not self.allowed_token_ids:
                raise ValueError(
                    "allowed_token_ids: expected at least one id, got none; use None to allow all tokens"
                )

    def stop_ids(self, eos_ids: Sequence[int]) -> tuple[int, ...]:
        """The ids that end this request, given the model's end-of-sequence ids; ascending, distinct."""
        return tuple(sorted({*self.stop_token_ids, *(() if self.ignore_eos else eos_ids)}))

    def check_against(self, vocab_size: int, eos_ids: Sequence[int] = ()) -> None:
        """Raises ValueError for what only the model shows to be wrong.

        Args:
          vocab_size: of the target; ids are 0 .. vocab_size - 1.
          eos_ids: the model's end-of-sequence ids.
        """
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids),
        ):
            for id_ in ids:
                if id_ >= vocab_size:
                    raise ValueError(
                        f"{name}: expected ids below the vocabulary size {vocab_size}, got {id_}; "
                        "use ids of this model's tokenizer"
                    )
        banned = {id_ for id_, bias in self.logit_bias.items() if bias == -math.inf}
        if banned or self.allowed_token_ids is not None:
            left = (
                set(range(vocab_size) if self.allowed_token_ids is None else self.allowed_token_ids) - banned
            )
        else:
            left = range(vocab_size)  # a set of so many, for every request, would take its time
        if not left:
            raise ValueError(
                "allowed_token_ids: expected a token that logit_bias does not ban, "
                f"got {self.allowed_token_ids!r}; allow or unban at least one"
            )
        if self.min_tokens and set(self.stop_ids(eos_ids)).issuperset(left):
            raise ValueError(
                f"min_tokens: expected 0 when only stop ids may be emitted, got {self.min_tokens}; "
                "allow a token that does not stop, or set min_tokens=0"
            )
        if self.log_probs is not None and self.log_probs > vocab_size:
            raise ValueError(
                f"log_probs: expected at most the vocabulary size {vocab_size}, got {self.log_probs}; "
                "ask for fewer"
            )


def _check_whole(name: str, value: Any, least: int, most: int | None, remedy: str) -> None:
    if (
        not isinstance(value, WHOLE)
        or isinstance(value, bool)
        or value < least
        or (most is not None and value > most)
    ):
        wanted = (
            f"a whole number of at least {least}" if most is None else f"a whole number in [{least}, {most}]"
        )
        raise ValueError(f"{name}: expected {wanted}, got {value!r}; {remedy}")


def _check_number(
    name: str, value: Any, least: float | None, most: float | None, remedy: str, open_below: bool = False
) -> None:
    if (
        not isinstance(value, NUMBER)
        or isinstance(value, bool)
        or not abs(value) <= LARGEST
        or (least is not None and (value <= least if open_below else value < least))
        or (most is not None and value > most)
    ):
        if least is None:
            wanted = "a finite number"
        elif most is None:
            wanted = f"a finite number of at least {least:g}"
        else:
            wanted = f"a number in {'(' if open_below else '['}{least:g}, {most:g}]"
        raise ValueError(f"{name}: expected {wanted}, got {value!r}; {remedy}")


def _is_list(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 1
    return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)


def _checked_ids(name: str, ids: Any) -> tuple[int, ...]:
    if not _is_list(ids):
        raise ValueError(
            f"{name}: expected a sequence of token ids, got {ids!r}; wrap a single one in a tuple"
        )
    for id_ in ids:
        _check_whole(name, id_, 0, None, "use token ids")
    return tuple(int(id_) for id_ in ids)


def settings_from_json(values: Any, base: Settings) -> Settings:
    """`base` with the fields of a JSON object on top; ids as keys of "logit_bias" are strings there.

    Raises:
      ValueError: no object, a field that does not exist, or a value that `Settings` refuses.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f'settings: expected an object, got {values!r}; write {{"max_tokens": 32}}')
    known = [field.name for field in dataclasses.fields(Settings)]
    unknown = [name for name in values if name not in known]
    if unknown:
        raise ValueError(
            f"settings: expected names out of {', '.join(known)}, got {', '.join(map(str, unknown))}; "
            "correct or remove them"
        )
    values = dict(values)
    if values.get("grammar") is not None:
        values["grammar"] = grammar_from_json(values["grammar"])
    if isinstance(values.get("logit_bias"), Mapping):
        values["logit_bias"] = {_id_of(key): bias for key, bias in values["logit_bias"].items()}
    return dataclasses.replace(base, **values)


def _id_of(key: Any) -> Any:
    if not isinstance(key, str):
        return key
    if not (key.isascii() and key.isdigit()):
        raise ValueError(f"logit_bias: expected token ids as keys, got {key!r}; write them as whole numbers")
    return int(key)
