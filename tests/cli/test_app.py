"""Claims about the command line as a whole: cost, exit codes, and its page."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
from tests.cli.page import PAGE, commands, page
from tests.cli.roots import Result

from holdfast import cli
from holdfast.cli import main
from holdfast.cli.app import app, load_command
from holdfast.cli.options import DECLARED, Argument
from holdfast.cli.output import Code, format_nbytes, json_safe, printable

Command = Callable[..., Result]


def test_the_page_has_the_help_of_every_command() -> None:
    assert page() == PAGE.read_text("utf-8"), "run: python -m tests.cli.page"


def is_group(command: Any) -> bool:
    return hasattr(command, "commands")


def test_every_exit_code_is_on_the_page() -> None:
    text = PAGE.read_text("utf-8")
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)} == set(Code)


def test_every_command_and_option_says_what_it_is_for() -> None:
    for name, command in commands():
        assert command.help, name
        for parameter in command.params:
            is_said = parameter.about if isinstance(parameter, Argument) else parameter.help
            assert is_said, (name, parameter.name)


def test_the_list_of_commands_has_the_first_lines_of_their_help() -> None:
    for name, listed in app.commands.items():
        assert load_command(name).get_short_help_str(100) == listed.help


def test_help_lists_every_command_in_one_section(holdfast: Command) -> None:
    _, *sections = re.split(r"^(?=\S.*:$)", holdfast("--help").out, flags=re.MULTILINE)[1:]
    listed = [line.split()[0] for section in sections for line in section.splitlines()[1:] if line]
    for module in iter_modules(cli.__path__):
        import_module(f"holdfast.cli.{module.name}")
    assert sorted(listed) == sorted(app.commands.keys() | DECLARED.commands.keys())
    assert all(len(section.splitlines()) < 12 for section in sections)


def test_help_and_a_command_import_no_module_of_another_command() -> None:
    code = "import sys; print(sorted(m for m in sys.modules if m.startswith('holdfast.')))"
    listing = in_a_process("--help", code=f"import atexit; atexit.register(lambda: exec({code!r}))")
    assert "holdfast.cli.options" in listing.stdout
    assert "holdfast.store" not in listing.stdout
    one = in_a_process("pin", "-h", code=f"import atexit; atexit.register(lambda: exec({code!r}))")
    assert "holdfast.cli.pin" in one.stdout
    assert "holdfast.cli.ls" not in one.stdout


def test_every_command_but_the_top_takes_json() -> None:
    for name, command in commands():
        has_json = any("--json" in parameter.opts for parameter in command.params)
        assert has_json is not is_group(command), name


def test_help_and_version_are_given(holdfast: Command) -> None:
    import holdfast as package

    assert holdfast("--version").out == f"holdfast {package.__version__}\n"
    for option in ("--help", "-h"):
        result = holdfast(option)
        assert result.code == 0
        assert "verify" in result.out


@pytest.mark.parametrize(
    "arguments",
    [
        ["prune"],
        ["ls"],
        ["ls", "--nonsense", "x"],
        ["show", "a", "b"],
    ],
)
def test_a_wrong_call_is_code_2(holdfast: Command, arguments: list[str]) -> None:
    assert holdfast(*arguments).code == 2


def test_help_says_what_arguments_are_for(holdfast: Command) -> None:
    text = holdfast("tag", "--help").out
    assert "Usage: holdfast tag [OPTIONS] ROOT@WHICH TAG...\n" in text
    assert "Arguments:\n  ROOT@WHICH  WHICH is latest, step=1000" in text
    assert "\n  TAG...      Tags to add.\n\nOptions:\n" in text
    assert "[default: 5; x>=1]" in holdfast("run", "--help").out


def test_options_may_stand_between_arguments(holdfast: Command, root: Path) -> None:
    done = holdfast("tag", f"{root}@latest", "one", "--json", "two")
    assert done.code == 0
    assert done.document["tags"] == ["one", "two"]


def test_a_call_without_a_command_gives_the_help(holdfast: Command) -> None:
    result = holdfast()
    assert result.code in (Code.OK, Code.USAGE)  # Versions of click differ here.
    assert "Usage" in result.out + result.err


def test_an_unknown_kind_of_place_is_a_wrong_call(holdfast: Command) -> None:
    for place in ("s3://bucket/a run", "ftp://host/run"):
        result = holdfast("ls", place)
        assert result.code == 2
        assert result.err.startswith("holdfast: root ")


def in_a_process(
    *arguments: object, code: str = "", heavy: Sequence[str] = ("torch", "matplotlib")
) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own; says at the end what it imported."""
    script = (
        "import atexit, sys\n"
        f"heavy = {set(heavy)!r}\n"
        "atexit.register(lambda: print('imported', *sorted(heavy & set(sys.modules)),"
        " file=sys.stderr))\n"
        f"sys.argv = {['holdfast', *map(str, arguments)]!r}\n"
        f"from holdfast.cli import main\n{code}\nmain()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )


IN_TURN = """
import sys
from holdfast import cli
from holdfast.cli import main
for words in {commands!r}:
    sys.argv = ["holdfast", *words]
    try:
        main()
    except SystemExit as end:
        heavy = sorted({{"torch", "matplotlib"}} & {{*sys.modules}})
        print(*words, "ended with", end.code or 0, *heavy, file=sys.stderr)
"""
"""Runs commands one after the other, and says after each what is imported."""


def test_no_command_pays_for_torch(root: Path) -> None:
    """Design, section 7."""
    commands = [
        [word.replace("ROOT", str(root)) for word in line.split()]
        for line in (
            *("--version", "ls ROOT", "ls ROOT --json", "show ROOT --tensors", "verify ROOT"),
            *("gc ROOT", "prune ROOT --keep last:1", "cp ROOT@latest ROOT-copy"),
            *("rm ROOT@step=300 --yes --reason x --even-latest", "watch ROOT --once"),
            "doctor ROOT",
        )
    ]
    script = IN_TURN.format(commands=commands)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stderr.splitlines() == [f"{' '.join(words)} ended with 0" for words in commands]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["ls", "ROOT"],
        ["gc", "ROOT"],
        ["pin", "ROOT@latest"],
        ["prune", "ROOT", "--keep", "last:1", "--dry-run"],
    ],
)
def test_what_reads_small_documents_only_pays_for_little_else(
    root: Path, arguments: list[str]
) -> None:
    """Each of these is a large part of the time in which a thousand manifests are listed."""
    given = [item.replace("ROOT", str(root)) for item in arguments]
    done = in_a_process(*given, heavy=("torch", "numpy", "pydantic", "rich", "asyncio"))
    assert (done.returncode, done.stderr.strip()) == (0, "imported")


