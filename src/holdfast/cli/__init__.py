"""The command line: `holdfast ls`, `show`, `verify`, `gc`, `demo` (docs/cli.md)."""

from __future__ import annotations


def main() -> None:
    """Run the command line and leave the process with its exit code.

    What a command needs is imported by that command; none but `demo` imports torch.
    """
    from holdfast.cli.app import run

    run()
