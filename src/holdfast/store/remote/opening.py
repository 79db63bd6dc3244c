"""From a URL to clients of a cloud: places, options, endpoints, credentials.

Endpoints and credentials come from where the cloud's own tools find them (variables, profiles,
metadata services), so that a run needs none of its own. This is the one module of the library
that looks at variables of the environment, and only at those of the clouds.
"""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, Literal

from holdfast.errors import AccessDenied, InvalidKey, UsageError
from holdfast.store.base import check_key

Scheme = Literal["s3", "gs", "az"]
SCHEMES: tuple[Scheme, ...] = ("s3", "gs", "az")

_ENDPOINTS = {
    "s3": "AWS_ENDPOINT_URL or the profile's endpoint_url, and the region",
    "gs": "GOOGLE_BASE_URL",
    "az": "AZURE_STORAGE_ENDPOINT and the account's name",
}
_EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure"}
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._\-]{1,221}", re.ASCII)
_MAX_PREFIX = 120
"""With the longest key that makes 1,021 of the 1,024 bytes that clouds allow."""
_CREDENTIALS_TTL = timedelta(minutes=5)
"""boto renews credentials ten minutes before they end, so none is used after its end."""
_GCS = "https://storage.googleapis.com"
_GCS_SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)
_GCS_KEY_FILES = ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH")
_MAX_KEY_FILE = 1 << 20
_GCS_NATIVE = ("GOOGLE_BEARER_TOKEN", "GOOGLE_SKIP_SIGNATURE")
_AZURE_NATIVE = (
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_MASTER_KEY",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_TOKEN",
    "AZURE_SKIP_SIGNATURE",
    "AZURE_STORAGE_USE_EMULATOR",
)
"""Credentials that obstore finds by itself; they win over those of the cloud's login."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """How a remote store works; checked at construction.

    Limits are those of the host: each of its `ranks_on_host` ranks takes an equal share.
    """

    max_upload_mb_s: float | None = None
    """Megabytes (10^6 bytes) a second that the host uploads at most; None is without limit."""
    max_download_mb_s: float | None = None
    """Megabytes a second that the host downloads at most; None is without limit."""
    max_concurrency: int = 10
    """Requests with data under way at once, each of up to 16 MiB, which an upload keeps in memory
    until they are done. Clouds give one connection 50 to 100 MB/s."""
    ranks_on_host: int = 1
    """How many processes of this host share its limits."""
    rank_on_host: int = 0
    """Which of them this is; each begins a little after the one before."""
    timeout_s: float = 60.0
    """Seconds until a request, with its body of at most 16 MiB, has failed."""
    connect_timeout_s: float = 10.0
    """Seconds until a connection has failed."""
    max_retries: int = 30
    """How often a request that may be repeated is repeated."""
    retry_s: float = 120.0
    """Seconds after which it is repeated no more."""
    unsigned_payload: bool | None = None
    """S3 only: leave the bytes of an upload out of its signature, which saves their SHA-256.
    None does so over https, where TLS protects them."""
    checksums: bool = False
    """S3 only: send the SHA-256 of each upload for the service to check and to keep."""

    def __post_init__(self) -> None:
        for name in ("max_upload_mb_s", "max_download_mb_s"):
            value = getattr(self, name)
            if value is not None and not 0.1 <= value < float("inf"):
                raise UsageError(f"{name}={value!r}: must be at least 0.1, or None")
        for name in ("timeout_s", "connect_timeout_s", "retry_s"):
            value = getattr(self, name)
            if not 0 < value <= 3600:
                raise UsageError(f"{name}={value!r}: must be positive and at most an hour")
        for name, least, most in (
            ("max_concurrency", 1, 256),
            ("ranks_on_host", 1, 4096),
            ("rank_on_host", 0, self.ranks_on_host - 1),
            ("max_retries", 0, 100),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise UsageError(f"{name}={value!r}: must be a number from {least} to {most}")

    @property
    def concurrency(self) -> int:
        """This rank's share of the requests."""
        return max(self.max_concurrency // self.ranks_on_host, 1)

    def nbytes_per_s(self, mb_s: float | None) -> float | None:
        """This rank's share of a rate."""
        return None if mb_s is None else mb_s * 1e6 / self.ranks_on_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a root is: a bucket and the beginning of every key in it."""

    scheme: Scheme
    bucket: str
    prefix: str
    endpoint: str | None
    """The service's address; None where the cloud's own settings say it."""

    @property
    def url(self) -> str:
        """As a person writes it."""
        inside = f"/{self.prefix}" if self.prefix else ""
        return f"{self.scheme}://{self.bucket}{inside}"

    @property
    def advice(self) -> str:
        """Advice for the message when the endpoint does not answer."""
        said_by = "endpoint=" if self.endpoint else _ENDPOINTS[self.scheme]
        return f"Check the address ({said_by}), the network, and that the service runs"

    def key(self, key: str) -> str:
        """The key in the bucket."""
        return f"{self.prefix}/{key}" if self.prefix else key


@dataclass(frozen=True, slots=True, kw_only=True)
class GcsUploads:
    """Where Google Cloud Storage is asked for uploads that nobody completed."""

    session: Any
    """Of requests, with credentials."""
    bucket_url: str
    timeout_s: tuple[float, float]
    """To connect, and to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """The clients of one place, in one process."""

    plain: Any
    """Repeats what failed, as often as the options say."""
    once: Any
    """Repeats nothing: for puts of which exactly one may win."""
    who: str
    """Whose credentials these are, for messages."""
    s3: Any | None = None
    """boto3's client, for S3 only."""
    gcs: GcsUploads | None = None
    """For Google Cloud Storage only."""


def parse_place(url: str, endpoint: str | None) -> Place:
    """The place that a URL names.

    Raises:
        UsageError: it is not `s3://`, `gs://` or `az://` with a bucket and a plain prefix.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.rstrip("/")
    if scheme not in SCHEMES or not _BUCKET.fullmatch(bucket):
        raise UsageError(f"root {url!r}: must be s3://bucket/prefix, gs://… or az://container/…")
    if len(prefix) > _MAX_PREFIX:
        raise UsageError(f"root {url!r}: its prefix has more than {_MAX_PREFIX} characters")
    if endpoint is not None and not endpoint.startswith(("https://", "http://")):
        raise UsageError(f"endpoint {endpoint!r}: must begin with https:// or http://")
    try:
        if prefix:
            check_key(prefix)
    except InvalidKey as error:
        raise UsageError(f"root {url!r}: {error}") from error
    return Place(scheme=scheme, bucket=bucket, prefix=prefix, endpoint=endpoint)


def needed(module: str, scheme: str) -> Any:
    """A library that this cloud needs.

    Raises:
        UsageError: it is not installed; says which extra brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{scheme}:// needs {module.partition('.')[0]}, which is not installed ({error}): "
            f"pip install 'holdfast[{_EXTRAS[scheme]}]'"
        ) from error


