"""Multipart uploads that nobody completed: bytes that are paid for and that no list of objects
shows. obstore cannot list them, so each cloud is asked in its own way.

S3 is asked through boto3, Google Cloud Storage through its XML API. Azure has no uploads: blocks
that were not committed belong to no one, cannot be listed, and go by themselves after a week.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.errors import HoldfastError, TransientStoreError
from holdfast.store.remoteerrors import as_store_error, read_boto_failure
from holdfast.store.remoteopen import Clients, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """An upload that was begun and not completed."""

    key: str
    upload_id: str


def uploads(place: Place, clients: Clients, folder: str) -> Iterator[Upload]:
    """The uploads whose keys are under a folder (with a slash; "" is the root)."""
    if clients.s3 is None:
        return
    inside = place.key(folder)
    cut = len(place.key(""))
    try:
        pages = clients.s3.get_paginator("list_multipart_uploads")
        for page in pages.paginate(Bucket=place.bucket, Prefix=inside):
            for found in page.get("Uploads", ()):
                yield Upload(key=found["Key"][cut:], upload_id=found["UploadId"])
    except Exception as error:
        raise _refused(place, clients, folder, error) from error


def abort(place: Place, clients: Clients, upload: Upload) -> None:
    """End an upload; one that has ended already is fine."""
    assert clients.s3 is not None, "only what was listed is aborted"
    try:
        clients.s3.abort_multipart_upload(
            Bucket=place.bucket, Key=place.key(upload.key), UploadId=upload.upload_id
        )
    except Exception as error:
        if read_boto_failure(error).code != "NoSuchUpload":
            raise _refused(place, clients, upload.key, error) from error


def _refused(place: Place, clients: Clients, key: str, error: Exception) -> HoldfastError:
    failure = read_boto_failure(error)
    url = f"{place.url}/{key}"
    if failure.status == 404 and not failure.code:
        return TransientStoreError(f"uploads {url}: {failure.reason}")
    return as_store_error(failure, "uploads", url, who=clients.who)
