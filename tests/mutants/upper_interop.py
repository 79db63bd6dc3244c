"""Mutants of the bridges to the checkpoints of other libraries."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_DCP = ("tests/interop/test_dcp.py",)
_FOLDERS = ("tests/interop/test_dcp_folders.py",)
_HOSTILE = ("tests/interop/hostile",)
_TORCH = ("tests/interop/sources/test_torchfile.py",)
_TARS = ("tests/interop/sources/test_tars.py",)
_TRAINERS = ("tests/interop/layouts",)

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
    Mutant(
        name="pickle-one-more-global",
        promise="I5: nothing that a pickle names is called",
        file="interop/pickles/names.py",
        before='    "_codecs.encode": _encoded,\n',
        after='    "_codecs.encode": _encoded,\n'
        '    "os.system": lambda machine, args: __import__("os").system(*args),\n',
        near=_HOSTILE,
    ),
    Mutant(
        name="pickle-imports-a-module",
        promise="I5: nothing that a pickle names is imported",
        file="interop/pickles/machine.py",
        before="            found = self._constants.get(full) or Global(full)\n",
        after="            found = self._constants.get(full) or Global(full)\n"
        "            __import__(module)\n",
        near=_HOSTILE,
    ),
    Mutant(
        name="pickle-values-cost-nothing",
        promise="I5: a small file takes no unbounded memory",
        file="interop/pickles/budget.py",
        before="        self.nbytes -= nbytes\n",
        after="",
        near=_HOSTILE,
    ),
    Mutant(
        name="pickle-keys-of-one-hash",
        promise="I5: a small file takes no unbounded time",
        file="interop/pickles/budget.py",
        before="MAX_OTHER_KEYS = 4_000",
        after="MAX_OTHER_KEYS = 4_000_000_000",
        near=_HOSTILE,
    ),
    Mutant(
        name="pickle-shared-values-count-once",
        promise="I5: containers that are used often count as often",
        file="interop/pickles/parts.py",
        before="        self._spend(found.weight)\n",
        after="",
        near=_HOSTILE,
    ),
    Mutant(
        name="pickle-value-left-out-in-silence",
        promise="issue 24: what is not carried over is listed",
        file="interop/pickles/parts.py",
        before="            self.left_out.append(LeftOut(join(",
        after="            [].append(LeftOut(join(",
        near=_TORCH,
    ),
    Mutant(
        name="torch-tensor-beyond-its-storage",
        promise="I5: a tensor has bytes of its own storage only",
        file="interop/pickles/names.py",
        before="        (last + 1) * item > storage.nbytes",
        after="        (last + 1) * item > 2**62",
        near=_HOSTILE,
    ),
    Mutant(
        name="torch-claims-more-than-the-file",
        promise="I5: a small file gives no tensors without bound",
        file="interop/pickles/parts.py",
        before="    if claimed > max(8 * file_nbytes, 64 << 20):",
        after="    if False:",
        near=_HOSTILE,
    ),
    Mutant(
        name="zip-members-overlap",
        promise="I5: no two members of a zip file share bytes",
        file="interop/sources/zips.py",
        before="            if member.header < end:",
        after="            if False:",
        near=_HOSTILE,
    ),
    Mutant(
        name="torch-strides-forgotten",
        promise="issue 24: a strided tensor comes back with its elements in order",
        file="interop/sources/torchfile.py",
        before="        if is_row_major(spec.shape, place.strides):",
        after="        if True:",
        near=_TORCH,
    ),
    Mutant(
        name="tar-member-that-is-a-link",
        promise="I5: only plain files of an archive are read",
        file="interop/sources/tars.py",
        before='        if is_wanted and kind not in (b"0", b"\\0"):',
        after="        if False:",
        near=_HOSTILE,
    ),
    Mutant(
        name="archive-without-a-bound",
        promise="I5: a small archive takes no unbounded room",
        file="interop/sources/tars.py",
        before="        if self._done > self._limit:",
        after="        if False:",
        near=_TARS,
    ),
    Mutant(
        name="trainer-shards-of-one-name",
        promise="issue 24: a tensor that two shards hold is no choice of ours",
        file="interop/sources/trainers.py",
        before="            if twice:",
        after="            if False:",
        near=_TRAINERS,
    ),
)
