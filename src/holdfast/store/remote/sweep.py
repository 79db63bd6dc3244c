"""Lists and aborts incomplete multipart uploads, whose bytes are paid for but not listed.

obstore cannot list them: for S3 boto3 is used, for Google Cloud Storage its XML API. Azure has no
such uploads: uncommitted blocks cannot be listed, and are deleted by the service after a week.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from holdfast.errors import HoldfastError
from holdfast.store.remote.errors import as_store_error, read_failure_of_python
from holdfast.store.remote.opening import BucketLocation, Clients, GcsUploads


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A multipart upload that was begun and not completed."""

    key: str
    upload_id: str


def list_incomplete_uploads(
    place: BucketLocation, clients: Clients, folder: str
) -> Iterator[Upload]:
    """Yield the incomplete uploads under `folder`, which ends with a slash ("" is the root)."""
    prefix = place.make_object_key(folder)
    cut = len(place.make_object_key(""))
    try:
        if clients.s3 is not None:
            found = _list_s3(clients.s3, place.bucket, prefix)
        elif clients.gcs is not None:
            found = _list_gcs(clients.gcs, prefix)
        else:
            return
        for key, upload_id in found:
            yield Upload(key=key[cut:], upload_id=upload_id)
    except Exception as error:
        raise _as_error(place, clients, folder, error) from error


def abort_upload(place: BucketLocation, clients: Clients, upload: Upload) -> None:
    """Abort an upload; no-op if it has already ended."""
    key = place.make_object_key(upload.key)
    try:
        if clients.s3 is not None:
            clients.s3.abort_multipart_upload(
                Bucket=place.bucket, Key=key, UploadId=upload.upload_id
            )
        elif clients.gcs is not None:
            url = f"{clients.gcs.bucket_url}/{quote(key)}"
            _call_gcs(clients.gcs, "DELETE", url, {"uploadId": upload.upload_id})
    except Exception as error:
        failure = read_failure_of_python(error)
        if failure.code != "NoSuchUpload":
            raise _as_error(place, clients, upload.key, error) from error


def _list_s3(client: Any, bucket: str, prefix: str) -> Iterator[tuple[str, str]]:
    pages = client.get_paginator("list_multipart_uploads")
    for page in pages.paginate(Bucket=bucket, Prefix=prefix):
        for found in page.get("Uploads", ()):
            yield found["Key"], found["UploadId"]


def _list_gcs(gcs: GcsUploads, prefix: str) -> Iterator[tuple[str, str]]:
    markers: dict[str, str] = {}
    while True:
        answer = _call_gcs(gcs, "GET", gcs.bucket_url, {"uploads": "", "prefix": prefix, **markers})
        page = ElementTree.fromstring(answer)
        for found in page.findall("{*}Upload"):
            yield found.findtext("{*}Key", ""), found.findtext("{*}UploadId", "")
        if page.findtext("{*}IsTruncated") != "true":
            return
        markers = {
            "key-marker": page.findtext("{*}NextKeyMarker", ""),
            "upload-id-marker": page.findtext("{*}NextUploadIdMarker", ""),
        }


def _call_gcs(gcs: GcsUploads, method: str, url: str, params: dict[str, str]) -> bytes:
    reply = gcs.session.request(method, url, params=params, timeout=gcs.timeout_s)
    reply.raise_for_status()
    content: bytes = reply.content
    return content


def _as_error(place: BucketLocation, clients: Clients, key: str, error: Exception) -> HoldfastError:
    failure = read_failure_of_python(error)
    url = f"{place.url}/{key}"
    return as_store_error(failure, "uploads", url, who=clients.who)
