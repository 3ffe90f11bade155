"""The endpoints of the hub that an upload asks, on the loopback: what is sent is kept as a tree of files."""

import base64
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class HubServer(ThreadingHTTPServer):
    """Repositories, their files by name, and what was asked, in order. `refuse`: a status for every request."""

    def __init__(self, refuse: int | None = None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.refuse = refuse
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()
        self.created: list[dict] = []
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.commits: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._note()
        self._send({}, self.server.refuse or 200)

    def do_POST(self) -> None:
        body = self._note()
        if self.server.refuse is not None:
            self._send({"error": "You don't have the rights to do that"}, self.server.refuse)
        elif self.path.endswith("/repos/create"):
            asked = json.loads(body)
            self.server.created.append(asked)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self._send({"url": f"{self.server.address}/{name}", "name": name, "id": name})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = {f["path"]: "lfs" if f["path"].endswith(".safetensors") else "regular" for f in files}
            self._send(
                {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]}
            )
        elif self.path.endswith("/objects/batch"):
            objects = [
                {**item, "actions": {"upload": {"href": f"{self.server.address}/object/{item['oid']}"}}}
                for item in json.loads(body)["objects"]
            ]
            self._send({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                self._take(line["key"], line["value"])
            repo = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            self._send({"commitUrl": f"{self.server.address}/{repo}/commit/{'1' * 40}", "commitOid": "1" * 40})
        else:
            self._send({})

    def do_PUT(self) -> None:
        self.server.objects[self.path.rpartition("/")[2]] = self._note()
        self._send({})

    def _take(self, key: str, value: dict) -> None:
        if key == "header":
            self.server.commits.append(value["summary"])
        elif key == "file":
            self.server.files[value["path"]] = base64.b64decode(value["content"])
        elif key == "lfsFile":
            self.server.files[value["path"]] = self.server.objects[value["oid"]]

    def _note(self) -> bytes:
        self.server.asked.append(f"{self.command} {self.path}")
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send(self, content: dict, status: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Nothing on standard error."""
