"""Answers over HTTP: whole or as server-sent events, watched for clients that leave and for the time."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jspec_serve.api.answer import Answer
from jspec_serve.calls import Call
from jspec_serve.problem import Problem, timed_out

# Seconds in which a stream that failed may still tell its client why.
LAST_WORDS = 1.0


class AnswerResponse(Response):
    """Answers one call. It ends the call when the client leaves or the time is over.

    A stream's headers are sent with its first tokens, so that what fails before them has a status of its own.
    """

    def __init__(
        self, call: Call, answer: Answer[Any], *, deadline: float, seconds: float, log: dict[str, Any]
    ):
        """
        Args:
          call: that was submitted for it.
          answer: that takes the call's updates.
          deadline: on the loop's clock.
          seconds: that lie between start and deadline, for the message.
          log: gets what the log line tells of the answer.
        """
        super().__init__()
        self._call, self._answer = call, answer
        self._deadline, self._seconds, self._log = deadline, seconds, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer."""
        async with self._call:
            sending = asyncio.ensure_future(self._within_time(scope, receive, send))
            leaving = asyncio.ensure_future(disconnected(receive))
            try:
                await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
                else:
                    self._log["client"] = "left"
            finally:
                for task in (sending, leaving):
                    task.cancel()
                await asyncio.gather(sending, leaving, return_exceptions=True)
                self._describe()

    async def _within_time(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noted_send(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            async with asyncio.timeout_at(self._deadline):
                if self._answer.body.stream:
                    await self._send_stream(noted_send)
                else:
                    await self._send_whole(scope, receive, noted_send)
            return
        except Problem as problem:
            failed = problem
        except TimeoutError:
            failed = timed_out(self._seconds)
        self._log["error"] = failed.message
        if not started:
            raise failed
        async with asyncio.timeout(LAST_WORDS):
            await send(_body(self._answer.event(self._answer.failure(failed))))
            await send(_body(b"", more=False))

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        async for update in self._call.updates():
            self._answer.add(update)
        response = Response(to_json(self._answer.whole()), media_type="application/json")
        await response(scope, receive, send)

    async def _send_stream(self, send: Send) -> None:
        begun = False
        async for chunks in self._chunks():
            if not begun:
                headers = [
                    (b"content-type", b"text/event-stream; charset=utf-8"),
                    (b"cache-control", b"no-cache"),
                ]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                begun = True
            await send(_body(b"".join(map(self._answer.event, chunks))))
        await send(_body(self._answer.stream_end, more=False))

    async def _chunks(self) -> AsyncIterator[list[dict[str, Any]]]:
        async for update in self._call.updates():
            if chunks := self._answer.add(update):
                yield chunks
        if chunks := self._answer.last_chunks():
            yield chunks

    def _describe(self) -> None:
        answer = self._answer
        self._log.update(
            answer=answer.id,
            prompt_tokens=answer.usage["prompt_tokens"],
            completion_tokens=answer.completion_tokens,
            finish_reasons=list(answer.finish_reasons.values()),
        )
        if answer.body.user is not None:
            self._log["user"] = answer.body.user[:200]
        if answer.times:
            times = answer.times
            self._log["queue_seconds"] = round(max(t.started - t.submitted for t in times), 4)
            self._log["first_token_seconds"] = round(min(t.first_token - t.submitted for t in times), 4)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _body(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