def test_the_package_can_be_run_as_a_module(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", "ls", root],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout.startswith("step")


@pytest.mark.parametrize("command", ["ls", "verify", "show", "gc"])
def test_an_interrupt_ends_quietly(root: Path, command: str) -> None:
    interrupt = (
        "import os, signal\n"
        "from holdfast.store.local import LocalStore\n"
        "def children(self, folder=''):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    raise AssertionError('not interrupted')\n"
        "LocalStore.children = children\n"
    )
    done = in_a_process(command, root, code=interrupt)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "imported\n")


def test_an_interrupt_before_the_command_ends_quietly_too() -> None:
    interrupt = (
        "import os, signal\n"
        "import holdfast.cli.app\n"
        "holdfast.cli.app.KeySources = lambda **_: os.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = in_a_process("ls", "nowhere", code=interrupt)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "imported")


def test_an_error_of_ours_is_not_taken_for_an_interrupt(root: Path) -> None:
    """click takes `EOFError` for one."""
    broken = (
        "from holdfast.store.local import LocalStore\n"
        "def children(self, folder=''):\n"
        "    raise EOFError('broke off')\n"
        "LocalStore.children = children\n"
    )
    done = in_a_process("ls", root, code=broken)
    assert done.returncode == 1
    assert "EOFError: broke off" in done.stderr


def test_an_interrupt_in_the_middle_of_a_report_ends_quietly(root: Path) -> None:
    interrupt = (
        "import os, signal\n"
        "from holdfast.maintenance import verify\n"
        "verify.verify.__globals__['look_at'] = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = in_a_process("verify", root, code=interrupt)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "imported\n")
    assert signal.SIGINT == 2


def run_to(output: Any, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command line with that as its standard output."""
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli", *words],
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("words", ["ls ROOT", "ls ROOT --help"])
def test_a_reader_that_goes_away_is_no_error(root: Path, words: str) -> None:
    """`holdfast ls … | head -0`."""
    reading, writing = os.pipe()
    os.close(reading)
    done = run_to(writing, *words.replace("ROOT", str(root)).split())
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    "words",
    [
        *("ls ROOT", "ls ROOT --json", "log ROOT --saves", "show ROOT --tensors", "tree ROOT"),
        *("verify ROOT", "resume-plan ROOT", "forecast ROOT --keep last:1", "du ROOT"),
        *("plot ROOT", "prune ROOT --keep last:1 --dry-run", "gc ROOT --dry-run"),
        *("diff ROOT ROOT@step=100", "stats ROOT", "cat ROOT model:0.bias"),
        *("keys list ROOT", "doctor ROOT", "schema ls", "completion bash", "watch ROOT --once"),
        *("ls nowhere --json", "ls --json", "--help", "ls --help", "keys --help", "--version"),
    ],
)
def test_no_command_minds_a_reader_that_goes_away(
    root: Path, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`holdfast … | head`: no traceback, whatever has been written by then."""
    reading, writing = os.pipe()
    os.close(reading)
    output = os.fdopen(writing, "w")
    monkeypatch.setattr("sys.stdout", output)
    monkeypatch.setattr("sys.argv", ["holdfast", *words.replace("ROOT", str(root)).split()])
    with pytest.raises(SystemExit) as end:
        main()
    with contextlib.suppress(BrokenPipeError):  # click has not written all
        output.close()
    assert end.value.code == Code.BROKEN_PIPE
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "words", ["ls ROOT", "ls ROOT --json", "ls nowhere --json", "ls --help", "--version"]
)
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a disk that is always full")
def test_an_answer_that_cannot_be_written_is_an_error_of_one_line(root: Path, words: str) -> None:
    """`holdfast ls … > report` on a full disk."""
    with open("/dev/full", "w") as full:
        done = run_to(full, *words.replace("ROOT", str(root)).split())
    assert done.returncode == 1
    assert done.stderr == "holdfast: the answer could not be written: No space left on device\n"


def test_an_output_that_is_closed_is_no_error(root: Path) -> None:
    """`holdfast verify … >&-`, as a service may start it."""
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -m holdfast.cli ls "$1" >&-', sys.executable, root],
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def all_of(leader: int, child: subprocess.Popen[bytes]) -> bytes:
    """What a program writes to a terminal, in however many pieces, until it ends."""
    seen, has_ended = b"", False
    while not has_ended:
        has_ended = child.poll() is not None
        while select.select([leader], [], [], 0.1)[0]:
            seen += os.read(leader, 65536)
    return seen


def on_a_terminal(columns: int, *words: str | Path) -> bytes:
    """Run the command line on a real terminal: both ends of a pseudo-terminal."""
    leader, follower = os.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    child = subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli", *words],
        stdout=follower,
        stderr=follower,
        env=environment,
    )
    seen = all_of(leader, child)
    os.close(leader)
    os.close(follower)
    assert child.returncode == 0
    return seen


def test_a_terminal_gets_tables_and_bars(root: Path) -> None:
    seen = on_a_terminal(200, "ls", root) + on_a_terminal(200, "verify", root)
    assert b"\x1b[1mstep" in seen
    assert "━".encode() in seen
    assert b"every byte is intact" in seen


def test_no_word_of_a_table_is_broken_on_a_narrow_terminal(root: Path) -> None:
    """The terminal wraps the lines; columns of three letters could not be read."""
    seen = on_a_terminal(60, "ls", root)
    assert b"created (UTC)     metrics" in seen
    assert b"latest" in seen


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 * 2**30, "5.0 GiB"),
        (3000 * 2**40, "3000.0 TiB"),
    ],
)
def test_sizes_are_for_people(nbytes: int, text: str) -> None:
    assert format_nbytes(nbytes) == text


