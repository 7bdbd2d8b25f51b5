"""Files of requests in OpenAI's batch format, answered line by line."""

import asyncio
import dataclasses
import json
import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError

from jspec_serve.api.endpoints import ENDPOINTS
from jspec_serve.api.fields import validation_problem
from jspec_serve.problem import Problem
from jspec_serve.service import Service

FIELDS = {"custom_id", "method", "url", "body"}
BEGINNING = b'{"id": "batch_req_'  # of every answer
# Each worker holds one call; as many wait as run, so that a slot that becomes free is taken at once.
CALLS_PER_SLOT = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchRow:
    """One request of a batch."""

    custom_id: str
    url: str
    body: dict[str, Any]


def read_batch(path: Path) -> list[BatchRow]:
    """The requests of a file.

    Raises:
      ValueError: naming the first line that is no request, or that repeats a custom_id.
      OSError: the file cannot be read.
    """
    rows: dict[str, BatchRow] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            row = _row(f"{path}:{number}", line)
            if row.custom_id in rows:
                raise ValueError(
                    f"{path}:{number}: expected a custom_id of its own, got {row.custom_id!r} again; rename it"
                )
            rows[row.custom_id] = row
    return list(rows.values())


def _row(origin: str, line: bytes) -> BatchRow:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{origin}: expected one JSON object a line, got {problem}; correct it") from problem
    if not isinstance(value, dict) or set(value) != FIELDS:
        got = ", ".join(sorted(value)) if isinstance(value, dict) else type(value).__name__
        raise ValueError(
            f"{origin}: expected an object of {', '.join(sorted(FIELDS))}, got {got}; correct it"
        )
    if not isinstance(value["custom_id"], str) or not value["custom_id"]:
        raise ValueError(
            f"{origin}: custom_id: expected some text, got {value['custom_id']!r:.60}; name the request"
        )
    if value["method"] != "POST" or value["url"] not in ENDPOINTS:
        raise ValueError(
            f"{origin}: url: expected POST to one of {', '.join(ENDPOINTS)}, got {value['method']!r:.20} to "
            f"{value['url']!r:.60}; correct it"
        )
    if not isinstance(value["body"], dict):
        raise ValueError(
            f"{origin}: body: expected an object, got {type(value['body']).__name__}; correct it"
        )
    return BatchRow(custom_id=value["custom_id"], url=value["url"], body=value["body"])


def take_up(path: Path) -> set[str]:
    """Makes an output file ready to be continued, and tells which requests it has answered.

    What a run that was killed left half-written goes, and so do answers that failed by the server's fault
    (status 500 and above): they are asked again.

    Raises:
      ValueError: naming the first line that is no answer; the file is as it was.
      OSError: the file cannot be read or written.
    """
    if not path.exists():
        return set()
    kept, answered = [], set()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n") and BEGINNING.startswith(line[: len(BEGINNING)]):
                continue
            try:
                value = json.loads(line)
                custom_id, status = str(value["custom_id"]), int(value["response"]["status_code"])
            except (ValueError, TypeError, KeyError) as problem:
                raise ValueError(
                    f"{path}:{number}: expected an answer of jspec batch, got {line[:60]!r}; write to another file"
                ) from problem
            if status < 500:
                kept.append(line.rstrip(b"\n") + b"\n")
                answered.add(custom_id)
    beside = path.with_name(f"{path.name}.new")
    beside.write_bytes(b"".join(kept))
    os.replace(beside, path)
    return answered


async def run_batch(
    service: Service, rows: Sequence[BatchRow], output: TextIO, on_answer: Callable[[int], None]
) -> None:
    """Answers rows and writes each answer when it is there, in whatever order they end.

    Args:
      service: started; nobody else asks it.
      rows: in the order in which they begin.
      output: gets one line for each.
      on_answer: called with each status.
    """
    left: Iterable[BatchRow] = iter(rows)

    async def work() -> None:
        for row in left:
            status, body = await answered(service, row)
            request_id = uuid.uuid4().hex
            reply = {
                "id": f"batch_req_{request_id}",
                "custom_id": row.custom_id,
                "response": {"status_code": status, "request_id": request_id, "body": body},
                "error": None,
            }
            output.write(json.dumps(reply) + "\n")
            output.flush()
            on_answer(status)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(CALLS_PER_SLOT * service.engine.max_slots, len(rows))):
            group.create_task(work())


async def answered(service: Service, row: BatchRow) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer to one request."""
    endpoint = ENDPOINTS[row.url]
    try:
        body = endpoint.body.model_validate(row.body)
        if body.stream:
            raise Problem(
                400, "stream: expected false or nothing in a batch, got true; drop it", param="stream"
            )
        prepared = await asyncio.to_thread(endpoint.prepare, service, body)
        answer = endpoint.answer(service, body, prepared)
        async with service.submit(prepared) as call:
            async for update in call.updates():
                answer.add(update)
    except ValidationError as problem:
        refused = validation_problem(problem.errors(), endpoint.body, row.body)
        return refused.status, refused.body
    except Problem as problem:
        return problem.status, problem.body
    return 200, answer.whole()
