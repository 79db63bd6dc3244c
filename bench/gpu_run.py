"""The device tests and `bench.gpu`, run by one command within a time: `make gpu`.

It needs nothing but a plain Python. It finds the interpreter that has torch with CUDA, else the
environment of the project; adds what that lacks, in a folder of its own, where pip can reach a
registry or a folder of wheels; runs the tests, then the benchmark with the time that is left; and
prints the tables for docs/performance.md. Without CUDA the same runs on CPU tensors.
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
    "pytest": "pytest",
    "pytest-timeout": "pytest_timeout",
    "pytest-xdist": "xdist",
    "safetensors": "safetensors",
    "torch_checkpointing": "torch_checkpointing",
}
"""Package → the module that it brings."""
REQUIRED = {
    "torch": "2.6",
    "numpy": "1.26",
    "blake3": "1.0",
    "msgspec": "0.19",
    "zstandard": "0.22",
    "click": "8.1.7",
    "rich": "13.9",
}
"""Package → the oldest version with which Holdfast runs, as in pyproject.toml."""
FOR_TESTS = {"pytest": "8.3", "pytest-timeout": "2.3"}
OPTIONAL = {"pytest-xdist": "3.6", "safetensors": "0.5", "torch_checkpointing": "0.1.1"}
WITHOUT_NEEDS = ("torch_checkpointing",)
"""Packages that ask for torch, of which there must not be another one."""
USE_OF = {
    "pytest": "all tests",
    "pytest-timeout": "all tests",
    "pytest-xdist": "several tests at a time",
    "safetensors": "its time to import",
    "torch_checkpointing": "its row of the tables",
}
TESTS = (
    "tests/gpu",
    "tests/engine/staging",
    "tests/state/test_generators.py::test_cuda_generators_go_on_where_they_were",
    "tests/train/test_making.py::test_training_on_an_accelerator",
    "tests/train/test_metrics.py::test_nobody_waits_for_an_accelerator_between_two_logs",
)
"""Of the other folders only what needs a device: their tests want more packages."""
CUDA_CASES = ("holdfast", "holdfast-overlap", "dcp-async-pinned", "torch_checkpointing")
CPU_CASES = ("holdfast", "holdfast-overlap", "dcp-async", "torch_checkpointing")
_END_S = 15.0
"""For what comes after the benchmark: to delete its files, and to print."""
_PROBE = """
import importlib, json, sys
from importlib import metadata
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
print(json.dumps({"packages": found, "gpu": gpu}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python and what it can import."""

    python: str
    packages: Mapping[str, str] = field(default_factory=dict)
    """Package → version."""
    gpu: str | None = None
    """Name of the GPU that its torch can use; None: it can use none."""

    def lacks(self, wanted: Mapping[str, str]) -> dict[str, str]:
        """The packages of `wanted` that are missing or too old, with the oldest version."""
        return {
            name: oldest
            for name, oldest in wanted.items()
            if name not in self.packages or _parts(self.packages[name]) < _parts(oldest)
        }


def choose(system: Interpreter | None, own: Interpreter | None) -> Interpreter | None:
    """The interpreter to use; None: the environment of the project has to be made first.

    Torch with CUDA counts most: a machine that has it often has it in one interpreter only, and
    the environment of the project may hold a torch without.
    """
    for one in (system, own):
        if one is not None and one.gpu is not None and "torch" not in one.lacks(REQUIRED):
            return one
    if own is not None and not own.lacks({**REQUIRED, **FOR_TESTS}):
        return own
    return None


def _parts(version: str) -> tuple[int, ...]:
    """The numbers of a version, without what a build adds to it."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


class Machine:
    """This machine's interpreters, and the folder in which packages are added."""

    def __init__(self, python: str, venv: Path, wheels: Path | None) -> None:
        self._python, self._venv, self._wheels = python, venv, wheels
        version = "-".join(str(part) for part in sys.version_info[:2])
        self.added = ROOT / "build" / f"gpu-site-{version}"

    def environment(self) -> dict[str, str]:
        """That of a process which finds Holdfast, the benchmarks and what was added."""
        inherited = os.environ.get("PYTHONPATH", "")
        folders = [str(ROOT / "src"), str(ROOT), str(self.added), inherited]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}

    def look(self, python: str) -> Interpreter | None:
        """What an interpreter has; None: it cannot be started."""
        try:
            done = subprocess.run(
                [python, "-c", _PROBE, json.dumps(MODULES)],
                cwd=ROOT,
                env=self.environment(),
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )
            found = json.loads(done.stdout.splitlines()[-1])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError):
            return None
        return Interpreter(python=python, packages=found["packages"], gpu=found["gpu"])

    def find(self) -> Interpreter | None:
        """The interpreter to use, with the environment of the project made if need be; None:
        nothing here has torch."""
        own_python = str(self._venv / "bin" / "python")
        system, own = self.look(self._python), self.look(own_python)
        found = choose(system, own)
        if found is None:
            say(f"no torch with CUDA here: making {self._venv}")
            command = ["make", "--no-print-directory", f"{self._venv}/.with-test"]
            command += [f"PYTHON={self._python}", f"VENV={self._venv}"]
            subprocess.run(command, cwd=ROOT, check=False)
            own = self.look(own_python)
            found = choose(system, own)
        have_torch = (one for one in (own, system) if one is not None and "torch" in one.packages)
        return found if found is not None else next(have_torch, None)

    def add(self, to: Interpreter, packages: Iterable[str]) -> None:
        """Install packages beside an interpreter; says so where pip cannot."""
        plain = [name for name in packages if name not in WITHOUT_NEEDS]
        others = [name for name in packages if name in WITHOUT_NEEDS]
        # From a folder one by one: it may have some of them only.
        groups = [[name] for name in plain] if self._wheels else [plain]
        for group in [*groups, *([name] for name in others)]:
            if group and not self._pip(to, group) and not self._wheels:
                return  # no registry answers, and it takes long to find that out again

    def _pip(self, to: Interpreter, packages: Sequence[str]) -> bool:
        command = [to.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        command += ["--no-input", "--retries", "0", "--timeout", "15", "--upgrade"]
        command += ["--target", str(self.added)]
        if self._wheels:
            command += ["--no-index", "--find-links", str(self._wheels.resolve())]
        if self._wheels or packages[0] in WITHOUT_NEEDS:
            command.append("--no-deps")
        oldest = {**REQUIRED, **FOR_TESTS, **OPTIONAL}
        command += [f"{name}>={oldest[name]}" for name in packages]
        say(f"installing {', '.join(packages)} into {self.added.relative_to(ROOT)}")
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["pip said nothing"]
            say(f"not installed: {lines[-1]}")
        return done.returncode == 0


def say(text: str) -> None:
    """Print a line at once."""
    print(f"gpu: {text}", flush=True)


def cannot_run(found: Interpreter | None, python: str) -> str | None:
    """Why nothing can run, and what to do about it; None: it can."""
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
        f"--python-version {sys.version_info.major}.{sys.version_info.minor} "
        f"--platform manylinux_2_17_x86_64 --dest wheels {wanted}\n"
        "then bring that folder here: make gpu WHEELS=wheels"
    )


