"""What a server holds, seen by bare clients: an opinion independent of Holdfast's own stores."""

from __future__ import annotations

from typing import Any

import obstore
from obstore.store import AzureStore, GCSStore, S3Store

from servers.google import abort_gcs_upload, gcs_uploads
from servers.program import Service
from servers.s3 import REGION, s3_client, s3_uploads

_HTTP: Any = {"allow_http": True, "timeout": "60s"}


def bare_store(service: Service) -> Any:
    """The bucket, through obstore."""
    environment = service.environment
    if service.scheme == "s3":
        return S3Store(
            service.bucket,
            endpoint=service.endpoint,
            access_key_id=environment["AWS_ACCESS_KEY_ID"],
            secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
            region=REGION,
            client_options=_HTTP,
        )
    if service.scheme == "gs":
        key = environment["GOOGLE_SERVICE_ACCOUNT_KEY"]
        return GCSStore(service.bucket, service_account_key=key, client_options=_HTTP)
    return AzureStore(
        service.bucket,
        account_name=environment["AZURE_STORAGE_ACCOUNT_NAME"],
        account_key=environment["AZURE_STORAGE_ACCOUNT_KEY"],
        endpoint=service.endpoint,
        client_options=_HTTP,
    )


def keys(service: Service, prefix: str) -> list[str]:
    """Every key under a prefix, in order."""
    found = obstore.list(bare_store(service), prefix).collect()
    return sorted(item["path"] for item in found)


def uploads(service: Service, prefix: str) -> list[tuple[str, str]]:
    """Key and id of the multipart uploads that nobody completed or aborted.

    Azure has none: blocks that are not committed belong to no upload and go after a week.
    """
    if service.scheme == "s3":
        return s3_uploads(service, prefix)
    return gcs_uploads(service, prefix) if service.scheme == "gs" else []


def broken_uploads(service: Service, root: str) -> list[tuple[str, str]]:
    """The uploads that gc should have found under a root's URL."""
    return uploads(service, root.removeprefix(service.root("")))


def clear(service: Service, prefix: str) -> None:
    """Remove every object and every upload under a prefix."""
    found = keys(service, prefix)
    if found:
        obstore.delete(bare_store(service), found)
    for key, upload in uploads(service, prefix):
        if service.scheme == "s3":
            s3_client(service).abort_multipart_upload(
                Bucket=service.bucket, Key=key, UploadId=upload
            )
        else:
            abort_gcs_upload(service, key, upload)
