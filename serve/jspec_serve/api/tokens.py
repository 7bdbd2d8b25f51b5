"""/tokenize and /detokenize."""

from typing import Annotated, Any

from pydantic import Field

from jspec_serve.api.fields import Strict, TokenId, refused
from jspec_serve.api.messages import Message, template_messages
from jspec_serve.problem import Problem
from jspec_serve.service import Service


class TokenizeRequest(Strict):
    """A text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(Strict):
    """Ids."""

    model: str | None = None
    tokens: list[TokenId]


def tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    """Ids of what is asked about.

    Raises:
      Problem: 400 or 404.
    """
    if body.model is not None:
        service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise Problem(400, "prompt: expected it or messages, got both or none; send one", param="prompt")
    try:
        if body.messages is not None:
            ids = service.tokenizer.chat(template_messages(body.messages))
        else:
            assert body.prompt is not None
            ids = service.tokenizer.encode(body.prompt, add_special=body.add_special_tokens)
    except ValueError as problem:
        raise refused(problem, prompt="prompt" if body.messages is None else "messages") from problem
    return {"tokens": ids, "count": len(ids), "max_model_len": service.engine.max_context}


def detokenize(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    """Text of ids, special tokens included.

    Raises:
      Problem: 400 or 404.
    """
    if body.model is not None:
        service.check_model(body.model)
    most = service.engine.method.target.vocab_size
    for number, id_ in enumerate(body.tokens):
        if id_ >= most:
            raise Problem(
                400,
                f"tokens[{number}]: expected ids below {most}, got {id_}; use this model's tokenizer",
                param=f"tokens[{number}]",
            )
    return {"prompt": service.tokenizer.decode(body.tokens, skip_special=False)}
