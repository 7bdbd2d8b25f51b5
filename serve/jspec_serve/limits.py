"""What a server takes on, beyond what its engine can hold."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of single requests and of the queue."""

    max_waiting: int = 128  # requests that wait for a slot; one more is answered 429
    max_body_bytes: int = 4 * 2**20
    max_prompt_tokens: int | None = None  # None = what the context holds
    max_output_tokens: int | None = None  # None = what the context has left
    max_choices: int = 16  # n times prompts of one call
    body_seconds: float = 30.0  # for the body to arrive
    request_seconds: float = 600.0  # from the body's arrival to the answer's last byte

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "max_waiting" else 1 if "seconds" not in field.name else 0.001
            if value is not None and value < least:
                raise ValueError(f"{field.name}: expected at least {least}, got {value}; raise it")
