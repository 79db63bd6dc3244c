"""Makes the samples of other libraries: `python tests/golden/peers/make.py [PEER …]`.

Each peer is run by a script of its own, `make_<peer>.py`, in an environment that has the versions
below, under `.servers/peers`. It writes a folder as the peer writes it, and what the peer itself
reads back, which then lies beside this file. Only the standard library is needed here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[2] / ".servers" / "peers"
MADE_IN = Path("/tmp/samples")
"""Where the scripts write: some peers keep the path in their files."""
TIMEOUT_S = 1200

TORCH = ("torch==2.13.0", "numpy==2.4.6", "setuptools<81")
PLAIN = (
    *TORCH,
    *("lightning==2.6.6", "transformers==5.23.0", "accelerate==1.15.0", "pytorch-ignite==0.5.5"),
    *("safetensors==0.8.0", "peft==0.21.2"),
)
OLMO = (*TORCH, "ai2-olmo-core==3.0.0")
COMPOSER = (
    *TORCH,
    *("torchmetrics==1.9.0", "tqdm", "psutil", "py-cpuinfo", "coolname", "tabulate", "requests"),
    *("packaging", "importlib_metadata", "pyyaml", "zstandard", "lz4", "mosaicml-cli", "pillow"),
)
MEGATRON = (*TORCH, "packaging", "einops", "psutil")
DEEPSPEED = (
    *TORCH,
    *(
        "packaging",
        "einops",
        "psutil",
        "hjson",
        "msgpack",
        "ninja",
        "py-cpuinfo",
        "pydantic",
        "tqdm",
    ),
)

MINDSPORE = ("mindspore==2.10.0", "numpy==2.4.6", "protobuf==7.36.2", "safetensors==0.8.0")
CEREBRAS = ("cerebras-pytorch==2.10.0", "cerebras-appliance==2.10.0", "torch==2.4.0")

REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "plain": PLAIN,
    "olmo": OLMO,
    "composer": COMPOSER,
    "megatron": MEGATRON,
    "deepspeed": DEEPSPEED,
    "mindspore": MINDSPORE,
    "cerebras": CEREBRAS,
}
"""What is installed in each environment. Versions that no file depends on are left to pip."""

WITHOUT_DEPENDENCIES: dict[str, tuple[str, ...]] = {
    # They ask for a torch that is older than ours.
    "composer": ("mosaicml==0.32.1",),
    "megatron": ("megatron-core==0.16.1",),
    "deepspeed": ("deepspeed==0.19.8",),
}

PEERS: dict[str, str] = {
    "lightning": "plain",
    "transformers": "plain",
    "accelerate": "plain",
    "peft": "plain",
    "ignite": "plain",
    "dcp": "plain",
    "dcp24": "cerebras",
    "olmo": "olmo",
    "composer": "composer",
    "megatron": "megatron",
    "deepspeed": "deepspeed",
    "mindspore": "mindspore",
    "cerebras": "cerebras",
}
"""The environment of each peer."""


def main(names: list[str]) -> int:
    unknown = sorted({*names} - {*PEERS})
    if unknown:
        print(f"no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}", file=sys.stderr)
        return 2
    for name in names or PEERS:
        print(f"{name} …", flush=True)
        make(name)
    return 0


def make(name: str) -> None:
    """Run the script of a peer, and replace the peer's folder by what it has made."""
    python = environment(PEERS[name])
    folder = MADE_IN / name
    shutil.rmtree(MADE_IN, ignore_errors=True)
    folder.mkdir(parents=True)
    inherited = {key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR") if key in os.environ}
    subprocess.run(
        [python, HERE / f"make_{name}.py", folder],
        env={**inherited, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        check=True,
        timeout=TIMEOUT_S,
    )
    shutil.rmtree(HERE / name, ignore_errors=True)
    shutil.copytree(folder, HERE / name)
    shutil.rmtree(MADE_IN)


def environment(name: str) -> Path:
    """Make an environment, unless it has these requirements, and return its interpreter."""
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    wanted = "\n".join((*REQUIREMENTS[name], *WITHOUT_DEPENDENCIES.get(name, ())))
    made = folder / ".made"
    if made.exists() and made.read_text() == wanted:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, timeout=TIMEOUT_S)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *REQUIREMENTS[name]], check=True, timeout=TIMEOUT_S)
    if name in WITHOUT_DEPENDENCIES:
        without = [*pip, "--no-deps", *WITHOUT_DEPENDENCIES[name]]
        subprocess.run(without, check=True, timeout=TIMEOUT_S)
    made.write_text(wanted)
    return python


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
