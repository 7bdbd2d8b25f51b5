"""What every HTTP request passes before a route sees it: request id, API key, the body's limits, the log."""

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jspec_serve.limits import Limits
from jspec_serve.metrics import Metrics
from jspec_serve.page import FILES, PAGE
from jspec_serve.problem import Problem

log = logging.getLogger("jspec_serve.access")

OPEN_PATHS = ("/health", PAGE)  # probes carry no key, and browsers none until the page has asked for it
LONGEST_ID = 128


class Gate:
    """ASGI middleware around the routes; it also answers what they let fall, so that no client waits."""

    def __init__(self, app: ASGIApp, *, limits: Limits, metrics: Metrics, api_key: str | None):
        """
        Args:
          app: the routes.
          limits: of bodies.
          metrics: told of every response.
          api_key: that clients must send as a bearer token; None = nobody is asked.
        """
        self._app, self._limits, self._metrics = app, limits, metrics
        self._api_key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")[:LONGEST_ID] or uuid.uuid4().hex
        # What routes add to the log line; its id tells apart requests that came with the same header.
        details: dict[str, Any] = {}
        scope.setdefault("state", {})["log"] = details
        status = 0

        async def noted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            self._check_key(scope, headers)
            body = await self._body(scope, headers, receive)
            await self._app(scope, replay(body, receive), noted_send)
        except Problem as problem:
            await error_response(problem)(scope, receive, noted_send)
        except Exception:
            log.exception("a request failed", extra={"fields": {"request_id": request_id}})
            if not status:
                problem = Problem(500, "something went wrong here; see the server's log", kind="server_error")
                await error_response(problem)(scope, receive, noted_send)
            else:
                raise  # the server cuts the connection: the answer is broken off, and must not look whole
        finally:
            route = scope.get("route")
            path = route.path if route is not None else "unknown"
            self._metrics.response(path, status or 499)
            log.info(
                "request",
                extra={
                    "fields": {
                        "request_id": request_id,
                        "method": scope["method"],
                        "path": scope["path"][:200],
                        "status": status or 499,
                        "seconds": round(time.perf_counter() - started, 4),
                        **details,
                    }
                },
            )

    def _check_key(self, scope: Scope, headers: Mapping[str, str]) -> None:
        path = scope["path"]
        if self._api_key is None or path in OPEN_PATHS or path.startswith(FILES):
            return
        kind, _, key = headers.get("authorization", "").partition(" ")
        sent = key.encode("latin-1").strip()  # the bytes that came, whatever text they spell
        if kind.lower() != "bearer" or not hmac.compare_digest(sent, self._api_key):
            raise Problem(
                401,
                "expected this server's API key as a bearer token, got none or another; set the Authorization header",
                kind="authentication_error",
                code="invalid_api_key",
            )

    async def _body(self, scope: Scope, headers: Mapping[str, str], receive: Receive) -> bytes:
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return b""
        most = self._limits.max_body_bytes
        too_long = Problem(
            413,
            f"body: expected at most {most} bytes, got more; send less",
            param="body",
            code="body_too_large",
        )
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > most:
            raise too_long
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Problem(400, "body: expected all of it, but the client went away", param="body")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        raise too_long
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise Problem(
                408,
                f"body: expected all of it within {self._limits.body_seconds:g} seconds; send it faster",
                param="body",
            ) from None
        if size:
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                # Browsers ask first before they send this type to a foreign server.
                raise Problem(
                    415, f"content-type: expected application/json, got {kind!r:.60}; set the header"
                )
        return b"".join(parts)


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives a body that was read, then whatever comes after it."""
    given = False

    async def receive_again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


def error_response(problem: Problem) -> JSONResponse:
    """A problem as an HTTP response."""
    return JSONResponse(problem.body, status_code=problem.status, headers=problem.headers)
