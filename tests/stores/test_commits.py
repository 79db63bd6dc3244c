"""Commits through a flaky network: none lost, torn, falsely refused or falsely acknowledged."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

import pytest

from holdfast.engine import commit as commit_module
from holdfast.errors import AlreadyExists, CommitConflict, StoreError
from holdfast.store import open_store
from holdfast.store.base import Buffer, Store
from servers.client import uploads
from servers.faults import FaultProxy, Rule
from servers.fixtures import on, use
from servers.program import Service
from stores.oracle import Oracle, commit_many

SMALL = 1 << 14
