"""The page at /: a chat that shows which tokens were drafted, and charts of load and acceptance."""

import mimetypes
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.exceptions import HTTPException

FOLDER = Path(__file__).parent / "web"
PAGE = "/"
FILES = "/web/"  # what the page loads
# The page runs nothing and asks nobody but what this server sends; no other page may frame it.
HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """The routes of the page. They tell nothing of the server, and so need no key."""
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir()}

    def response(name: str) -> Response:
        return Response(files[name], media_type=mimetypes.guess_type(name)[0], headers=HEADERS)

    @app.get(PAGE, include_in_schema=False)
    async def page() -> Response:
        return response("index.html")

    @app.get(f"{FILES}{{name}}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in files:
            raise HTTPException(404)
        return response(name)
