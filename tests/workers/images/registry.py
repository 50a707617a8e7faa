"""A real registry with tiny images in it, and what can stand between it and a Docker host."""

import contextlib
import hashlib
import io
import json
import socket
import tarfile
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from infra import processes
from tests.conftest import answers_ok, free_ports

CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
LAYER_TYPE = "application/vnd.docker.image.rootfs.diff.tar"
MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"

PATIENCE_S = 120.0  # of tests with pulls and registries


def layer(name: str, content: bytes) -> bytes:
    """A layer with one file, uncompressed, so that its size is what it seems."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return archive.getvalue()


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass(slots=True)
class Registry:
    """docker-registry on a port of its own; what it holds lies in `directory` and outlives it."""

    directory: Path
    port: int = field(default_factory=lambda: free_ports(1)[0])
    child: processes.Child | None = None

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        config, log = self.directory / "config.yml", self.directory / "registry.log"
        config.write_text(
            f"version: 0.1\nlog: {{level: warn}}\nhttp: {{addr: '{self.host}'}}\n"
            f"storage: {{filesystem: {{rootdirectory: '{self.directory / 'data'}'}}}}\n"
        )
        self.child = processes.start("registry", ["docker-registry", "serve", str(config)], log=log)
        url = f"http://{self.host}/v2/"
        processes.wait_until(lambda: answers_ok(url), child=self.child, timeout_s=PATIENCE_S, log=log)

    def kill(self) -> None:
        assert self.child is not None
        self.child.stop(grace_s=0)

    def publish(self, name: str, layers: list[bytes], *, architecture: str = "amd64") -> str:
        """Puts an image there; the base layers have a history, so that Docker tells each layer's size. Returns the digest."""
        repository, _, tag = name.partition(":")
        history = [
            {"created": "2025-01-01T00:00:00Z", "created_by": f"layer {sha256(data)}"} for data in layers
        ]
        config = json.dumps(
            {
                "architecture": architecture,
                "os": "linux",
                "config": {"Env": [f"NAME={name}"]},
                "rootfs": {"type": "layers", "diff_ids": [sha256(data) for data in layers]},
                "history": history,
            }
        ).encode()
        for blob in (config, *layers):
            self._upload(repository, blob)
        manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST_TYPE,
                "config": {"mediaType": CONFIG_TYPE, "size": len(config), "digest": sha256(config)},
                "layers": [
                    {"mediaType": LAYER_TYPE, "size": len(data), "digest": sha256(data)} for data in layers
                ],
            }
        ).encode()
        self._send("PUT", f"/v2/{repository}/manifests/{tag or 'latest'}", manifest, MANIFEST_TYPE)
        return sha256(manifest)

    def blob_path(self, digest: str) -> Path:
        value = digest.removeprefix("sha256:")
        return self.directory / f"data/docker/registry/v2/blobs/sha256/{value[:2]}/{value}/data"

    def _upload(self, repository: str, blob: bytes) -> None:
        location = self._send("POST", f"/v2/{repository}/blobs/uploads/", b"")
        separator = "&" if "?" in location else "?"
        query = urllib.parse.urlencode({"digest": sha256(blob)})
        self._send("PUT", f"{location}{separator}{query}", blob, "application/octet-stream")

    def _send(self, method: str, path: str, data: bytes, kind: str = "application/octet-stream") -> str:
        url = path if path.startswith("http") else f"http://{self.host}{path}"
        request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": kind})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.headers.get("Location", "")


class Gate:
    """Forwards a port to the registry, and stops in the middle of what is long until it is opened."""

    PASSES_BYTES = 64 * 1024  # of each connection while shut

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._server = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.reached = threading.Event()  # somebody waits before it
        self.opened = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.opened.set()
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            client,
            socket.create_connection(("127.0.0.1", self._registry.port)) as upstream,
        ):
            threading.Thread(target=_forward, args=(client, upstream), daemon=True).start()
            _forward(upstream, client, self._passed)

    def _passed(self, num_bytes: int) -> None:
        if num_bytes > self.PASSES_BYTES and not self.opened.is_set():
            self.reached.set()
            self.opened.wait()


def _forward(source: socket.socket, target: socket.socket, on_bytes: Callable[[int], None] = abs) -> None:
    """Until either side closes, upon which both are closed."""
    num_bytes = 0
    with contextlib.suppress(OSError):
        while data := source.recv(16 * 1024):
            on_bytes(num_bytes := num_bytes + len(data))
            target.sendall(data)
    for side in (source, target):
        with contextlib.suppress(OSError):
            side.shutdown(socket.SHUT_RDWR)


class _Broken(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(500, "out of order")

    def log_message(self, format: str, *args: object) -> None: ...


@contextlib.contextmanager
def broken_proxy() -> Iterator[str]:
    """A host that answers everything with status 500."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Broken) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
