"""Decision 0069 with the real processes of torchrun: a save of all ranks is finished."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from children import environment
from holdfast.maintenance.verify import verify
from holdfast.root.catalog import Catalog
from holdfast.store.local import LocalStore

JOB = Path(__file__).with_name("staging_job.py")


@pytest.mark.full
@pytest.mark.timeout(400)
def test_ranks_of_torchrun_resume_from_what_they_had_staged(tmp_path: Path) -> None:
    root = tmp_path / "run"
    words = [sys.executable, "-m", "holdfast.cli", "run", "--memory", "50MB", "--backoff", "0"]
    words += ["--root", str(root), "--", sys.executable, "-m", "torch.distributed.run"]
    words += ["--standalone", "--nproc-per-node", "2", str(JOB), str(root), "4"]
    done = subprocess.run(
        [*words, str(tmp_path / "died")],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert "finished the save of step 3 that the training had staged" in done.stderr
    told = {tuple(line.split()[1:4]): line.split()[4] for line in done.stdout.splitlines()}
    for rank in ("0", "1"):
        assert told[rank, "resumed", "3"] == told[rank, "trained", "3"]
    catalog = Catalog(LocalStore(root))
    entries = [entry for name in catalog.attempts() if (entry := catalog.entry(name))]
    assert sorted(entry.step for entry in entries) == [1, 2, 3, 4]
    assert all(verify(catalog.store, entry.folder).ok for entry in entries)
    assert {entry.manifest.world_size for entry in entries} == {2}