def test_odd_values_are_safe_to_print_and_to_parse() -> None:
    assert printable("a\x1b[0m\nb\u202ec") == "a\\x1b[0m\nb\\x202ec"
    nested = {"a": [float("nan"), float("-inf"), 1.5], "b": {"c": (float("inf"), None)}}
    assert json_safe(nested) == {"a": ["nan", "-inf", 1.5], "b": {"c": ["inf", None]}}


def test_a_dead_endpoint_fails_the_command_after_its_timeout(
    holdfast: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Line 16 of the review: it was tried on for two minutes."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    result = holdfast("--timeout", "1s", "ls", "s3://bucket/run")
    assert result.code == 1
    assert "Check the address" in result.err
    assert holdfast("--timeout", "soon", "ls", "s3://bucket/run").code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("ls", "--json"), "Missing argument"),
        (("ls", "x", "--json", "--nothing"), "--nothing"),
        (("--json", "ls", "x"), "--json"),
        (("import", "a", "b", "--step", "-1", "--json"), "'--step'"),
        (("lss", "x", "--json"), "lss"),
        (("run", "--json", "--max-failures", "-1", "--", "true"), "'--max-failures'"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_a_json_error_where_json_is_asked_for(
    holdfast: Command, arguments: Sequence[str], said: str
) -> None:
    result = holdfast(*arguments)
    assert (result.code, result.err, result.document["error"]["kind"]) == (2, "", "UsageError")
    assert said in result.document["error"]["message"]
    assert result.out.count("\n") == 1  # as commands that write lines promise


def test_the_json_that_a_supervised_command_is_asked_for_is_its_own(holdfast: Command) -> None:
    result = holdfast("run", "--nothing", "--", "x", "--json")
    assert (result.code, result.out, "--nothing" in result.err) == (2, "", True)
