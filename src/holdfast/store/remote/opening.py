"""Makes the clients of a cloud from a URL: parses it, and finds endpoint and credentials.

Endpoints and credentials are found where the cloud's own tools find them (environment variables,
profiles, metadata services), so that a run needs none of its own. This is the only module of the
library that reads environment variables, and only those of the clouds.
"""

from __future__ import annotations

import configparser
import functools
import importlib
import json
import os
import re
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any, Literal

from holdfast import system
from holdfast.errors import AccessDenied, InvalidKey, UsageError
from holdfast.events import logger, url_without_secrets, without_secrets
from holdfast.store.base import check_key

Scheme = Literal["s3", "gs", "az", "http", "https"]
SCHEMES = ("s3", "gs", "az", "oci")

_ENDPOINTS = {
    "s3": "AWS_ENDPOINT_URL or the profile's endpoint_url, and the region",
    "gs": "GOOGLE_BASE_URL",
    "az": "AZURE_STORAGE_ENDPOINT and the account's name",
    "http": "the URL",
    "https": "the URL",
}
_EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure", "http": "http", "https": "http"}
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._\-]{1,221}", re.ASCII)
_MAX_PREFIX = 120
"""Most characters of a prefix; with the longest key 1,021 of the 1,024 bytes that clouds allow."""
_CREDENTIALS_TTL = timedelta(minutes=5)
"""How long obstore keeps boto's credentials: less than the ten minutes by which boto renews them
before their end, so none is used after it."""
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
"""Variables of credentials that obstore reads itself; they override those of a login."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """Limits, timeouts and retries of a remote store; checked at construction.

    Limits are those of the host: each of its `ranks_on_host` ranks takes an equal share.
    """

    max_upload_mb_s: float | None = None
    """Most megabytes (10^6 bytes) per second that the host uploads; None: no limit."""
    max_download_mb_s: float | None = None
    """Most megabytes (10^6 bytes) per second that the host downloads; None: no limit."""
    max_concurrency: int = 10
    """Most concurrent requests with data, each of up to 16 MiB, which an upload keeps in memory
    until they are done. One connection to a cloud gets 50 to 100 MB/s."""
    ranks_on_host: int = 1
    """Number of processes of this host that share its limits."""
    rank_on_host: int = 0
    """This process's number on the host, from 0; each begins transfers after the one before."""
    timeout_s: float = 60.0
    """Timeout of a request with its body of at most 16 MiB, in seconds."""
    connect_timeout_s: float = 10.0
    """Timeout for making a connection, in seconds."""
    max_retries: int = 30
    """Most retries of a request that may be retried."""
    retry_s: float = 120.0
    """Seconds after which a request is not retried any more."""
    unsigned_payload: bool | None = None
    """S3 only: whether signatures omit the bytes of an upload, which saves their SHA-256. None:
    they do over https, where TLS protects the bytes."""
    checksums: bool = False
    """S3 only: whether to send the SHA-256 of each upload, which the service checks and stores."""

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
        """This rank's share of the concurrent requests, at least 1."""
        return max(self.max_concurrency // self.ranks_on_host, 1)

    def nbytes_per_s(self, mb_s: float | None) -> float | None:
        """Return this rank's share of a rate, in bytes per second; None: no limit."""
        return None if mb_s is None else mb_s * 1e6 / self.ranks_on_host


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLocation:
    """Location of a store: a bucket, and the prefix of all its keys."""

    scheme: Scheme
    bucket: str
    prefix: str
    endpoint: str | None
    """The service's address; None: as in the cloud's own settings."""
    query: str = field(default="", repr=False)
    """Query of a web address, sent with each request; it may be a signature."""
    login: str = field(default="", repr=False)
    """`user:password` of a web address, not percent-encoded; empty: none."""
    namespace: str = ""
    """Namespace of Oracle's object storage, whose S3 service is used; empty for other services."""
    region: str = ""
    """Region of requests to S3; empty: as in the AWS settings."""

    @property
    def url(self) -> str:
        """The URL, as given by the user, without a slash at its end."""
        inside = f"/{self.prefix}" if self.prefix else ""
        if self.namespace:
            return f"oci://{self.bucket}@{self.namespace}{inside}"
        return f"{self.scheme}://{self.bucket}{inside}"

    @property
    def advice(self) -> str:
        """Advice for the error message if the endpoint does not answer."""
        source = "endpoint=" if self.endpoint else _ENDPOINTS[self.scheme]
        return f"Check the address ({source}), the network, and that the service runs"

    def make_object_key(self, key: str) -> str:
        """Return an object's key in the bucket: the prefix and the store's key."""
        return f"{self.prefix}/{key}" if self.prefix else key


@dataclass(frozen=True, slots=True, kw_only=True)
class GcsUploads:
    """HTTP session and URL to list and abort incomplete uploads in Google Cloud Storage."""

    session: Any
    """Session of the `requests` library, with credentials."""
    bucket_url: str
    timeout_s: tuple[float, float]
    """Timeouts to connect and to read, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clients:
    """The clients of one bucket, in one process."""

    plain: Any
    """Client of obstore that retries failed requests, as often as the options say."""
    once: Any
    """Client of obstore that never retries: for puts of which exactly one may win."""
    who: str
    """Description of the credentials, for messages."""
    s3: Any | None = None
    """Client of boto3; for S3 only."""
    gcs: GcsUploads | None = None
    """HTTP access to incomplete uploads; for Google Cloud Storage only."""


def parse_place(url: str, endpoint: str | None) -> BucketLocation:
    """Parse the URL of a remote store."""
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    namespace = ""
    if scheme == "oci":
        bucket, _, namespace = bucket.partition("@")
        if not _BUCKET.fullmatch(namespace):
            raise UsageError(f"root {url!r}: must be oci://bucket@namespace/prefix")
    prefix = prefix.rstrip("/")
    url = url_without_secrets(url)
    if re.search("[?#]", rest):
        raise UsageError(f"root {url!r}: a bucket's URL has no query and no fragment")
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
    if scheme == "oci":
        region = _oci_region(url)
        return BucketLocation(
            scheme="s3",
            bucket=bucket,
            prefix=prefix,
            endpoint=endpoint
            or f"https://{namespace}.compat.objectstorage.{region}.oraclecloud.com",
            namespace=namespace,
            region=region,
        )
    kind: Scheme = "gs" if scheme == "gs" else "az" if scheme == "az" else "s3"
    return BucketLocation(scheme=kind, bucket=bucket, prefix=prefix, endpoint=endpoint)


def _oci_region(url: str) -> str:
    """Find Oracle's region as its tools do: in a variable, or in the profile of a file."""
    name = _first_set(("OCI_CLI_REGION", "OCI_REGION"))
    if name:
        return os.environ[name]
    path = os.environ.get("OCI_CONFIG_FILE") or os.environ.get("OCI_CLI_CONFIG_FILE")
    profile = os.environ.get("OCI_CLI_PROFILE") or "DEFAULT"
    settings = configparser.ConfigParser(interpolation=None)
    try:
        settings.read(os.path.expanduser(path or "~/.oci/config"), encoding="utf-8")
        return settings.get(profile, "region")
    except (configparser.Error, OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"root {url!r}: no region was found ({error}): set OCI_REGION, or `region` in "
            f"the profile {profile} of ~/.oci/config"
        ) from error


def needed(module: str, scheme: str) -> Any:
    """Import a library that this cloud needs."""
    try:
        if module.partition(".")[0] == "obstore":
            return import_obstore(module)
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(
            f"{scheme}:// needs {module.partition('.')[0]}, which is not installed ({error}): "
            f"pip install 'holdfast-torch[{_EXTRAS[scheme]}]'"
        ) from error


def open_clients(place: BucketLocation, options: RemoteOptions) -> Clients:
    """Make the clients for a bucket; sends it no request yet, but may request credentials."""
    makers: dict[str, Callable[[BucketLocation, RemoteOptions], Clients]] = {
        "s3": _open_s3,
        "gs": _open_gcs,
        "az": _open_azure,
        "http": _open_web,
        "https": _open_web,
    }
    return makers[place.scheme](place, options)


# S3 ----------------------------------------------------------------------------------------------


def _open_s3(place: BucketLocation, options: RemoteOptions) -> Clients:
    boto3 = needed("boto3", "s3")
    config = needed("botocore.config", "s3").Config(
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.timeout_s,
        retries={"mode": "standard", "total_max_attempts": min(options.max_retries, 10) + 1},
        s3={"addressing_style": "path"},
    )
    # boto3 knows AWS_DEFAULT_REGION only.
    session = boto3.Session(region_name=place.region or os.environ.get("AWS_REGION") or None)
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


def _open_gcs(place: BucketLocation, options: RemoteOptions) -> Clients:
    key = _service_account()
    # An emulator's key has its URL.
    endpoint = place.endpoint or os.environ.get("GOOGLE_BASE_URL") or key.get("gcs_base_url")
    settings: dict[str, Any] = {"base_url": place.endpoint} if place.endpoint else {}
    who = "GOOGLE_SERVICE_ACCOUNT_KEY" if key.get("disable_oauth") else _first_set(_GCS_NATIVE)
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
    """Read the Google service account key that environment variables name; {} if none."""
    path = _first_set(_GCS_KEY_FILES)
    try:
        text = os.environ.get("GOOGLE_SERVICE_ACCOUNT_KEY") or "{}"
        if path:
            with open(os.environ[path], encoding="utf-8") as file:
                text = file.read(_MAX_KEY_FILE)
        key = json.loads(text)
    except (OSError, ValueError) as error:
        raise AccessDenied(f"the key of the Google service account: {error}") from error
    return key if isinstance(key, dict) else {}


def _google_credentials(place: BucketLocation, key: dict[str, Any]) -> Any:
    auth = needed("google.auth", "gs")
    service_account = needed("google.oauth2.service_account", "gs")
    try:
        if key:
            return service_account.Credentials.from_service_account_info(key, scopes=_GCS_SCOPES)
        return auth.default(scopes=_GCS_SCOPES)[0]
    except (auth.exceptions.GoogleAuthError, ValueError) as error:
        raise AccessDenied(
            f"{place.url}: no usable Google credentials ({error}): run `gcloud auth "
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
    """Make an HTTP session, with retries, for requests that obstore does not support."""
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


def _open_azure(place: BucketLocation, options: RemoteOptions) -> Clients:
    environ = os.environ
    endpoint = (
        place.endpoint or environ.get("AZURE_STORAGE_ENDPOINT") or environ.get("AZURE_ENDPOINT")
    )
    settings: dict[str, Any] = {"endpoint": place.endpoint} if place.endpoint else {}
    account = environ.get("AZURE_STORAGE_ACCOUNT_NAME") or environ.get("AZURE_STORAGE_ACCOUNT")
    if not account:
        raise UsageError(f"{place.url}: set AZURE_STORAGE_ACCOUNT_NAME to the storage account")
    settings["account_name"] = account
    who = _first_set(_AZURE_NATIVE)
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


# Web servers -------------------------------------------------------------------------------------


def _open_web(place: BucketLocation, options: RemoteOptions) -> Clients:
    headers: dict[str, str] = {}
    if place.login:
        # Not in the URL, which is in the errors. A redirect to another host does not get it.
        headers["authorization"] = f"Basic {b64encode(place.login.encode()).decode()}"
    http_store = needed("obstore.store", place.scheme).HTTPStore

    def make(_host: str, *, prefix: str | None, client_options: Any, retry_config: Any) -> Any:
        return http_store.from_url(
            f"{place.url}?{place.query}" if place.query else place.url,
            client_options={**client_options, "default_headers": headers},
            retry_config=retry_config,
        )

    plain, once = _pair(make, place, options, {}, f"{place.scheme}:")
    user = place.login.partition(":")[0]
    return Clients(plain=plain, once=once, who=f"user {user!r}" if user else "no credentials")


# All ---------------------------------------------------------------------------------------------


def _first_set(names: Iterable[str]) -> str:
    """Return the name of the first of these environment variables that is set; "" if none is."""
    return next((name for name in names if os.environ.get(name)), "")


def _pair(
    make: Callable[..., Any],
    place: BucketLocation,
    options: RemoteOptions,
    settings: dict[str, Any],
    endpoint: str,
) -> tuple[Any, Any]:
    """Make two clients of obstore: one that retries, and one that does not."""
    client_options = {
        # Unencrypted connections only if the address asks for that.
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
                # Each pause is drawn between the first one and `base` times the one before. Below
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
        except Exception as error:  # noqa: BLE001 - it is translated
            # A traceback would show the query of a web address.
            cause = None if place.query else error
            why = without_secrets(str(error).partition("Debug source")[0])
            raise UsageError(f"{place.url}: {why}") from cause

    return made(options.max_retries), made(0)


_PACKAGE, _EXTENSION = "obstore", "obstore._obstore"
# Stores may be opened in several threads, and the copy is made with obstore out of `sys.modules`.
_lock = threading.Lock()


def import_obstore(name: str) -> ModuleType:
    """Return the module `name` of the private copy, if there is one, or the shared one."""
    with _lock:
        shared = importlib.import_module(name)
        return _private_modules().get(name, shared)


@functools.cache
def _private_modules() -> dict[str, ModuleType]:
    """Load a copy of obstore that no other code of the process uses; {} if this system cannot.

    obstore has one network runtime per process, whose threads do not survive a fork. If this
    library used the same copy as a dataset, forked DataLoader workers whose dataset reads with
    obstore would hang. A second copy of the extension module has a runtime of its own. The dynamic
    linker loads a file once only, so the copy is a file in memory, which only Linux has.
    """
    if not hasattr(os, "memfd_create"):
        return {}
    try:
        path = _copy_into_memory(str(importlib.import_module(_EXTENSION).__file__))
        return _import_extension(path)
    except (ImportError, OSError) as error:
        logger.warning(
            "obstore could not be loaded a second time (%s), so forked processes that use it hang "
            "from now on; start DataLoader workers with multiprocessing_context='forkserver'",
            error,
        )
        return {}


def _import_extension(path: str) -> dict[str, ModuleType]:
    """Import obstore with the extension module at `path`, and take it out of `sys.modules`.

    Its modules import each other by their absolute names. If another thread imports obstore now,
    it gets this copy, which works as well.
    """
    shared = _take_out()
    finder = _Finder(path)
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module("obstore.store")
        importlib.import_module("obstore.exceptions")
        return _take_out()
    finally:
        sys.meta_path.remove(finder)
        _take_out()
        sys.modules.update(shared)


def _take_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]
    return {name: sys.modules.pop(name) for name in names}


def _copy_into_memory(path: str) -> str:
    """Copy a file into memory; return its path, kept open as the linker knows libraries by it."""
    if sys.platform == "linux":
        descriptor = os.memfd_create(_PACKAGE)
        with open(path, "rb") as file:
            left = os.fstat(file.fileno()).st_size
            while left:
                left -= os.sendfile(descriptor, file.fileno(), None, left)
        return f"{system.PROC}/{os.getpid()}/fd/{descriptor}"
    raise OSError("needs Linux")


class _Finder(MetaPathFinder):
    """Finds obstore's extension module at another path."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != _EXTENSION:
            return None
        loader = ExtensionFileLoader(fullname, self._path)
        return spec_from_file_location(fullname, self._path, loader=loader)
