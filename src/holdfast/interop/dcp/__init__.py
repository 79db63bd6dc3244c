"""PyTorch Distributed Checkpoint (DCP) on Holdfast: a storage writer and a storage reader.

dcp.save(state, storage_writer=HoldfastWriter(root, step=step))
dcp.load(state, storage_reader=HoldfastReader(root))
"""

from __future__ import annotations

from holdfast.interop.dcp.folders import export_folder, import_folder
from holdfast.interop.dcp.reader import HoldfastReader
from holdfast.interop.dcp.writer import HoldfastWriter

__all__ = ["HoldfastReader", "HoldfastWriter", "export_folder", "import_folder"]
