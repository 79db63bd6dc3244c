"""OpenSSH's server, run by the user of the tests on a port of the loopback interface."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path

from servers.cache import command, debian_packages
from servers.program import Program, Service

_CONFIG = """
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/home/.ssh/id_ed25519.pub
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 200
Subsystem sftp internal-sftp
"""


class Sshd(Program):
    """One sshd with a key of its own. `home` is the HOME of its clients, with their key."""

    name = "sshd"

    @property
    def home(self) -> Path:
        """Folder with `.ssh`, in which clients find their key and the server's."""
        return self.folder / "home"

    def install(self) -> None:
        """From Debian."""
        debian_packages("openssh-server", "openssh-client")

    def start(self) -> Service:
        """Make keys once, and start a server that does not detach."""
        ssh = self.home / ".ssh"
        if not ssh.exists():
            ssh.mkdir(parents=True)
            for path in (self.folder / "host_key", ssh / "id_ed25519"):
                command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path))
            key = " ".join((self.folder / "host_key.pub").read_text("utf-8").split()[:2])
            (ssh / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {key}\n", "utf-8")
            config = _CONFIG.format(port=self.port, folder=self.folder)
            (self.folder / "sshd_config").write_text(config, "utf-8")
        if getpass.getuser() == "root":
            Path("/run/sshd").mkdir(exist_ok=True)  # its separation of privileges needs it
        self.spawn("sshd", ["/usr/sbin/sshd", "-D", "-e", "-f", self.folder / "sshd_config"])
        self.wait_for(self._answers, "does not answer")
        address = f"{getpass.getuser()}@127.0.0.1:{self.port}"
        return Service(
            name=self.name,
            scheme="sftp",
            endpoint=f"sftp://{address}",
            bucket=f"{address}{self.folder}",
            environment={"HOME": str(self.home)},
        )

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False
