"""Translate errors of obstore, boto3 and requests to errors of Holdfast.

obstore gives the status, the service's error code and the kind of a network failure only in the
text of its errors, so that text is parsed here.
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
from holdfast.events import without_secrets

_STATUS = re.compile(r"status code: (\d{3}) ([A-Za-z ]*)")
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9]+)\s*</Code>")
_CODE_OF_ONE = re.compile(r"DeleteObjects request failed for key .* \(code: ([A-Za-z0-9]+)\)")
"""Error for one object of a bulk delete, which S3 reports in a reply of status 200."""
_MESSAGE = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_NETWORK = re.compile(r"HttpError \{\s*kind: (\w+)")
_CAUSE = re.compile(r'(?:message|error): "([^"]{1,200})"')
"""Message of the operating system about a network failure."""
_MAX_REASON = 400
_MAX_READ = 4096

_NO_LOCATION = "redirect without LOCATION"
_STOPPED = {
    "BadScheme": "it led to an unencrypted or non-web address: not followed",
    "TooManyRedirects": "more than ten redirects",
    "InvalidCertificate": "its TLS certificate is not trusted here (SSL_CERT_FILE names others)",
}
"""Why the client itself ended a request, by a word in the text of the network failure."""
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
"""Codes of S3 for one of two concurrent puts; they do not say which one won."""
_BUSY = {"SlowDown", "ServiceUnavailable", "ServerBusy"}
"""Codes that prove, with status 503, that the service did not start the request. Without such a
code a gateway may have forwarded it. After a 500 a slow request may still take effect."""

_PASSING = {408, 409, 425, 429}
"""Statuses worth a retry: timeout, conflict with another request, too early, too many."""

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
_WEB_PERMISSION = "an address that anybody may read, or https://USER:PASSWORD@HOST/…"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFailure:
    """Facts parsed from an error of obstore, boto3 or requests."""

    error: Exception
    status: int | None
    """HTTP status of the reply; None if there was no reply."""
    code: str
    """The service's error code; empty if it gave none."""
    network: str
    """Kind of a network failure, such as `Connect`, `Timeout`, `Interrupted`; else empty."""
    reason: str
    """Description of the failure, for messages."""
    stopped: str = ""
    """Why the client itself ended the request, which no retry can change; else empty."""

    @property
    def was_refused(self) -> bool:
        """Whether the request certainly had no effect, and a retry may work."""
        if self.code in _RACE:
            return True
        if self.status == 503:
            return self.code in _BUSY
        return self.status == 429 or (self.status is None and self.network == "Connect")

    @property
    def is_unclear(self) -> bool:
        """Whether the request may have had its effect: no reply, or one from a gateway."""
        return self.status is None or self.status >= 500

    @property
    def is_answer(self) -> bool:
        """Whether the service was reached: a reply was received, perhaps truncated."""
        return self.status is not None or "response body" in self.reason

    @property
    def is_silence(self) -> bool:
        """Whether the network failed, with no sign that the service was reached."""
        return bool(self.network) and not self.is_answer and not self.stopped

    @property
    def is_final(self) -> bool:
        """Whether a retry is useless: the request itself is wrong, or the client ended it."""
        is_wrong = self.status in range(400, 500) and self.status not in _PASSING
        return is_wrong or bool(self.stopped)

    @property
    def is_past_the_end(self) -> bool:
        """Whether the requested range begins after the end of the object."""
        # The text is obstore's if a service answers such a range with status 206.
        return self.status == 416 or "Wanted range starting at" in self.reason


def read_failure(error: Exception) -> RemoteFailure:
    """Parse an error of obstore, or of its credential provider."""
    text = without_secrets(str(error))
    head, _, details = text.partition("Debug source")
    status = _STATUS.search(head)
    code = _CODE.search(head) or _CODE_OF_ONE.search(head)
    network = _NETWORK.search(details)
    return RemoteFailure(
        error=error,
        status=int(status[1]) if status else None,
        code=code[1] if code else "",
        network=network[1] if network else "",
        reason=_describe(head, status, code, _describe_network(network, details)),
        stopped=next((why for word, why in _STOPPED.items() if network and word in details), ""),
    )


