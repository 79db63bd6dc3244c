"""Ceph with its S3 gateway on one machine: a real distributed store, from Debian's packages.

One monitor, one manager, one OSD (bluestore in a sparse file) and one gateway. What the gateway
has acknowledged survives SIGKILL.
"""

from __future__ import annotations

import uuid
from pathlib import Path

from servers.cache import command, debian_packages
from servers.program import free_port
from servers.s3 import KEY, SECRET, S3Program

PACKAGES = ("radosgw", "ceph-mon", "ceph-osd", "ceph-mgr", "ceph-common")
DISK_NBYTES = 20 << 30
"""Of the sparse file; only what is written takes room."""

_ALL = ("--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *")
_KEYS = {
    "mon.": ("--cap", "mon", "allow *"),
    "client.admin": _ALL,
    "client.rgw": _ALL,
    "osd.0": ("--cap", "mon", "allow profile osd", "--cap", "osd", "allow *"),
    "mgr.x": ("--cap", "mon", "allow profile mgr", "--cap", "osd", "allow *"),
}


class Ceph(S3Program):
    """RADOS gateway 16.2 over one bluestore OSD. Create-if-absent is atomic there."""

    name = "ceph"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._monitor = f"[v2:127.0.0.1:{free_port()},v1:127.0.0.1:{free_port()}]"
        self._config = folder / "ceph.conf"

    def install(self) -> None:
        """Debian packages, which take root once."""
        debian_packages(*PACKAGES)

    def launch(self) -> None:
        """Monitor, manager, OSD and gateway, in this order; they are stopped in the other."""
        is_new = not self._config.exists()
        if is_new:
            self._make_cluster()
        config = ("-c", str(self._config))
        self.spawn("mon", ["ceph-mon", *config, "-f", "-i", "a"])
        self.spawn("mgr", ["ceph-mgr", *config, "-f", "-i", "x"])
        if is_new:
            identity = str(uuid.uuid4())
            command("ceph-osd", *config, "-i", "0", "--mkfs", "--osd-uuid", identity)
            command("ceph", *config, "osd", "new", identity)
        self.spawn("osd", ["ceph-osd", *config, "-f", "-i", "0"])
        self.wait_for(self._osd_is_up, "no OSD is up")
        self.spawn("rgw", ["radosgw", *config, "-f", "-n", "client.rgw"])
        self.wait_for_http(f"http://127.0.0.1:{self.port}")
        if is_new:
            self._make_user()

    def _osd_is_up(self) -> bool:
        words = ("ceph", "-c", str(self._config), "--connect-timeout", "10", "osd", "stat")
        return "1 up" in command(*words)

    def _make_user(self) -> None:
        user = (
            "--uid=test",
            "--display-name=test",
            f"--access-key={KEY}",
            f"--secret-key={SECRET}",
        )
        tool = ("radosgw-admin", "-c", str(self._config), "-n", "client.rgw")
        command(*tool, "user", "create", *user)

    def _make_cluster(self) -> None:
        for folder in ("mon", "mgr", "osd", "rgw"):
            (self.folder / folder).mkdir()
        keyring, cluster = str(self.folder / "keyring"), str(uuid.uuid4())
        self._config.write_text(self._text(cluster), "utf-8")
        for number, (name, rights) in enumerate(_KEYS.items()):
            create = () if number else ("--create-keyring",)
            command("ceph-authtool", *create, keyring, "--gen-key", "-n", name, *rights)
        monmap = str(self.folder / "monmap")
        command("monmaptool", "--create", "--fsid", cluster, "--addv", "a", self._monitor, monmap)
        config = ("-c", str(self._config))
        command("ceph-mon", *config, "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)

    def _text(self, cluster: str) -> str:
        here = self.folder
        # tcp_nodelay: without it each small read takes 45 ms. One copy, four placement groups:
        # there is one disk. No admin sockets: their paths would be too long for some folders.
        return f"""
[global]
fsid = {cluster}
mon_host = {self._monitor}
mon_initial_members = a
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
keyring = {here}/keyring
run_dir = {here}
log_file = {here}/$name.log
admin_socket =
mon_data = {here}/mon
mgr_data = {here}/mgr
osd_data = {here}/osd
rgw_data = {here}/rgw
mgr_initial_modules =
mon_data_avail_warn = 1
mon_data_avail_crit = 1
mon_allow_pool_size_one = true
auth_allow_insecure_global_id_reclaim = false
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
[osd]
osd_objectstore = bluestore
bluestore_block_size = {DISK_NBYTES}
osd_memory_target = 1073741824
[client.rgw]
rgw_frontends = beast endpoint=127.0.0.1:{self.port} tcp_nodelay=1
rgw_gc_obj_min_wait = 5
rgw_gc_processor_period = 10
rgw_gc_processor_max_time = 10
"""
