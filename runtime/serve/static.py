"""The page at `/`: its files as they lie in the package, and the headers that keep it to this host."""

from importlib.resources import files

from fastapi import FastAPI, Response

from runtime.serve.errors import ApiError

# Nothing from another host, no script and no style but our files, in no other page's frame.
PAGE_POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
# A run's report brings its styles and pictures along, and no script of it runs.
REPORT_POLICY = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; font-src data:; frame-ancestors 'self'"
)
_COMMON = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def add_static(app: FastAPI) -> None:
    """Adds `/` and `/page/NAME`, which anybody may read who reaches the server: they hold nothing of a model."""
    found = {path.name: path.read_bytes() for path in files("runtime.serve").joinpath("page").iterdir()}

    def answer(name: str) -> Response:
        kind = _KINDS.get(name[name.rfind(".") :])
        if name not in found or kind is None:
            raise ApiError(404, "the page has no such file", code="not_found")
        return Response(found[name], headers=page_headers(PAGE_POLICY), media_type=f"{kind}; charset=utf-8")

    async def index() -> Response:
        return answer("index.html")

    async def file(name: str) -> Response:
        return answer(name)

    app.add_api_route("/", index, methods=["GET"], response_model=None)
    app.add_api_route("/page/{name}", file, methods=["GET"], response_model=None)


def page_headers(policy: str) -> dict[str, str]:
    """Headers of something that a browser shows."""
    return {"Content-Security-Policy": policy, **_COMMON}
