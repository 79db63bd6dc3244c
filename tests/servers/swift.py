"""OpenStack Swift with its S3 API: a real store whose create-if-absent lets several writers win.

It looks before it writes, so a lone second put is refused and two at once may both succeed: a
store that a check of one put after another would trust.
"""

from __future__ import annotations

import os
import pwd
import shutil
from pathlib import Path

from servers.cache import command, debian_packages, python_environment
from servers.program import free_port
from servers.s3 import S3Program

_PIPELINE = (
    "catch_errors proxy-logging cache listing_formats bulk ratelimit s3api tempauth copy slo dlo "
    "versioned_writes symlink proxy-logging proxy-server"
)
_FILTERS = {
    "catch_errors": "",
    "proxy-logging": "",
    "listing_formats": "",
    "bulk": "",
    "ratelimit": "",
    "copy": "",
    "slo": "",
    "dlo": "",
    "symlink": "",
    "versioned_writes": "allow_versioned_writes = true\nallow_object_versioning = true\n",
    "s3api": "location = us-east-1\ns3_acl = false\ncheck_bucket_owner = false\n",
}
_EGGS = {"proxy-logging": "proxy_logging"}


class Swift(S3Program):
    """Swift 2.38.3 with one replica: memcached, account, container, object and proxy server."""

    name = "swift"
    key, secret = "test:tester", "testing"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._ports = {name: free_port() for name in ("account", "container", "object")}
        self._cache_port = free_port()

    def install(self) -> None:
        """From PyPI, and memcached from Debian."""
        self._bin = python_environment(self.name, "swift==2.38.3", "setuptools<81")
        if shutil.which("memcached") is None:
            debian_packages("memcached")

    def launch(self) -> None:
        """Five processes."""
        if not (self.folder / "swift.conf").exists():
            self._configure()
        cache = ("-l", "127.0.0.1", "-p", str(self._cache_port), "-m", "64", "-u", _user())
        self.spawn("memcached", ["memcached", *cache])
        for name in (*self._ports, "proxy"):
            self.spawn(name, [self._bin / f"swift-{name}-server", f"{name}-server.conf"])

    def _configure(self) -> None:
        here = self.folder
        (here / "devices" / "d1").mkdir(parents=True)
        hashing = "[swift-hash]\nswift_hash_path_prefix = p\nswift_hash_path_suffix = s\n"
        limits = "[swift-constraints]\nmax_header_size = 32768\n"
        policy = "[storage-policy:0]\nname = default\ndefault = yes\n"
        (here / "swift.conf").write_text(hashing + limits + policy, "utf-8")
        for name, port in self._ports.items():
            (here / f"{name}-server.conf").write_text(self._storage(name, port), "utf-8")
            ring = (str(self._bin / "swift-ring-builder"), f"{name}.builder")
            command(*ring, "create", "6", "1", "0", cwd=here)
            command(*ring, "add", f"r1z1-127.0.0.1:{port}/d1", "1", cwd=here)
            command(*ring, "rebalance", cwd=here)
        (here / "proxy-server.conf").write_text(self._proxy(), "utf-8")

    def _common(self, port: int) -> str:
        # Logs go to a port where nobody listens; standard error has what matters.
        return f"""[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
workers = 0
user = {_user()}
swift_dir = {self.folder}
log_udp_host = 127.0.0.1
log_udp_port = 9
devices = {self.folder}/devices
mount_check = false
disable_fallocate = true
"""

    def _storage(self, name: str, port: int) -> str:
        return f"""{self._common(port)}
[pipeline:main]
pipeline = {name}-server
[app:{name}-server]
use = egg:swift#{name}
replication_server = false
recon_cache_path = {self.folder}
"""

    def _proxy(self) -> str:
        filters = "".join(
            f"[filter:{name}]\nuse = egg:swift#{_EGGS.get(name, name)}\n{text}"
            for name, text in _FILTERS.items()
        )
        return f"""{self._common(self.port)}
[pipeline:main]
pipeline = {_PIPELINE}
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
allow_account_management = true
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = {self.secret} .admin
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:{self._cache_port}
{filters}"""


def _user() -> str:
    return pwd.getpwuid(os.getuid()).pw_name