def run_tests(found: Interpreter, environment: Mapping[str, str], timeout_s: float) -> str:
    """Run the tests; how they ended."""
    missing = found.lacks(FOR_TESTS)
    if missing:
        return f"left out: {', '.join(missing)} missing"
    command = [found.python, "-m", "pytest", *TESTS, "-q", "-p", "no:cacheprovider"]
    # The libraries of this machine are not those that ours are tested with, and may warn.
    command += ["-W", "default"]
    if not found.lacks({"pytest-xdist": OPTIONAL["pytest-xdist"]}):
        command += ["-n", str(min(4, os.cpu_count() or 1))]
    # One thread, as in make test; and products that are the same also on several streams.
    fixed = {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    begun_s = perf_counter()
    status = _watched(command, {**environment, **fixed}, timeout_s, ends_by=signal.SIGINT)
    took = f"after {perf_counter() - begun_s:.0f} s"
    return {0: f"passed {took}", None: f"cut off {took}"}.get(status, f"FAILED {took}")


def run_bench(
    found: Interpreter, environment: Mapping[str, str], options: Sequence[str], budget_s: float
) -> tuple[int, str]:
    """Run the benchmark; its status and what it printed, also of a part of it."""
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
    """The status of a command; None: the time was over, and it was ended with all that it had
    started. `ends_by` is the signal that lets it clean up; pytest tells its failures on SIGINT."""
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
    parser.add_argument("--memory-gb", help="of the host, if it shows less than it can have")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all; 0 when the tests passed and no case of the benchmark failed."""
    begun_s = perf_counter()
    options = _options(arguments)
    machine = Machine(options.python, options.venv, options.wheels)
    found = machine.find()
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
    tested = run_tests(found, machine.environment(), 0.6 * options.budget_s)
    say(f"tests: {tested}")
    options.folder.mkdir(parents=True, exist_ok=True)
    left_s = max(_END_S, options.budget_s - (perf_counter() - begun_s) - _END_S)
    status, tables = run_bench(found, machine.environment(), _bench_options(options, found), left_s)
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
    if not has_cuda:  # the steps take nearly all of the time there
        given += ["--threads", "1", "--steps", "4", "--tokens", "8", "--no-settle"]
    return given


if __name__ == "__main__":
    sys.exit(main())
