"""Translation of an object store's refusals: from the errors of obstore to ours.

obstore tells the status, the service's own code and the kind of a network failure in the text of
its errors only, so that text is what is read here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.errors import (
    AccessDenied,
    AlreadyExists,
    CorruptData,
    HoldfastError,
    NotFound,
    StoreFull,
    TransientStoreError,
    UnsupportedStore,
)

_STATUS = re.compile(r"status code: (\d{3}) ([A-Za-z ]*)")
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9]+)\s*</Code>")
_CODE_OF_ONE = re.compile(r"DeleteObjects request failed for key .* \(code: ([A-Za-z0-9]+)\)")
"""S3 refuses single objects of a bulk delete in a reply of status 200."""
_MESSAGE = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_NETWORK = re.compile(r"HttpError \{\s*kind: (\w+)")
_CAUSE = re.compile(r'(?:message|error): "([^"]{1,200})"')
"""What the operating system said of it."""
_MAX_REASON = 400
_MAX_READ = 4096

_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound", "InvalidBucketName", "ContainerBeingDeleted"}
_NO_SPACE = {
    "QuotaExceeded",
    "XMinioStorageFull",
    "XMinioAdminBucketQuotaExceeded",
    "InsufficientStorage",
    "AccountLimitExceeded",
}
_NO_RIGHTS = {
    "AccessDenied",
    "AllAccessDisabled",
    "AuthenticationFailed",
    "AuthorizationFailure",
    "AuthorizationPermissionMismatch",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
_RACE = {"ConditionalRequestConflict", "OperationAborted"}
"""S3's answer to one of two puts at once: it says of neither that it won."""
_BUSY = {"SlowDown", "ServiceUnavailable", "ServerBusy"}
"""With status 503: the service itself says that it did not begin. A gateway on the way says 503 of
what it has sent on, too, and 500 is also said of what took too long and may still be done."""

_PASSING = {408, 409, 425, 429}
"""Too slow, at the same time as another, too early, too often."""

_PERMISSIONS = {
    "s3": {
        "put": "s3:PutObject",
        "create": "s3:PutObject and s3:AbortMultipartUpload",
        "get": "s3:GetObject",
        "head": "s3:GetObject, and s3:ListBucket, without which a missing object is refused too",
        "list": "s3:ListBucket",
        "delete": "s3:DeleteObject",
        "uploads": "s3:ListBucketMultipartUploads and s3:AbortMultipartUpload",
    },
    "gs": {
        "put": "storage.objects.create, and storage.objects.delete to replace one",
        "create": "storage.objects.create and storage.multipartUploads.create",
        "get": "storage.objects.get",
        "head": "storage.objects.get and storage.objects.list",
        "list": "storage.objects.list",
        "delete": "storage.objects.delete",
        "uploads": "storage.multipartUploads.list and storage.multipartUploads.abort",
    },
}
_AZURE_PERMISSION = "the role Storage Blob Data Contributor on the container"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Facts that an error of obstore states."""

    error: Exception
    status: int | None
    """HTTP status of the reply; None when there was none."""
    code: str
    """The service's own word for it."""
    network: str
    """The kind of a network failure: `Connect`, `Timeout`, `Interrupted`, …"""
    reason: str
    """For people."""

    @property
    def was_refused(self) -> bool:
        """Whether the request certainly had no effect, and may have one when it is sent again.

        A reply that says so, or a connection that was never made.
        """
        if self.code in _RACE:
            return True
        if self.status == 503:
            return self.code in _BUSY
        return self.status == 429 or (self.status is None and self.network == "Connect")

    @property
    def is_unclear(self) -> bool:
        """Whether the request may have had its effect: no reply, or that of something between."""
        return self.status is None or self.status >= 500

    @property
    def is_answer(self) -> bool:
        """Whether the service was reached: a reply has come, or the beginning of one."""
        return self.status is not None or "response body" in self.reason

    @property
    def is_silence(self) -> bool:
        """Whether it was a failure of the network, and nothing says that anybody is there."""
        return bool(self.network) and not self.is_answer

    @property
    def is_final(self) -> bool:
        """Whether the reply says that the request itself is wrong: again it would get the same."""
        return self.status in range(400, 500) and self.status not in _PASSING

    @property
    def is_past_the_end(self) -> bool:
        """The range that was asked for begins after the end of the object."""
        # The second is obstore's own, where a service answers such a range with status 206.
        return self.status == 416 or "Wanted range starting at" in self.reason


