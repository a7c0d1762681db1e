"""A Hugging Face Hub on this machine, for tests: repos with branches, private ones, tokens, and failures on demand.

with LocalHub() as hub:
    ...  # HF_ENDPOINT=hub.url and HF_HUB_DISABLE_XET=1, set before huggingface_hub is imported
hub.requests  # what was asked for, in order: "GET /tester/run/resolve/main/README.md"
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any
from urllib.parse import unquote, urlsplit

USER, ORGANISATION = "tester", "laboratory"
TOKEN = "hf_onlyForTheLocalHub"
_FIRST = "0" * 40


@dataclass(frozen=True)
class File:
    data: bytes
    lfs: bool

    @property
    def oid(self) -> str:
        """Git's name of a plain file, LFS's of a large one."""
        if self.lfs:
            return hashlib.sha256(self.data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()


Tree = dict[str, File]


@dataclass
class Repo:
    private: bool
    commits: dict[str, Tree] = field(default_factory=lambda: {_FIRST: {}})
    branches: dict[str, str] = field(default_factory=lambda: {"main": _FIRST})
    messages: list[str] = field(default_factory=list)

    def resolve(self, revision: str) -> str | None:
        """The commit of a branch or of itself."""
        oid = self.branches.get(revision, revision)
        return oid if oid in self.commits else None


@dataclass
class Failure:
    pattern: str
    status: int | None  # None: the connection is dropped
    times: int
    body: str


class LocalHub:
    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.failures: list[Failure] = []
        self.lock = Lock()
        hub = self

        class Handler(_Handler):
            local = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> LocalHub:
        Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def fail(self, pattern: str, status: int | None, times: int = 10**6, body: str = "out of order") -> None:
        """Answer the next requests that match, such as "POST .*/commit/", with an error."""
        self.failures.append(Failure(pattern, status, times, body))

    def files(self, repo_id: str, revision: str = "main") -> Tree:
        repo = self.repos[repo_id]
        return repo.commits[repo.branches.get(revision, revision)]

    def uses_lfs(self, repo_id: str, path: str) -> bool:
        return repo_id.endswith("-lfs") and path.endswith((".safetensors", ".png"))

    def next_failure(self, request: str) -> Failure | None:
        for failure in self.failures:
            if failure.times and re.match(failure.pattern, request):
                failure.times -= 1
                return failure
        return None


class _Handler(BaseHTTPRequestHandler):
    local: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        address = urlsplit(self.path)
        self.body = self._read_body()
        request = f"{self.command} {unquote(address.path)}"
        with self.local.lock:
            self.local.requests.append(request)
            failure = self.local.next_failure(request)
            if failure is not None:
                self._fail(failure)
                return
            for pattern, handler in _ROUTES:
                found = re.fullmatch(pattern, f"{self.command} {address.path}")
                if found:
                    handler(self, *map(unquote, found.groups(default="")))
                    return
        self._error(404, "no such route", "EntryNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _answer

    # ---- What every answer needs ----

    def _read_body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, status: int, content: Any, headers: Iterable[tuple[str, str]] = ()) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _error(self, status: int, message: str, code: str = "") -> None:
        self._send(status, {"error": message}, [("X-Error-Code", code), ("X-Error-Message", message)])

    def _fail(self, failure: Failure) -> None:
        if failure.status is None:
            self.close_connection = True
            self.connection.close()
        else:
            self._error(failure.status, failure.body)

    def _authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _found(self, repo_id: str, revision: str = "main", write: bool = False) -> tuple[Repo, str] | None:
        """The repo and commit; if they are missing or not for this caller, the answer is sent."""
        repo = self.local.repos.get(repo_id)
        if (write or repo is None or repo.private) and not self._authorized():
            self._error(401, "Invalid username or password.", "RepoNotFound")
        elif repo is None:
            self._error(404, "Repository not found", "RepoNotFound")
        elif (commit := repo.resolve(revision)) is None:
            self._error(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        else:
            return repo, commit
        return None

    # ---- Routes ----

    def create_repo(self) -> None:
        wanted = json.loads(self.body)
        owner = wanted.get("organization") or USER
        repo_id = f"{owner}/{wanted['name']}"
        if not self._authorized():
            self._error(401, "Invalid username or password.")
        elif owner not in (USER, ORGANISATION):
            self._error(403, f"You have no rights to create a model under the namespace {owner!r}")
        else:
            known = repo_id in self.local.repos
            if not known:
                self.local.repos[repo_id] = Repo(wanted.get("visibility") == "private" or bool(wanted.get("private")))
            self._send(409 if known else 200, {"url": f"{self.local.url}/{repo_id}", "name": repo_id, "id": repo_id})

    def create_branch(self, repo_id: str, branch: str) -> None:
        if found := self._found(repo_id, write=True):
            repo, commit = found
            if branch in repo.branches:
                self._error(409, f"Reference already exists: {branch}")
            else:
                repo.branches[branch] = commit
                self._send(200, {})

    def validate(self) -> None:
        content = json.loads(self.body)["content"]
        good = re.match(r"---\n(.+?\n)---\n", content, flags=re.DOTALL)
        self._send(200 if good else 400, {"errors": [] if good else [{"message": "no metadata"}], "warnings": []})

    def preupload(self, repo_id: str, revision: str) -> None:
        if found := self._found(repo_id, revision, write=True):
            repo, commit = found
            old = repo.commits[commit]
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if self.local.uses_lfs(repo_id, file["path"]) else "regular",
                    "shouldIgnore": False,
                    "oid": old[file["path"]].oid if file["path"] in old else None,
                }
                for file in json.loads(self.body)["files"]
            ]
            self._send(200, {"files": modes})

    def commit(self, repo_id: str, revision: str) -> None:
        if not (found := self._found(repo_id, revision, write=True)):
            return
        repo, parent = found
        tree = dict(repo.commits[parent])
        for line in self.body.splitlines():
            entry = json.loads(line)
            key, value = entry["key"], entry["value"]
            if key == "header":
                repo.messages.append(value["summary"])
            elif key == "file":
                tree[value["path"]] = File(base64.b64decode(value["content"]), lfs=False)
            elif key == "lfsFile":
                tree[value["path"]] = File(self.local.objects[value["oid"]], lfs=True)
            elif key == "deletedFile":
                tree.pop(value["path"])
        oid = hashlib.sha1(f"{repo_id} {len(repo.commits)}".encode()).hexdigest()
        repo.commits[oid] = tree
        repo.branches[revision] = oid
        self._send(200, {"commitUrl": f"{self.local.url}/{repo_id}/commit/{oid}", "commitOid": oid})

    def lfs_batch(self, repo_id: str) -> None:
        if self._found(repo_id, write=True):
            objects = [
                {"oid": o["oid"], "size": o["size"]}
                | ({} if o["oid"] in self.local.objects else {"actions": {"upload": {"href": self._object(o["oid"])}}})
                for o in json.loads(self.body)["objects"]
            ]
            self._send(200, {"transfer": "basic", "objects": objects})

    def _object(self, oid: str) -> str:
        return f"{self.local.url}/objects/{oid}"

    def put_object(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() == oid:
            self.local.objects[oid] = self.body
            self._send(200, {})
        else:
            self._error(400, "the content is not what was announced")

    def info(self, repo_id: str, revision: str = "main") -> None:
        if found := self._found(repo_id, revision or "main"):
            repo, commit = found
            siblings = [{"rfilename": path} for path in repo.commits[commit]]
            self._send(200, {"id": repo_id, "sha": commit, "private": repo.private, "siblings": siblings, "tags": []})

    def tree(self, repo_id: str, revision: str, folder: str) -> None:
        if found := self._found(repo_id, revision):
            repo, commit = found
            entries = [
                {"type": "file", "path": path, "size": len(file.data), "oid": file.oid}
                | ({"lfs": {"oid": file.oid, "size": len(file.data), "pointerSize": 130}} if file.lfs else {})
                for path, file in repo.commits[commit].items()
                if path.startswith(folder.strip("/"))
            ]
            self._send(200, entries)

    def resolve(self, repo_id: str, revision: str, path: str) -> None:
        if found := self._found(repo_id, revision):
            repo, commit = found
            file = repo.commits[commit].get(path)
            if file is None:
                headers = [("X-Error-Code", "EntryNotFound"), ("X-Repo-Commit", commit)]
                self._send(404, {"error": "Entry not found"}, headers)
            else:
                self._send(200, file.data, [("ETag", f'"{file.oid}"'), ("X-Repo-Commit", commit)])


_REPO = r"([^/]+/[^/]+)"
_ROUTES: list[tuple[str, Any]] = [
    (r"POST /api/repos/create", _Handler.create_repo),
    (r"POST /api/validate-yaml", _Handler.validate),
    (rf"POST /api/models/{_REPO}/branch/(.+)", _Handler.create_branch),
    (rf"POST /api/models/{_REPO}/preupload/(.+)", _Handler.preupload),
    (rf"POST /api/models/{_REPO}/commit/(.+)", _Handler.commit),
    (rf"POST /{_REPO}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (r"PUT /objects/([0-9a-f]{64})", _Handler.put_object),
    (rf"GET /api/models/{_REPO}", _Handler.info),
    (rf"GET /api/models/{_REPO}/revision/(.+)", _Handler.info),
    (rf"GET /api/models/{_REPO}/tree/([^/]+)(/.*)?", _Handler.tree),
    (rf"(?:GET|HEAD) /{_REPO}/resolve/([^/]+)/(.+)", _Handler.resolve),
]
