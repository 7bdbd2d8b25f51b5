"""What goes wrong with a request, as OpenAI's API words it."""

from typing import Any


class Problem(Exception):
    """Ends a request with an error reply."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        """
        Args:
          status: of HTTP.
          message: for people.
          kind: "type" of the reply.
          param: the field at fault; None = no single one.
          code: for programs.
          retry_after: seconds after which another try may succeed.
        """
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.retry_after = param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The reply's JSON."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the reply that the status calls for."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def engine_failed(reason: str) -> Problem:
    """The engine, or its work on one request, came to an end that nobody asked for."""
    return Problem(500, reason, kind="server_error", code="engine_error")


def grammar_failed(reason: str) -> Problem:
    """The form that a request asked for came to a place where it cannot go on."""
    return Problem(400, reason, param="grammar", code="grammar_failed")


def shutting_down() -> Problem:
    """No new work is taken on."""
    return Problem(
        503, "the server is shutting down; try another one", kind="server_error", code="shutting_down"
    )


def timed_out(seconds: float) -> Problem:
    """The server's own limit for a request."""
    return Problem(
        504,
        f"the answer took longer than {seconds:g} seconds, this server's limit; ask for fewer tokens",
        kind="server_error",
        code="timeout",
    )
