"""A bare Starlette app on uvicorn, as a reference: `/` is a static page, `/ingest` takes a body and keeps nothing.

`python -m tests.bench.bare_app PORT PAGE_BYTES`
"""

from __future__ import annotations

import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


def main(port: int, page_bytes: int) -> None:
    page = b"x" * page_bytes

    async def get(_: Request) -> Response:
        return Response(page, media_type="text/html")

    async def post(request: Request) -> Response:
        await request.body()
        return JSONResponse({"accepted": 0})

    app = Starlette(routes=[Route("/", get), Route("/ingest", post, methods=["POST"])])
    uvicorn.run(app, port=port, http="h11", loop="asyncio", access_log=False, log_level="warning")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
