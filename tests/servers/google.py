"""The tests' own server of Google Cloud Storage (gcs.py) as a program."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from xml.etree import ElementTree

from servers.program import Program, Service, send

BUCKET = "holdfast"


class Gcs(Program):
    """The XML API of Google Cloud Storage, in memory."""

    name = "gcs"

    def install(self) -> None:
        """Nothing: it needs Python alone."""

    def start(self) -> Service:
        """Start it and make the bucket."""
        script = Path(__file__).with_name("gcs.py")
        self.spawn("gcs", [sys.executable, script, str(self.port)])
        endpoint = f"http://127.0.0.1:{self.port}"
        self.wait_for_http(endpoint)
        send("PUT", f"{endpoint}/{BUCKET}")
        return Service(
            name=self.name,
            scheme="gs",
            endpoint=endpoint,
            bucket=BUCKET,
            environment={"GOOGLE_SERVICE_ACCOUNT_KEY": _key(endpoint)},
        )


def gcs_uploads(service: Service, prefix: str = "") -> list[tuple[str, str]]:
    """Key and id of every multipart upload that was neither completed nor aborted."""
    url = f"{service.endpoint}/{service.bucket}?uploads&prefix={prefix}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=60) as reply:
        uploads = ElementTree.fromstring(reply.read()).iterfind("Upload")
        return [(str(item.findtext("Key")), str(item.findtext("UploadId"))) for item in uploads]


def abort_gcs_upload(service: Service, key: str, upload: str) -> None:
    """Give up one multipart upload."""
    send("DELETE", f"{service.endpoint}/{service.bucket}/{key}?uploadId={upload}")


def _key(endpoint: str) -> str:
    """A service account's key that names another address and needs no token."""
    nobody = {"client_email": "", "private_key": "", "private_key_id": ""}
    return json.dumps({"gcs_base_url": endpoint, "disable_oauth": True, **nobody})
