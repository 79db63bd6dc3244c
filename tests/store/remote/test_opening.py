"""Places, options and credentials of remote stores."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from tests.each import each

from holdfast.errors import AccessDenied, UsageError
from holdfast.store import open_store
from holdfast.store.remote import RemoteStore
from holdfast.store.remote.opening import RemoteOptions, open_clients, parse_place
from servers.fixtures import on, use
from servers.program import Service


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cloud of the user's: no variables, profiles or metadata services."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "GCP_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/", "bucket", ""),
        ("gs://my.bucket_1/a/b/", "my.bucket_1", "a/b"),
        ("az://container/run-1", "container", "run-1"),
    ],
)
def test_a_url_names_a_bucket_and_a_prefix(url: str, bucket: str, prefix: str) -> None:
    place = parse_place(url, None)
    assert (place.bucket, place.prefix) == (bucket, prefix)
    assert place.url == url.rstrip("/")
    assert place.make_object_key("a/b") == (f"{prefix}/a/b" if prefix else "a/b")


@each(
    "url",
    [
        "s3://",
        "s3:///a",
        "s3://b",
        "s3://bucket//a",
        "s3://bucket/../a",
        "s3://bucket/a b",
        "s3://bucket/.a",
        "s3://key:secret@bucket/a",
        "s3://bucket?x=1",
        "s3://bucket/" + "x" * 121,
        "http://bucket/a",
    ],
)
def test_any_other_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="root"):
        parse_place(url, None)


def test_an_endpoint_is_an_address() -> None:
    with pytest.raises(UsageError, match="endpoint 'minio:9000'"):
        RemoteStore("s3://bucket", endpoint="minio:9000")


@each(
    "wrong",
    [
        {"max_upload_mb_s": 0},
        {"max_download_mb_s": -1},
        {"max_upload_mb_s": float("nan")},
        {"max_concurrency": 0},
        {"timeout_s": 0},
        {"connect_timeout_s": 4000},
        {"retry_s": float("inf")},
        {"max_retries": -1},
        {"ranks_on_host": 2, "rank_on_host": 2},
    ],
)
def test_wrong_options_are_refused_at_construction(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=[*wrong][-1]):
        RemoteOptions(**wrong)  # type: ignore[arg-type]


def test_ranks_of_a_host_share_its_limits() -> None:
    options = RemoteOptions(max_upload_mb_s=80, max_concurrency=12, ranks_on_host=8, rank_on_host=3)
    assert options.nbytes_per_s(options.max_upload_mb_s) == 10e6
    assert options.concurrency == 1


def test_opening_asks_for_nothing() -> None:
    assert open_store("s3://bucket/run").url == "s3://bucket/run"


def test_without_credentials_it_says_where_they_are_looked_for() -> None:
    with pytest.raises(AccessDenied, match="AWS_PROFILE"):
        open_store("s3://bucket/run").children()


def test_without_a_storage_account_it_says_which_variable_names_it() -> None:
    with pytest.raises(UsageError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("az://container/run").children()


def test_a_wrong_key_of_a_service_account_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("{", json.dumps({"client_email": "x"})):
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", text)
        with pytest.raises(AccessDenied, match="Google"):
            open_store("gs://bucket/run").children()


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("s3://b-1", "obstore", "s3"),
        ("gs://b-1", "obstore", "gcs"),
        ("az://b-1", "obstore", "azure"),
    ],
)
def test_a_library_that_is_missing_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, url: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UsageError, match=rf"pip install 'holdfast-torch\[{extra}\]'"):
        open_store(url)


def test_profiles_of_the_aws_tools_are_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config").write_text(
        "[profile lab]\nregion = eu-central-1\nendpoint_url = https://s3.lab.example\n"
    )
    (tmp_path / "credentials").write_text(
        "[lab]\naws_access_key_id = key\naws_secret_access_key = secret\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "lab")
    clients = open_clients(parse_place("s3://bucket/run", None), RemoteOptions())
    assert clients.who == "AWS (shared-credentials-file)"
    config = clients.plain.config
    assert (config["endpoint"], config["region"]) == ("https://s3.lab.example", "eu-central-1")


@pytest.mark.parametrize(
    ("endpoint", "asked", "expected"),
    [
        ("https://s3.lab.example", None, "true"),
        ("https://s3.lab.example", False, "false"),
        ("http://s3.lab.example", None, "false"),
        ("http://s3.lab.example", True, "true"),
    ],
)
def test_payloads_are_signed_where_nothing_else_protects_them(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, asked: bool | None, expected: str
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    options = RemoteOptions(unsigned_payload=asked)
    clients = open_clients(parse_place("s3://bucket/run", endpoint), options)
    assert str(clients.plain.config["unsigned_payload"]).lower() == expected
    # Bytes in the clear only where the address asks for that.
    allowed = str(clients.plain.client_options["allow_http"]).lower()
    assert allowed == str(endpoint.startswith("http:")).lower()


@pytest.mark.parametrize("name", ["AWS_REGION", "AWS_DEFAULT_REGION"])
def test_the_region_is_found_in_either_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """boto3 knows only the second; most tools of AWS know, and its services set, the first."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv(name, "eu-central-1")
    clients = open_clients(parse_place("s3://bucket/a", None), RemoteOptions())
    assert clients.plain.config["region"] == "eu-central-1"
    assert clients.s3 is not None
    assert "eu-central-1" in clients.s3.meta.endpoint_url


def test_a_bucket_of_oracle_is_reached_by_its_s3_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OCI_CONFIG_FILE", str(tmp_path / "config"))
    for name in ("OCI_REGION", "OCI_CLI_REGION", "OCI_CLI_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="OCI_REGION"):
        parse_place("oci://bucket@space/run", None)
    (tmp_path / "config").write_text("[DEFAULT]\nregion = eu-frankfurt-1\n")
    place = parse_place("oci://bucket@space/run", None)
    assert place.endpoint == "https://space.compat.objectstorage.eu-frankfurt-1.oraclecloud.com"
    assert (place.url, place.region) == ("oci://bucket@space/run", "eu-frankfurt-1")
    with pytest.raises(UsageError, match="namespace"):
        parse_place("oci://bucket/run", None)


def test_a_path_of_databricks_is_in_its_mount(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("holdfast.store._DBFS", str(tmp_path / "dbfs"))
    with pytest.raises(UsageError, match="not mounted"):
        open_store("dbfs:/run")
    (tmp_path / "dbfs").mkdir()
    assert open_store("dbfs:/run").url == str(tmp_path / "dbfs" / "run")


@on("moto")
def test_a_run_is_saved_to_a_bucket_of_oracle(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(service, monkeypatch)
    monkeypatch.setenv("OCI_REGION", "eu-frankfurt-1")
    root = f"oci://{service.bucket}@space/oracle-{os.getpid()}"
    store = RemoteStore(root, endpoint=service.endpoint)
    store.put("a", b"x", if_absent=True)
    assert (store.url, store.get("a")) == (root, b"x")
    store.delete("a")
