"""What the page asks besides the API: the models with their choices, runs and their reports, and comparisons."""

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response

from runtime.errors import UserError
from runtime.serve import runs
from runtime.serve.answers import as_json
from runtime.serve.compare import compare
from runtime.serve.errors import ApiError
from runtime.serve.models import Models, Served
from runtime.serve.protocol import CompareRequest
from runtime.serve.run import ClientGone, unless_gone
from runtime.serve.settings import PageSettings
from runtime.serve.static import REPORT_POLICY, add_static, page_headers

Reader = Callable[[type[CompareRequest], Request], Awaitable[CompareRequest]]


class PageRoutes:
    """The page's files and its own endpoints.

    A frame cannot send a key, so a report's address carries a ticket, which whoever may list the runs is given.
    """

    def __init__(self, models: Models, settings: PageSettings, version: str) -> None:
        self._models, self._settings, self._version = models, settings, version
        self._secret = secrets.token_bytes(32)
        self._comparing = asyncio.Lock()

    def add_to(self, app: FastAPI, read: Reader) -> None:
        """Adds everything to an app, whose bodies `read` reads."""

        async def compare_models(request: Request) -> Response:
            return await self._compare(request, await read(CompareRequest, request))

        app.add_api_route("/compare", compare_models, methods=["POST"], response_model=None)
        add_static(app)
        for path, endpoint in (
            ("/page-data", self.data),
            ("/runs", self.list_runs),
            ("/run", self.one_run),
            ("/run-report", self.report),
        ):
            app.add_api_route(path, endpoint, methods=["GET"], response_model=None)

    async def data(self) -> Response:
        """The models with what may be chosen of each, and which views there is something for."""
        found = {
            "version": self._version,
            "models": [_model(one) for one in self._models],
            "original": self._settings.original,
            "runs": self._settings.runs is not None,
        }
        return as_json(found)

    async def list_runs(self) -> Response:
        """Every run and sweep with its figures."""
        found = await self._runs()

        def rows() -> list[dict[str, Any]]:
            return [runs.row(one) for one in found.values()]

        return as_json({"runs": await asyncio.to_thread(rows), "complete": len(found) < runs.MOST_RUNS})

    async def one_run(self, request: Request) -> Response:
        """The figures of a run, its recipe, and where its report is."""
        found = await self._run(request)
        row = await asyncio.to_thread(runs.row, found)
        recipe = await asyncio.to_thread(runs.recipe_text, found) if found.problem is None else None
        return as_json({"run": row, "recipe": recipe, "ticket": self._ticket(found.name) if row["has_page"] else None})

    async def report(self, request: Request) -> Response:
        """A report as a page of its own, which runs no script and reaches no host."""
        name, ticket = request.query_params.get("name", ""), request.query_params.get("ticket", "")
        if not hmac.compare_digest(self._ticket(name).encode(), ticket.encode("utf-8", "replace")):
            raise ApiError(403, "this address of a report is an old one: open the report from the page", code="ticket")
        content = await asyncio.to_thread(runs.report_page, await self._run(request))
        if content is None:
            raise ApiError(404, "the run has no report page that can be read", code="not_found")
        return Response(content, headers=page_headers(REPORT_POLICY), media_type="text/html; charset=utf-8")

    async def _compare(self, request: Request, asked: CompareRequest) -> Response:
        if self._settings.original is None:
            raise ApiError(
                404, "there is nothing to compare with: start the server with --original PATH", code="no_original"
            )
        original, other = self._models.get(self._settings.original), self._models.get(asked.model)
        try:
            # An engine reads one text at a time.
            async with self._comparing:
                return as_json(await unless_gone(compare(original, other, asked.text), request.receive))
        except ClientGone:
            return Response(status_code=499)

    async def _runs(self) -> dict[str, runs.Found]:
        if self._settings.runs is None:
            raise ApiError(404, "no runs are listed here: start the server with --runs DIR", code="no_runs")
        try:
            return await asyncio.to_thread(runs.listed, self._settings.runs)
        except UserError as error:
            raise ApiError(404, str(error), code="no_runs") from None

    async def _run(self, request: Request) -> runs.Found:
        name, found = request.query_params.get("name", ""), await self._runs()
        if name not in found:
            raise ApiError(404, "there is no run of this name any more: look at the list again", code="not_found")
        return found[name]

    def _ticket(self, name: str) -> str:
        return hmac.new(self._secret, name.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()


def _model(served: Served) -> dict[str, Any]:
    about = served.about
    names = ("context", "drafters", "exact", "fingerprint", "pages", "max_batch")
    return {
        "name": served.name,
        "chat": bool(served.vocabulary.tokenizer.chat_template),
        "defaults": served.vocabulary.defaults,
        **{name: about[name] for name in names},
    }