def read_failure(error: Exception) -> Failure:
    """Read an error of obstore, or of its provider of credentials."""
    text = str(error)
    told, _, details = text.partition("Debug source")
    status = _STATUS.search(told)
    code = _CODE.search(told) or _CODE_OF_ONE.search(told)
    network = _NETWORK.search(details)
    return Failure(
        error=error,
        status=int(status[1]) if status else None,
        code=code[1] if code else "",
        network=network[1] if network else "",
        reason=_reason(told, status, code, _network_words(network, details)),
    )


def read_failure_of_python(error: Exception) -> Failure:
    """Read an error of boto3 or of requests."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        told = response.get("Error", {})
        status, code = response.get("ResponseMetadata", {}).get("HTTPStatusCode"), told.get("Code")
    elif response is not None:
        found = _CODE.search(response.text[:_MAX_READ])
        status, code = response.status_code, found[1] if found else ""
    else:
        status, code = None, ""
    return Failure(
        error=error,
        status=status,
        code="" if str(code).isdigit() else str(code),
        network="" if response is not None else type(error).__name__,
        reason=" ".join(str(error).split())[:_MAX_REASON],
    )


def _network_words(network: re.Match[str] | None, details: str) -> str:
    if network is None:
        return ""
    cause = _CAUSE.search(details, network.end())
    return f"{network[1]}: {cause[1]}" if cause else network[1]


def _reason(
    told: str,
    status: re.Match[str] | None,
    code: re.Match[str] | None,
    network: str,
) -> str:
    if status is None:
        plain = " ".join(told.split())
        return f"{plain[:_MAX_REASON]} ({network})" if network else plain[:_MAX_REASON]
    message = _MESSAGE.search(told)
    words = [f"{status[1]} {status[2].strip()}", code[1] if code else ""]
    words.append(" ".join(message[1].split()) if message else "")
    return ": ".join(word for word in words if word)[:_MAX_REASON]


def as_store_error(failure: Failure, operation: str, url: str, *, who: str) -> HoldfastError:
    """The error of ours for a failed `operation` on `url`; `who` says whose credentials were used.

    What is not known is `TransientStoreError`: nothing on the way to a cloud condemns the bytes
    that lie there.
    """
    what = f"{operation} {url}: {failure.reason}"
    kind = type(failure.error).__name__
    scheme = url.partition("://")[0]
    if failure.code in _NO_BUCKET:
        return UnsupportedStore(f"{what}. Make the bucket first, or mend the URL")
    if failure.code in _NO_SPACE or failure.status == 507:
        return StoreFull(what)
    if failure.code in _RACE:
        return TransientStoreError(what)
    if failure.status in (401, 403) or failure.code in _NO_RIGHTS or kind in _DENIALS:
        needed = _PERMISSIONS.get(scheme, {}).get(operation, _AZURE_PERMISSION)
        clock = "; this machine's clock is wrong" if failure.code == "RequestTimeTooSkewed" else ""
        return AccessDenied(f"{what}. Used: {who}. Needed: {needed}{clock}")
    if isinstance(failure.error, FileNotFoundError):
        return NotFound(f"{operation} {url}: there is no such object")
    if kind in ("AlreadyExistsError", "PreconditionError"):
        return AlreadyExists(f"{operation} {url}: the key is taken")
    if failure.is_past_the_end:
        return CorruptData(f"{what}; it is shorter than expected")
    if "redirect without LOCATION" in failure.reason or failure.code == "PermanentRedirect":
        return UnsupportedStore(f"{what}. Set the region of the bucket (AWS_REGION)")
    if "non-partial response" in failure.reason or "range requested" in failure.reason:
        return UnsupportedStore(f"{what}. This service does not read exact ranges")
    if kind == "NotSupportedError" or failure.status == 501:
        return UnsupportedStore(what)
    return TransientStoreError(what)


_DENIALS = ("PermissionDeniedError", "UnauthenticatedError")
