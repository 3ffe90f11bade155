"""Who may ask, and what a request may look like, before any endpoint sees it."""

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from runtime.files import regular
from runtime.serve.errors import ApiError
from runtime.serve.settings import Access

App = Callable[[Any, Any, Any], Awaitable[None]]

# The page and its files ask for the key themselves; a report's address brings a ticket in its place.
OPEN = ("/health", "/", "/run-report")
OPEN_FOLDER = "/page/"
SHORTEST_KEY = 8


class Guard:
    """A layer around an ASGI app: Host, key, and an id for each request."""

    def __init__(self, app: App, access: Access) -> None:
        self._app, self._access = app, access
        self._keys = [_digest(key) for key in access.keys]
        self._admin = [_digest(key) for key in access.admin_keys]
        self._hosts = {"localhost", access.host.lower(), *(host.lower() for host in access.hosts)}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        told = [(b"x-request-id", f"req_{secrets.token_hex(12)}".encode()), *self._cors(headers)]

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *told]
            await send(message)

        try:
            self._check(scope, headers)
        except ApiError as error:
            await respond(error, answer)
            return
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers and len(told) > 1:
            told += [
                (b"access-control-allow-methods", b"GET, POST"),
                (b"access-control-allow-headers", b"authorization, content-type"),
            ]
            await answer({"type": "http.response.start", "status": 204, "headers": []})
            await answer({"type": "http.response.body", "body": b""})
            return
        await self._app(scope, receive, answer)

    def _cors(self, headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
        origin = headers.get("origin")
        if origin is None or origin not in self._access.cors_origins:
            return []
        return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin")]

    def _check(self, scope: Any, headers: dict[str, str]) -> None:
        """Raises ApiError."""
        path = scope["path"]
        if not self._known_host(headers.get("host", "")):
            raise ApiError(
                403, "the Host header names a host that this server does not answer for: see --allow-host", code="host"
            )
        if path.startswith("/admin/"):
            self._check_admin(scope, headers)
        elif self._keys and not _is_open(path) and scope["method"] != "OPTIONS":
            _require(self._keys, headers)

    def _check_admin(self, scope: Any, headers: dict[str, str]) -> None:
        if self._admin:
            _require(self._admin, headers)
            return
        client = scope.get("client")
        if client is None or not is_loopback(client[0]):
            raise ApiError(
                403, "administration is for this machine alone where there is no --admin-key-file", code="admin"
            )
        if self._keys:
            _require(self._keys, headers)

    def _known_host(self, host: str) -> bool:
        """A name that a foreign page could point here is not known; an address cannot be pointed anywhere."""
        name = host.lower()
        name = name[1 : name.index("]")] if name.startswith("[") and "]" in name else name.split(":")[0]
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _is_open(path: str) -> bool:
    """Whether nobody is asked for a key."""
    return path in OPEN or path.startswith(OPEN_FOLDER)


def is_loopback(host: str) -> bool:
    """Whether an address, or name, is of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_keys(option: str, path: Path | None) -> tuple[str, ...]:
    """The keys of a file, one a line; lines that begin with # are none. Raises UserError."""
    if path is None:
        return ()
    try:
        lines = regular(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{option}: {path} is no text file that can be read; give one with a key a line") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise UserError(f"{option}: {path} holds no key; write one a line")
    if any(len(key) < SHORTEST_KEY or not key.isascii() or not key.isprintable() for key in keys):
        raise UserError(f"{option}: a key of {path} is shorter than {SHORTEST_KEY} characters, or not plain ASCII")
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()


def _require(keys: list[bytes], headers: dict[str, str]) -> None:
    """Raises ApiError 401. Takes as long for a key that is nearly right as for any other, and looks at all of them."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    digest = _digest(given.strip())
    right = [hmac.compare_digest(digest, key) for key in keys]
    if scheme.lower() != "bearer" or not any(right):
        raise ApiError(
            401,
            "the request needs a key: send it as the header Authorization: Bearer KEY",
            "authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


async def respond(error: ApiError, send: Any) -> None:
    """Sends an error as a whole answer."""
    headers = [(b"content-type", b"application/json")]
    headers += [(name.lower().encode(), value.encode("latin-1")) for name, value in error.headers.items()]
    headers.append((b"content-length", str(len(error.body)).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.body})