def open_clients(place: Place, options: RemoteOptions) -> Clients:
    """Clients for a place. Asks the cloud nothing yet, but may ask for credentials.

    Raises:
        AccessDenied: there are no credentials.
        UsageError: a library or a setting is missing.
    """
    makers: dict[str, Callable[[Place, RemoteOptions], Clients]] = {
        "s3": _open_s3,
        "gs": _open_gcs,
        "az": _open_azure,
    }
    return makers[place.scheme](place, options)


# S3 ----------------------------------------------------------------------------------------------


def _open_s3(place: Place, options: RemoteOptions) -> Clients:
    boto3 = needed("boto3", "s3")
    config = needed("botocore.config", "s3").Config(
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.timeout_s,
        retries={"mode": "standard", "total_max_attempts": min(options.max_retries, 10) + 1},
        s3={"addressing_style": "path"},
    )
    # boto3 knows AWS_DEFAULT_REGION only.
    session = boto3.Session(region_name=os.environ.get("AWS_REGION") or None)
    try:
        client = session.client("s3", endpoint_url=place.endpoint, config=config)
        found = session.get_credentials()
    except Exception as error:
        raise AccessDenied(f"{place.url}: the AWS settings cannot be used: {error}") from error
    if found is None:
        raise AccessDenied(
            f"{place.url}: no AWS credentials were found: set AWS_PROFILE, or AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY, or run where a role gives them; "
            "`aws sts get-caller-identity` shows them"
        )
    endpoint = client.meta.endpoint_url
    unsigned = options.unsigned_payload
    settings: dict[str, Any] = {
        "endpoint": endpoint,
        "region": _region(client.meta.region_name),
        "unsigned_payload": endpoint.startswith("https:") if unsigned is None else unsigned,
        "credential_provider": _boto_provider(found),
    }
    if options.checksums:
        settings["checksum_algorithm"] = "SHA256"
    make = needed("obstore.store", "s3").S3Store
    plain, once = _pair(make, place, options, settings, endpoint)
    return Clients(plain=plain, once=once, who=f"AWS ({found.method})", s3=client)


