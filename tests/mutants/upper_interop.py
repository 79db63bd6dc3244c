"""Mutants of the bridges to the checkpoints of other libraries."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_DCP = ("tests/interop/test_dcp.py",)
_FOLDERS = ("tests/interop/test_dcp_folders.py",)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="dcp-attempt-left-open",
        promise="I1: an attempt of which DCP told nothing ends before the next save begins",
        file="interop/dcp/writer.py",
        before="        root = self._root\n        root.clean()\n",
        after="        root = self._root\n",
        near=_DCP,
    ),
    Mutant(
        name="dcp-items-of-another-plan",
        promise="I2: what is committed has all that the planner saved",
        file="interop/dcp/plans.py",
        before="        return None if None in self.tasks else ",
        after="        return next(iter(self.tasks)) if self.tasks else ",
        near=_DCP,
    ),
    Mutant(
        name="dcp-pickle-loaded-unasked",
        promise="I5: who loads a pickle has said so",
        file="interop/dcp/reader.py",
        before="        if not self._unsafe_pickle:",
        after="        if False:",
        near=_DCP,
    ),
    Mutant(
        name="dcp-ranks-load-different-checkpoints",
        promise="I6: all ranks load the same checkpoint, or nothing changes",
        file="interop/dcp/reader.py",
        before="        if len(found) > 1:",
        after="        if False:",
        near=_DCP,
    ),
    Mutant(
        name="dcp-rollback-forgotten",
        promise="I11: the run goes on from what was loaded",
        file="interop/dcp/roots.py",
        before="            if loaded is not None and loaded != found:",
        after="            if False:",
        near=_DCP,
    ),
    Mutant(
        name="dcp-enum-comes-back-as-another-type",
        promise="I5: a value comes back as it was, or is refused",
        file="interop/dcp/objects.py",
        before="    if any(isinstance(node, EnumValue) for node in nodes):",
        after="    if False:",
        near=_DCP,
    ),
    Mutant(
        name="dcp-metadata-of-any-class",
        promise="I5: nothing in a folder of DCP runs",
        file="interop/dcp/folders.py",
        before='        raise FormatError(f"it holds {module}.{name}, ',
        after='        return super().find_class(module, name)\n        raise FormatError(f"',
        near=_FOLDERS,
    ),
    Mutant(
        name="dcp-path-leads-out",
        promise="R28: no name in a folder of DCP leads out of it",
        file="interop/dcp/folders.py",
        before="        if os.path.commonpath([inside, path]) != inside:",
        after="        if False:",
        near=_FOLDERS,
    ),
    Mutant(
        name="dcp-metadata-changes-classes",
        promise="I5: nothing in a folder of DCP changes this process",
        file="interop/dcp/folders.py",
        before='            raise FormatError(f"it sets members',
        after='            return super().load_build()\n            raise FormatError(f"',
        near=_FOLDERS,
    ),
    Mutant(
        name="dcp-pickle-exported-unasked",
        promise="I5: who makes a folder that runs something has said so",
        file="interop/dcp/folders.py",
        before="        if not unsafe_pickle:",
        after="        if False:",
        near=_FOLDERS,
    ),
    Mutant(
        name="dcp-gives-the-state-of-one-rank",
        promise="R38: what differs by rank is given to no other rank",
        file="interop/dcp/reader.py",
        before="            if component.kind in BY_RANK or name in opened.by_rank:",
        after="            if component.kind in BY_RANK:",
        near=_FOLDERS,
    ),
)