def read_failure_of_python(error: Exception) -> RemoteFailure:
    """Parse an error of boto3 or of requests."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        body = response.get("Error", {})
        status, code = response.get("ResponseMetadata", {}).get("HTTPStatusCode"), body.get("Code")
    elif response is not None:
        found = _CODE.search(response.text[:_MAX_READ])
        status, code = response.status_code, found[1] if found else ""
    else:
        status, code = None, ""
    return RemoteFailure(
        error=error,
        status=status,
        code="" if str(code).isdigit() else str(code),
        network="" if response is not None else type(error).__name__,
        reason=" ".join(str(error).split())[:_MAX_REASON],
    )


def _describe_network(network: re.Match[str] | None, details: str) -> str:
    if network is None:
        return ""
    cause = _CAUSE.search(details, network.end())
    return f"{network[1]}: {cause[1]}" if cause else network[1]


def _describe(
    head: str, status: re.Match[str] | None, code: re.Match[str] | None, network: str
) -> str:
    if status is None:
        plain = " ".join(head.split())
        return f"{plain[:_MAX_REASON]} ({network})" if network else plain[:_MAX_REASON]
    message = _MESSAGE.search(head)
    words = [f"{status[1]} {status[2].strip()}", code[1] if code else ""]
    words.append(" ".join(message[1].split()) if message else "")
    return ": ".join(word for word in words if word)[:_MAX_REASON]


def as_store_error(failure: RemoteFailure, operation: str, url: str, *, who: str) -> HoldfastError:
    """Build the `HoldfastError` of a failed `operation` on `url`; `who`: the used credentials.

    Unknown failures become `TransientStoreError`: a fault on the way to a cloud does not mean that
    the stored bytes are damaged.
    """
    what = f"{operation} {url}: {failure.reason}"
    kind = type(failure.error).__name__
    scheme = url.partition("://")[0]
    is_web = scheme in ("http", "https")
    if failure.stopped:
        return UnsupportedStore(f"{operation} {url}: {failure.stopped}")
    if failure.code in _NO_BUCKET:
        return UnsupportedStore(f"{what}. Create the bucket first, or correct the URL")
    if failure.code in _NO_SPACE or failure.status == 507:
        return StoreFull(what)
    if failure.code in _RACE:
        return TransientStoreError(what)
    if failure.status in (401, 403) or failure.code in _NO_RIGHTS or kind in _DENIALS:
        needed = _PERMISSIONS.get(scheme, {}).get(operation, _AZURE_PERMISSION)
        needed = _WEB_PERMISSION if is_web else needed
        clock = "; this machine's clock is wrong" if failure.code == "RequestTimeTooSkewed" else ""
        return AccessDenied(f"{what}. Used: {who}. Needed: {needed}{clock}")
    if isinstance(failure.error, FileNotFoundError) or (is_web and failure.status == 410):
        return NotFound(f"{operation} {url}: there is no such object")
    if kind in ("AlreadyExistsError", "PreconditionError"):
        return AlreadyExists(f"{operation} {url}: the key is taken")
    if failure.is_past_the_end:
        return CorruptData(f"{what}; it is shorter than expected")
    if is_web and (failure.status in range(300, 400) or _NO_LOCATION in failure.reason):
        return UnsupportedStore(f"{operation} {url}: a redirect to a non-web address: not followed")
    if _NO_LOCATION in failure.reason or failure.code == "PermanentRedirect":
        return UnsupportedStore(f"{what}. Set the region of the bucket (AWS_REGION)")
    if "non-partial response" in failure.reason or "range requested" in failure.reason:
        return UnsupportedStore(f"{what}. This service does not read exact ranges")
    if is_web and "Range request not supported" in failure.reason:
        return UnsupportedStore(
            f"{operation} {url}: this server does not answer Range requests, as `python -m "
            "http.server` does not. Serve the files with nginx, Caddy or Apache, or download them "
            "and give the path"
        )
    if is_web and (failure.is_final or "Header missing" in failure.reason):
        return UnsupportedStore(what)
    if kind == "NotSupportedError" or failure.status == 501:
        return UnsupportedStore(what)
    return TransientStoreError(what)


_DENIALS = ("PermissionDeniedError", "UnauthenticatedError")