def _region(name: str | None) -> str:
    return name if name and name != "aws-global" else "us-east-1"


def _boto_provider(found: Any) -> Callable[[], dict[str, Any]]:
    def provide() -> dict[str, Any]:
        frozen = found.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(timezone.utc) + _CREDENTIALS_TTL,
        }

    return provide


# Google Cloud Storage ----------------------------------------------------------------------------


def _open_gcs(place: Place, options: RemoteOptions) -> Clients:
    key = _service_account()
    endpoint = place.endpoint or os.environ.get("GOOGLE_BASE_URL") or key.get("gcs_base_url")
    settings: dict[str, Any] = {"base_url": place.endpoint} if place.endpoint else {}
    who = "GOOGLE_SERVICE_ACCOUNT_KEY" if key.get("disable_oauth") else _set(_GCS_NATIVE)
    found = None
    if not who:
        found = _google_credentials(place, key)
        settings["credential_provider"] = _google_provider(found)
        who = f"Google ({getattr(found, 'service_account_email', '') or type(found).__name__})"
    make = needed("obstore.store", "gs").GCSStore
    gcs = GcsUploads(
        session=_google_session(found, options),
        bucket_url=f"{endpoint or _GCS}/{place.bucket}",
        timeout_s=(options.connect_timeout_s, options.timeout_s),
    )
    plain, once = _pair(make, place, options, settings, endpoint or _GCS)
    return Clients(plain=plain, once=once, who=who, gcs=gcs)


def _service_account() -> dict[str, Any]:
    """The key of a service account, where variables name one; emulators put their address there."""
    path = _set(_GCS_KEY_FILES)
    try:
        text = os.environ.get("GOOGLE_SERVICE_ACCOUNT_KEY") or "{}"
        if path:
            with open(os.environ[path], encoding="utf-8") as file:
                text = file.read(_MAX_KEY_FILE)
        key = json.loads(text)
    except (OSError, ValueError) as error:
        raise AccessDenied(f"the key of the Google service account: {error}") from error
    return key if isinstance(key, dict) else {}


def _google_credentials(place: Place, key: dict[str, Any]) -> Any:
    auth = needed("google.auth", "gs")
    service_account = needed("google.oauth2.service_account", "gs")
    try:
        if key:
            return service_account.Credentials.from_service_account_info(key, scopes=_GCS_SCOPES)
        return auth.default(scopes=_GCS_SCOPES)[0]
    except (auth.exceptions.GoogleAuthError, ValueError) as error:
        raise AccessDenied(
            f"{place.url}: no Google credentials were found ({error}): run `gcloud auth "
            "application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS"
        ) from error


