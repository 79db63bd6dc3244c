"""Runner of the GPU tests and `bench.gpu` within a time limit: `make gpu`.

It needs only a plain Python. It takes an interpreter whose torch has CUDA, else one that has all
packages, else it makes the environment of the project. Packages that are missing there go into a
separate folder, if pip can reach a registry or a folder of wheels. It runs the tests, then the
benchmark in the time that is left, and prints the tables for docs/performance.md. Without CUDA the
same runs on CPU tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parent.parent
MODULES = {
    "torch": "torch",
    "numpy": "numpy",
    "blake3": "blake3",
    "msgspec": "msgspec",
    "zstandard": "zstandard",
    "click": "click",
    "rich": "rich",
    "typing_extensions": "typing_extensions",
    "pytest": "pytest",
    "pytest-timeout": "pytest_timeout",
    "pytest-xdist": "xdist",
    "safetensors": "safetensors",
    "torch_checkpointing": "torch_checkpointing",
}
"""Package → the module that it provides."""
REQUIRED = {
    "torch": "2.6",
    "numpy": "1.26",
    "blake3": "1.0",
    "msgspec": "0.19",
    "zstandard": "0.22",
    "click": "8.1.7",
    "rich": "13.9",
    "typing_extensions": "4.12",
}
"""Package → the oldest version with which Holdfast runs, as in pyproject.toml."""
FOR_TESTS = {"pytest": "8.3", "pytest-timeout": "2.3"}
OPTIONAL = {"pytest-xdist": "3.6", "safetensors": "0.5", "torch_checkpointing": "0.1.1"}
WITHOUT_NEEDS = ("torch_checkpointing",)
"""Packages installed without dependencies, because pip would add another torch."""
USE_OF = {
    "pytest": "all tests",
    "pytest-timeout": "all tests",
    "pytest-xdist": "several tests at a time",
    "safetensors": "its time to import",
    "torch_checkpointing": "its row of the tables",
}
TESTS = (
    "tests/gpu",
    "tests/staging",
    "tests/state/test_generators.py::test_cuda_generators_go_on_where_they_were",
    "tests/train/test_making.py::test_training_on_an_accelerator",
    "tests/train/step/test_device_metrics.py::test_nobody_waits_for_an_accelerator_between_two_logs",
)
"""Tests that `make gpu` runs; most others need no device, but more packages."""
CUDA_CASES = ("holdfast", "holdfast-overlap", "dcp-async-pinned", "torch_checkpointing")
CPU_CASES = ("holdfast", "holdfast-overlap", "dcp-async", "torch_checkpointing")
_END_S = 15.0
"""Seconds reserved after the benchmark, to delete its files and to print."""
_PIP_LIMITS = {"PIP_RETRIES": "1", "PIP_TIMEOUT": "15"}
"""Environment of `make`: without a registry pip gives up soon."""
_SITE = str(ROOT / "build" / "gpu-site-")
"""Folder of added packages, without the version of Python at its end."""
_PROBE = """
import importlib, json, sys
from importlib import metadata
version = "%d.%d" % sys.version_info[:2]
sys.path.insert(0, sys.argv[2] + version)
found, gpu = {}, None
for package, module in json.loads(sys.argv[1]).items():
    try:
        importlib.import_module(module)
    except Exception:
        continue
    try:
        found[package] = metadata.version(package)
    except metadata.PackageNotFoundError:
        found[package] = str(getattr(sys.modules[module], "__version__", ""))
