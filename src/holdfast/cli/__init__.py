"""The command line `holdfast` (docs/cli.md)."""

from __future__ import annotations


def main() -> None:
    """Run the command line and exit with its exit code."""
    from holdfast.cli.app import run_command_line

    run_command_line()