def _google_provider(found: Any) -> Callable[[], dict[str, Any]]:
    request = needed("google.auth.transport.requests", "gs").Request()

    def provide() -> dict[str, Any]:
        found.refresh(request)
        expiry = found.expiry
        if expiry is not None and expiry.tzinfo is None:
            expiry = expiry.replace(tzinfo=timezone.utc)
        return {"token": found.token, "expires_at": expiry}

    return provide


def _google_session(found: Any | None, options: RemoteOptions) -> Any:
    """For what obstore cannot ask; repeats what failed."""
    requests = needed("requests", "gs")
    if found is not None:
        session = needed("google.auth.transport.requests", "gs").AuthorizedSession(found)
    else:
        session = requests.Session()
        token = os.environ.get("GOOGLE_BEARER_TOKEN")
        if token:
            session.headers["Authorization"] = f"Bearer {token}"
    retry = needed("urllib3.util.retry", "gs").Retry(
        total=min(options.max_retries, 10),
        backoff_factor=0.2,
        status_forcelist=(429, 500, 502, 503, 504),
    )
    for scheme in ("https://", "http://"):
        session.mount(scheme, requests.adapters.HTTPAdapter(max_retries=retry))
    return session


# Azure -------------------------------------------------------------------------------------------


def _open_azure(place: Place, options: RemoteOptions) -> Clients:
    environ = os.environ
    endpoint = (
        place.endpoint or environ.get("AZURE_STORAGE_ENDPOINT") or environ.get("AZURE_ENDPOINT")
    )
    settings: dict[str, Any] = {"endpoint": place.endpoint} if place.endpoint else {}
    account = environ.get("AZURE_STORAGE_ACCOUNT_NAME") or environ.get("AZURE_STORAGE_ACCOUNT")
    if not account:
        raise UsageError(f"{place.url}: set AZURE_STORAGE_ACCOUNT_NAME to the storage account")
    settings["account_name"] = account
    who = _set(_AZURE_NATIVE)
    if not who:
        identity = needed("azure.identity", "az")
        settings["credential_provider"] = _azure_provider(identity.DefaultAzureCredential())
        who = "Azure (DefaultAzureCredential)"
    make = needed("obstore.store", "az").AzureStore
    plain, once = _pair(make, place, options, settings, endpoint or "https:")
    return Clients(plain=plain, once=once, who=who)


def _azure_provider(found: Any) -> Callable[[], dict[str, Any]]:
    def provide() -> dict[str, Any]:
        token = found.get_token("https://storage.azure.com/.default")
        expires_at = datetime.fromtimestamp(token.expires_on, timezone.utc)
        return {"token": token.token, "expires_at": expires_at}

    return provide


# All ---------------------------------------------------------------------------------------------


def _set(names: Iterable[str]) -> str:
    """The first of the variables that is set."""
    return next((name for name in names if os.environ.get(name)), "")


def _pair(
    make: Callable[..., Any],
    place: Place,
    options: RemoteOptions,
    settings: dict[str, Any],
    endpoint: str,
) -> tuple[Any, Any]:
    """obstore's clients: one that repeats what failed, and one that repeats nothing."""
    client_options = {
        # Bytes in the clear only where the address asks for that.
        "allow_http": endpoint.startswith("http:"),
        "timeout": timedelta(seconds=options.timeout_s),
        "connect_timeout": timedelta(seconds=options.connect_timeout_s),
    }

    def made(max_retries: int) -> Any:
        retry = {
            "max_retries": max_retries,
            "retry_timeout": timedelta(seconds=options.retry_s),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=15),
                # A pause is drawn between the first one and so many times the one before. Below
                # e, the base of logarithms, pauses do not grow, and ten are over in three seconds.
                "base": 6,
            },
        }
        try:
            return make(
                place.bucket,
                prefix=place.prefix or None,
                client_options=client_options,
                retry_config=retry,
                **settings,
            )
        except Exception as error:
            raise UsageError(f"{place.url}: {str(error).partition('Debug source')[0]}") from error

    return made(options.max_retries), made(0)