if "torch" in found:
    import torch
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
print(json.dumps({"version": version, "packages": found, "gpu": gpu}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python interpreter, the packages that it can import, and its GPU."""

    python: str
    version: str
    """Of Python, such as 3.12."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Package → version."""
    gpu: str | None = None
    """Name of the GPU that its torch can use; None: it can use none."""

    @property
    def added(self) -> Path:
        """Folder into which packages are installed for this version of Python."""
        return Path(_SITE + self.version)

    def lacks(self, wanted: Mapping[str, str]) -> dict[str, str]:
        """List packages of `wanted` that are missing or too old, with the oldest version."""
        return {
            name: oldest
            for name, oldest in wanted.items()
            if name not in self.packages or _parts(self.packages[name]) < _parts(oldest)
        }


def choose(system: Interpreter | None, own: Interpreter | None) -> Interpreter | None:
    """Choose the interpreter to use; None: the environment of the project has to be made first.

    Torch with CUDA counts most: often only one interpreter of a machine has it, and the torch in
    the environment of the project may be without CUDA. Without CUDA an interpreter has to have all
    that is needed, and the environment of the project is preferred: its versions are known to work.
    """
    for one in (system, own):
        if one is not None and one.gpu is not None and "torch" not in one.lacks(REQUIRED):
            return one
    for one in (own, system):
        if one is not None and not one.lacks({**REQUIRED, **FOR_TESTS}):
            return one
    return None


def _parts(version: str) -> tuple[int, ...]:
    """Split a version into its numbers, without a suffix such as `+cu130`."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


class Machine:
    """This machine's interpreters, and the sources of missing packages."""

    def __init__(self, python: str, venv: Path, wheels: Path | None) -> None:
        self._python, self._venv, self._wheels = python, venv, wheels

    def look(self, python: str) -> Interpreter | None:
        """Ask an interpreter for its packages and GPU; None: it cannot be started."""
        try:
            done = subprocess.run(
                [python, "-c", _PROBE, json.dumps(MODULES), _SITE],
                cwd=ROOT,
                env=environment_with(None),
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
            found = json.loads(done.stdout.splitlines()[-1])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            return None
        return Interpreter(python=python, **found)

    def find(self, timeout_s: float) -> Interpreter | None:
        """Find the interpreter to use, or make the environment of the project; None: no torch.

        `timeout_s` is for making that environment.
        """
        own_python = str(self._venv / "bin" / "python")
        system, own = self.look(self._python), self.look(own_python)
        found = choose(system, own)
        if found is None:
            self._make(timeout_s)
            own = self.look(own_python)
            found = choose(system, own)
        have_torch = (one for one in (own, system) if one is not None and "torch" in one.packages)
        return found if found is not None else next(have_torch, None)

    def _make(self, timeout_s: float) -> None:
        """Make the environment of the project; print why it could not be made."""
        say(f"no Python with CUDA or with all packages here: making {self._venv}")
        command = ["make", "--no-print-directory", f"{self._venv}/.with-test"]
        command += [f"PYTHON={self._python}", f"VENV={self._venv}"]
        try:
            status = _watched(command, {**os.environ, **_PIP_LIMITS}, timeout_s)
        except OSError as error:
            say(f"{self._venv} was not made: {error}")
            return
        if status is None:
            say(f"{self._venv} was not made: `make` was cut off after {timeout_s:.0f} s")
        elif status != 0:
            say(f"{self._venv} was not made: `make` failed with status {status}, as shown above")

    def add(self, to: Interpreter, packages: Iterable[str]) -> None:
        """Install packages for an interpreter in a separate folder; print what pip could not."""
        plain = [name for name in packages if name not in WITHOUT_NEEDS]
        others = [name for name in packages if name in WITHOUT_NEEDS]
        # One by one from a folder of wheels, which may have only some of them.
        groups = [[name] for name in plain] if self._wheels else [plain]
        for group in [*groups, *([name] for name in others)]:
            if group and not self._pip(to, group) and not self._wheels:
                return  # no registry answers, and each further try takes long

    def _pip(self, to: Interpreter, packages: Sequence[str]) -> bool:
        command = [to.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += ["--no-input", "--retries", "0", "--timeout", "15", "--upgrade"]
        command += ["--target", str(to.added)]
        if self._wheels:
            command += ["--no-index", "--find-links", str(self._wheels.resolve())]
        if self._wheels or packages[0] in WITHOUT_NEEDS:
            command.append("--no-deps")
        oldest = {**REQUIRED, **FOR_TESTS, **OPTIONAL}
        command += [f"{name}>={oldest[name]}" for name in packages]
        say(f"installing {', '.join(packages)} into {to.added.relative_to(ROOT)}")
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["pip said nothing"]
            say(f"not installed: {lines[-1]}")
        return done.returncode == 0


def environment_with(added: Path | None) -> dict[str, str]:
    """Make an environment in which a process can import Holdfast, `bench` and added packages."""
    inherited = os.environ.get("PYTHONPATH", "")
    folders = [str(ROOT / "src"), str(ROOT), str(added or ""), inherited]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def say(text: str) -> None:
    """Print a line and flush it."""
    print(f"gpu: {text}", flush=True)


def cannot_run(found: Interpreter | None, python: str) -> str | None:
    """Explain why nothing can run, and what to do about it; None: it can."""
    if found is None:
        return (
            f"neither {python} nor the environment of the project has torch, and pip reached no "
            "registry; name a Python that has it: make gpu PYTHON=/path/to/python3"
        )
    missing = found.lacks(REQUIRED)
    if not missing:
        return None
    wanted = " ".join(f"'{name}>={oldest}'" for name, oldest in missing.items())
    return (
        f"{found.python} lacks {', '.join(missing)}, and pip found none. On a machine with a "
        f"registry:\n  python3 -m pip download --no-deps --only-binary=:all: "
        f"--python-version {found.version} "
        f"--platform manylinux_2_17_x86_64 --dest wheels {wanted}\n"
        "then bring that folder here: make gpu WHEELS=wheels"
    )


def run_tests(found: Interpreter, environment: Mapping[str, str], timeout_s: float) -> str:
    """Run the tests, and return how they ended."""
    missing = found.lacks(FOR_TESTS)
    if missing:
        return f"left out: {', '.join(missing)} missing"
    command = [found.python, "-m", "pytest", *TESTS, "-q", "-p", "no:cacheprovider"]
    # Other versions of libraries than ours may warn, which must not fail the tests.
    command += ["-W", "default"]
    if not found.lacks({"pytest-xdist": OPTIONAL["pytest-xdist"]}):
        command += ["-n", str(min(4, os.cpu_count() or 1))]
    # One thread, as in `make test`; the cuBLAS setting makes products exact on any stream.
    fixed = {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    begun_s = perf_counter()
    status = _watched(command, {**environment, **fixed}, timeout_s, ends_by=signal.SIGINT)
    took = f"after {perf_counter() - begun_s:.0f} s"
    return {0: f"passed {took}", None: f"cut off {took}"}.get(status, f"FAILED {took}")


def run_bench(
    found: Interpreter, environment: Mapping[str, str], options: Sequence[str], budget_s: float
) -> tuple[int, str]:
    """Run the benchmark, and return its status and tables, even if it was cut off."""
    with tempfile.TemporaryDirectory(prefix="holdfast-gpu-") as name:
        figures, printed = Path(name) / "figures.json", Path(name) / "printed"
        module = [found.python, "-m", "bench.gpu"]
        timed = ["--budget-s", f"{budget_s:.0f}", "--json", str(figures)]
        with printed.open("w") as out:
            status = _watched([*module, *options, *timed], environment, budget_s, out=out.fileno())
        if status is None and figures.exists():
            say("the benchmark was cut off; its tables have what it came to")
            again = [*module, *options, "--tables-of", str(figures)]
            with printed.open("w") as out:
                status = _watched(again, environment, _END_S, out=out.fileno())
        return 1 if status is None else status, printed.read_text()


def _watched(
    command: Sequence[str],
    environment: Mapping[str, str],
    timeout_s: float,
    *,
    out: int | None = None,
    ends_by: signal.Signals = signal.SIGTERM,
) -> int | None:
    """Run a command, and return its status; None: time ran out, and its process group was ended.

    `ends_by` is the signal that lets it clean up; on SIGINT pytest still prints its failures.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=out, start_new_session=True
    )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, ends_by)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--python", default="python3", help="looked at first (%(default)s)")
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="(%(default)s)")
    parser.add_argument("--wheels", type=Path, help="folder of wheels, where there is no registry")
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="for checkpoints")
    parser.add_argument(
        "--budget-s", type=float, default=500.0, help="seconds for all (%(default)g)"
    )
    parser.add_argument("--size-gb", nargs="+", help="of the states (10 40; without CUDA 0.2)")
    parser.add_argument(
        "--memory-gb",
        help="host memory that may be used, in 1e9 bytes (what the system reports as available)",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests and the benchmark; 0 when the tests passed and no case failed."""
    begun_s = perf_counter()
    options = _options(arguments)
    machine = Machine(options.python, options.venv, options.wheels)
    found = machine.find(0.5 * options.budget_s)
    all_wanted = {**REQUIRED, **FOR_TESTS, **OPTIONAL}
    if found is not None and (missing := found.lacks(all_wanted)) and "torch" not in missing:
        machine.add(found, missing)
        found = machine.look(found.python)
    problem = cannot_run(found, options.python)
    if problem or found is None:
        print(f"gpu: {problem}", file=sys.stderr)
        return 2
    say(f"{found.python}, torch {found.packages['torch']}, on {found.gpu or 'CPU tensors'}")
    if found.gpu is None:
        say("there is no CUDA here: the same code runs on CPU tensors, which measures no GPU")
    for name in found.lacks({**FOR_TESTS, **OPTIONAL}):
        say(f"{name} is missing, and with it {USE_OF[name]}")
    with_added = environment_with(found.added)
    left_s = options.budget_s - (perf_counter() - begun_s)
    tested = run_tests(found, with_added, max(_END_S, 0.6 * left_s))
    say(f"tests: {tested}")
    options.folder.mkdir(parents=True, exist_ok=True)
    left_s = max(_END_S, options.budget_s - (perf_counter() - begun_s) - _END_S)
    status, tables = run_bench(found, with_added, _bench_options(options, found), left_s)
    print(f"\nFor docs/performance.md:\n\n{tables}\ngpu: tests {tested}")
    say(f"done after {perf_counter() - begun_s:.0f} s")
    return int(status != 0 or not tested.startswith("passed"))


def _bench_options(options: argparse.Namespace, found: Interpreter) -> list[str]:
    has_cuda = found.gpu is not None
    sizes = options.size_gb or (["10", "40"] if has_cuda else ["0.2"])
    given = ["--device", "cuda" if has_cuda else "cpu", "--rounds", "1", "--size-gb", *sizes]
    given += ["--only", *(CUDA_CASES if has_cuda else CPU_CASES)]
    given += ["--folder", str(options.folder)]
    if options.memory_gb:
        given += ["--memory-gb", options.memory_gb]
    if not has_cuda:  # on the CPU the steps take nearly all of the time
        given += ["--threads", "1", "--steps", "4", "--tokens", "8", "--no-settle"]
    return given


if __name__ == "__main__":
    sys.exit(main())
