"""A server on this machine that speaks the part of the Hugging Face hub's protocol by which files are fetched."""

import hashlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """Serves a folder as the repository `owner/model`, at one commit.

    Attributes:
        endpoint: for `HF_ENDPOINT`.
        requests: (method, file, range or None) in the order they came.
    """

    def __init__(self, folder: Path) -> None:
        self.requests: list[tuple[str, str, str | None]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                server._answer(self, folder, with_body=False)

            def do_GET(self) -> None:
                server._answer(self, folder, with_body=True)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"

    def fetched(self) -> list[str]:
        """Files that were sent whole."""
        return sorted(file for method, file, part in self.requests if method == "GET" and part is None)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _answer(self, request: BaseHTTPRequestHandler, folder: Path, with_body: bool) -> None:
        part = request.headers.get("Range")
        match = re.fullmatch(r"/owner/model/resolve/([^/]+)/([^/?]+)", request.path)
        file = match[2] if match else request.path
        self.requests.append((request.command, file, part))
        if not match or match[1] not in ("main", COMMIT) or not (folder / file).is_file():
            request.send_response(404)
            request.send_header("X-Error-Code", "EntryNotFound" if match else "RepoNotFound")
            request.send_header("X-Repo-Commit", COMMIT)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        body = (folder / file).read_bytes()
        request.send_response(206 if part else 200)
        request.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("Accept-Ranges", "bytes")
        if part:
            first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", part).groups()
            size, first = len(body), int(first)
            last = min(int(last or size - 1), size - 1)
            body = body[first : last + 1]
            request.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if with_body:
            request.wfile.write(body)
