"""The routes of a server, as a FastAPI application."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import jax
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from jspec.grammar.overlap import resolve_overlap
from jspec_serve.api.chat import ChatRequest
from jspec_serve.api.completions import CompletionRequest
from jspec_serve.api.endpoints import ENDPOINTS
from jspec_serve.api.fields import SamplingRequest, Strict, validation_problem
from jspec_serve.api.responses import ResponsesRequest
from jspec_serve.api.tokens import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from jspec_serve.gate import Gate, error_response
from jspec_serve.page import add_page
from jspec_serve.problem import Problem
from jspec_serve.service import Service
from jspec_serve.streams import AnswerResponse

BODIES: dict[str, type[Strict]] = {
    **{path: endpoint.body for path, endpoint in ENDPOINTS.items()},
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}

_TEXT_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
ERROR: dict[str, Any] = {
    "description": "What is wrong, and with which field.",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {
                        "type": "object",
                        "required": ["message", "type", "param", "code"],
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": _TEXT_OR_NULL,
                            "code": _TEXT_OR_NULL,
                        },
                    }
                },
            }
        }
    },
}


def create_app(service: Service, *, api_key: str | None = None) -> FastAPI:
    """The application; its lifespan starts and stops the engine's thread.

    Args:
      service: not started yet.
      api_key: that clients must send; None = nobody is asked.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await asyncio.to_thread(service.stop)

    app = FastAPI(
        title="jspec",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses={"4XX": ERROR, "5XX": ERROR},
    )
    app.add_middleware(Gate, limits=service.limits, metrics=service.metrics, api_key=api_key)
    add_error_replies(app)
    add_generation(app, service)
    add_tokens(app, service)
    add_status(app, service)
    add_page(app)
    return app


def add_error_replies(app: FastAPI) -> None:
    """Every error has the same JSON."""

    @app.exception_handler(Problem)
    async def on_problem(_: Request, problem: Problem) -> Response:
        return error_response(problem)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, problem: RequestValidationError) -> Response:
        model = BODIES.get(request.url.path, Strict)
        return error_response(validation_problem(problem.errors(), model, problem.body))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, problem: HTTPException) -> Response:
        if problem.status_code == 404:
            message = f"no such path: {request.url.path[:200]}"
        elif problem.status_code == 405:
            message = f"{request.url.path} does not take {request.method}"
        else:
            message = str(problem.detail)
        response = error_response(Problem(problem.status_code, message))
        response.headers.update(problem.headers or {})
        return response


def add_generation(app: FastAPI, service: Service) -> None:
    """The routes that generate."""

    async def answered(request: Request, body: SamplingRequest) -> Response:
        endpoint = ENDPOINTS[request.url.path]
        deadline = service.deadline()
        prepared = await asyncio.to_thread(endpoint.prepare, service, body)
        answer = endpoint.answer(service, body, prepared)
        # Whose turn it is: users of one client of ours are clients, too.
        client = body.user or (request.client.host if request.client else None)
        return AnswerResponse(
            service.submit(prepared, client=client),
            answer,
            deadline=deadline,
            seconds=service.limits.request_seconds,
            log=request.state.log,
        )

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        """A message that follows a chat."""
        return await answered(request, body)

    @app.post("/v1/responses")
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        """Items that follow items."""
        return await answered(request, body)

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Text that follows a text."""
        return await answered(request, body)


def add_tokens(app: FastAPI, service: Service) -> None:
    """The routes of the tokenizer."""

    @app.post("/tokenize")
    async def tokenize_(body: TokenizeRequest) -> dict[str, Any]:
        """Ids of a text or a chat."""
        return await asyncio.to_thread(tokenize, service, body)

    @app.post("/detokenize")
    async def detokenize_(body: DetokenizeRequest) -> dict[str, Any]:
        """Text of ids."""
        return await asyncio.to_thread(detokenize, service, body)


def add_status(app: FastAPI, service: Service) -> None:
    """The routes that tell of the server."""

    def model() -> dict[str, Any]:
        return {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "jspec",
            "max_model_len": service.engine.max_context,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that there is."""
        return {"object": "list", "data": [model()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        """A model by its name."""
        service.check_model(name)
        return model()

    @app.get("/health")
    async def health() -> Response:
        """200 while requests are taken on, else 503."""
        return JSONResponse({"status": service.state}, status_code=200 if service.state == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """Sizes, limits and counts."""
        return info(service)


def info(service: Service) -> dict[str, Any]:
    """What /server_info tells."""
    engine, thread = service.engine, service.thread
    drafter = engine.method.drafter
    return {
        "model": service.name,
        "target": engine.method.target.identity,
        "drafter": drafter.name,
        "draft_length": drafter.draft_length,
        "draft_depth": drafter.draft_depth,
        "scheduled": engine.method.scheduled,
        "max_context": engine.max_context,
        "max_slots": engine.max_slots,
        "page_size": engine.page_size,
        "prefix_cache": engine.prefix_cache,
        "grammar": engine.grammar,
        "num_pages": list(engine.num_pages),
        "overlap": engine.overlap,
        "mixed_chunks": list(engine.ladder.mixed_chunks),
        "grammar_overlap": resolve_overlap(None, engine.grammar_overlap, overlap=engine.overlap),
        "free_pages": list(engine.free_pages),
        "max_log_probs": engine.method.max_log_probs,
        "limits": dataclasses.asdict(service.limits),
        "state": service.state,
        "running": thread.running,
        "waiting": thread.waiting,
        "rounds": thread.rounds,
        "compiled_programs": sum(engine.programs.traces.values()),
        "devices": [str(device) for device in jax.devices()],
        "jax": jax.__version__,
    }
