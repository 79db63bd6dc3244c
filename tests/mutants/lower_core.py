"""Mutants of saves, loads, claims and uploads that omit a step of the protocol."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

COMMIT = "tests/root/test_commit.py"
CLAIM = "tests/ownership/test_claim.py"
LEASES = "tests/ownership/test_leases.py"
OVERLAP = "tests/staging/test_overlap.py"
UPLOAD = "tests/replication/test_upload.py"
MANAGER = "tests/test_manager.py"
SEALING = "tests/encryption/test_store.py"
TENSORS = "tests/loading/test_tensor_reader.py"
DAMAGE = "tests/crash/test_damage.py"
OTHERS = "tests/root/test_others.py"

ROOTS = (
    Mutant(
        name="fence-not-read-before-the-commit",
        promise="R10: a writer that was superseded commits nothing",
        file="root/commit.py",
        before="    check_ownership(store, epoch, committed=False)\n    attempt.put_sent",
        after="    attempt.put_sent",
        near=(COMMIT,),
    ),
    Mutant(
        name="fence-not-read-after-the-commit",
        promise="R10: a writer that is superseded while it commits is told so",
        file="root/commit.py",
        before=(
            "        check_ownership(store, epoch, committed=True)\n    except StoreError as error:"
        ),
        after="        store.head(attempt.manifest_key)\n    except StoreError as error:",
        near=(COMMIT,),
    ),
    Mutant(
        name="fence-of-the-own-epoch",
        promise="R10: a later claim fences earlier writers off",
        file="root/commit.py",
        before="    key = layout.writer_key(epoch + 1)\n    store.refresh_folder",
        after="    key = layout.writer_key(epoch + 2)\n    store.refresh_folder",
        near=(CLAIM, MANAGER),
    ),
    Mutant(
        name="commit-of-another-taken-for-ours",
        promise="I1: after a conflict the whole save id is compared",
        file="root/commit.py",
        before="    if found != data:\n        raise CommitConflict",
        after="    if not found:\n        raise CommitConflict",
        near=(COMMIT,),
    ),
    Mutant(
        name="folder-removed-with-a-put-in-flight",
        promise="R22: no file of an attempt that may commit is removed",
        file="root/commit.py",
        before="    if attempt.put_sent:\n        return False\n",
        after="    if attempt.put_sent and not attempt.is_unclear:\n        return False\n",
        near=(COMMIT, "tests/crash/test_os_errors.py"),
    ),
    Mutant(
        name="folder-of-a-user-taken-for-an-attempt",
        promise="D5: only folders that a claim made are deleted",
        file="root/documents.py",
        before="    if nonce is None:\n        return False\n",
        after="    if nonce is None or name.label:\n        return True\n",
        near=(OTHERS,),
    ),
    Mutant(
        name="file-of-a-user-taken-for-a-tensor-file",
        promise="D5: of a checkpoint only listed files are deleted",
        file="root/documents.py",
        before="    if not is_document and listed is not None:\n        return False\n",
        after="    if not is_document and listed is not None:\n        return True\n",
        near=(OTHERS,),
    ),
    Mutant(
        name="pointer-of-another-program-replaced",
        promise="D5: a latest of another program stays",
        file="root/commit.py",
        before="    if is_other or (found is not None and layout.parse_attempt(found) is None):\n",
        after="    if is_other:\n",
        near=(OTHERS,),
    ),
    Mutant(
        name="deletion-without-fence",
        promise="R20: a writer that was superseded deletes nothing",
        file="ownership/deletion.py",
        before="    check_ownership(store, epoch, committed=True)\n    return is_ours\n",
        after="    return is_ours\n",
        near=("tests/maintenance/test_prune.py", "tests/maintenance/test_retention.py"),
    ),
    Mutant(
        name="one-mended-meanwhile-is-deleted",
        promise="R20: no checkpoint with a sound manifest is deleted but by a rule",
        file="ownership/deletion.py",
        before="if readers.find_leases(folder) else _why_sound(store, folder)\n",
        after='if readers.find_leases(folder) else ""\n',
        near=("tests/maintenance/test_delete_damaged.py",),
    ),
    Mutant(
        name="pin-not-looked-for-before-a-deletion",
        promise="R20: retention never removes a pinned checkpoint",
        file="ownership/deletion.py",
        before="is_held(register, marks) and not even_held:\n            return _NOT_REMOVED\n",
        after="not marks:\n            return _NOT_REMOVED\n",
        near=(COMMIT,),
    ),
    Mutant(
        name="lease-not-looked-for-after-the-mark",
        promise="R11: a checkpoint is not deleted under who reads it",
        file="ownership/deletion.py",
        before="        if leases := readers.find_leases(folder):\n            return",
        after=(
            "        leases = readers.find_leases(folder)\n"
            "        if not register:\n"
            "            return"
        ),
        near=(LEASES, "tests/maintenance/test_leased_retention.py"),
    ),
    Mutant(
        name="files-removed-before-the-tombstone",
        promise="R11: a reader sees whole checkpoints only",
        file="ownership/deletion.py",
        before="        _put_tombstone(store, folder, Deleted(save_id=register.save_id",
        after=(
            "        remove_files(store, folder, whole=False)\n"
            "        _put_tombstone(store, folder, Deleted(save_id=register.save_id"
        ),
        near=(COMMIT,),
    ),
    Mutant(
        name="claims-by-list-alone",
        promise="R10: a claim that a list hides counts",
        file="root/catalog.py",
        before="        while self._has_claim(following):\n",
        after="        while not epochs and self._has_claim(following):\n",
        near=("tests/root/test_catalog.py",),
    ),
    Mutant(
        name="manifest-of-another-folder",
        promise="R16: a checkpoint that was swapped with another is found",
        file="root/catalog.py",
        before="            _check_place(register, folder)\n",
        after="            pass\n",
        near=("tests/root/test_catalog.py",),
    ),
    Mutant(
        name="checkpoint-of-another-run",
        promise="R16: a checkpoint that was copied here from another run is not taken for our own",
        file="root/catalog.py",
        before="        if claim is not None and claim.nonce != manifest.writer:\n",
        after="        if claim is not None and manifest.writer is None:\n",
        near=("tests/maintenance/test_attacked.py",),
    ),
    Mutant(
        name="rollback-lost-with-its-claim",
        promise="R16: a rollback holds though its claim was damaged",
        file="root/catalog.py",
        before="            is_rollback = claim is None or claim.rollback\n",
        after="            is_rollback = claim is not None and claim.rollback\n",
        near=("tests/maintenance/test_attacked.py",),
    ),
    Mutant(
        name="older-state-goes-unnoticed",
        promise="R37: an older state that was put back is noticed",
        file="results.py",
        before="        if latest.order < self.order:\n",
        after="        if latest.order > self.order:\n",
        near=(SEALING,),
    ),
)

CLAIMS = (
    Mutant(
        name="claim-of-the-same-epoch-twice",
        promise="R10: of two claims of one epoch one wins",
        file="ownership/claim.py",
        before="        put_once(store, layout.writer_key(epoch), record.encode())\n",
        after="        store.put(layout.writer_key(epoch), record.encode())\n",
        near=(CLAIM,),
    ),
    Mutant(
        name="claim-without-second-look",
        promise="R10: a claim goes on from what was committed before it fenced others off",
        file="ownership/claim.py",
        before="    return newest == (point.folder if point is not None else None)\n",
        after="    return True\n",
        near=(CLAIM,),
    ),
    Mutant(
        name="live-owner-not-asked",
        promise="I11: a live owner is refused",
        file="ownership/claim.py",
        before='        return state == "alive"\n',
        after='        return state == "zombie"\n',
        near=("tests/crash/test_owners.py",),
    ),
    Mutant(
        name="deletion-under-way-not-seen-by-a-claim",
        promise="R10: a run goes on from nothing that is being deleted",
        file="ownership/claim.py",
        before="    if is_being_deleted(store, marks):\n        return False\n",
        after="",
        near=(CLAIM,),
    ),
    Mutant(
        name="pid-without-its-start-time",
        promise="R1: a pid that was given to another process owns nothing",
        file="ownership/process.py",
        before='        if leader.start != process.start:\n            return "dead"\n',
        after="",
        near=(CLAIM,),
    ),
    Mutant(
        name="lease-without-look-at-marks",
        promise="R11: a reader gives way to a deletion that has begun",
        file="ownership/leases.py",
        before="            _expect_standing(store, folder)\n            lease.keep_up()\n",
        after="            lease.keep_up()\n",
        near=(LEASES,),
    ),
    Mutant(
        name="lease-from-elsewhere-binds-once",
        promise="D3: a lease from elsewhere binds until it was silent by the deleter's own clock",
        file="ownership/leases.py",
        before="        return self._clock() - since_s < SILENT_S\n",
        after="        return self._clock() - since_s < 0.0\n",
        near=(LEASES,),
    ),
    Mutant(
        name="deleted-while-it-was-read-is-not-told",
        promise="R11: a reader is told that a checkpoint was deleted while it was read",
        file="ownership/access.py",
        before="        _expect_kept(store, entry.folder)\n",
        after="",
        near=(LEASES,),
    ),
)

SAVING = (
    Mutant(
        name="syncs-not-waited-for",
        promise="I2: files are durable before the manifest is put",
        file="saving/write_files.py",
        before=(
            "            gather_results([self._syncs[key]], timeout_s=self._timeout_s, what=key)\n"
        ),
        after="            pass\n",
        near=("tests/saving/test_write_files.py",),
    ),
    Mutant(
        name="blocks-one-byte-off",
        promise="R15: what is read back is what was saved",
        file="saving/packing.py",
        before="            self._start += used\n",
        after="            self._start += used - 1\n",
        near=("tests/test_compression.py",),
    ),
    Mutant(
        name="sizes-not-looked-at-before-the-commit",
        promise="I2: files have the planned size before the manifest is put",
        file="saving/save.py",
        before="        if nbytes != entry.stored_nbytes:\n",
        after="        if nbytes is None:\n",
        near=(COMMIT,),
    ),
    Mutant(
        name="index-not-in-the-manifest",
        promise="I3: the index is covered by a digest",
        file="saving/save.py",
        before="    digest = blocks.file_digest(len(index), blocks.digest_blocks(index))\n",
        after='    digest = blocks.file_digest(len(index), b"")\n',
        near=("tests/loading/test_open.py", MANAGER),
    ),
    Mutant(
        name="root-that-is-gone-made-anew",
        promise="R6: a root that was moved or unmounted is an error",
        file="saving/save.py",
        before="    expect_claim(store, request.claim)\n",
        after="",
        near=(MANAGER,),
    ),
    Mutant(
        name="failure-of-a-background-save-swallowed",
        promise="D37: errors of a background save are raised at the next call",
        file="saving/saver.py",
        before="            pending.delivered = True\n            raise failure\n",
        after="            pending.delivered = True\n",
        near=(MANAGER, "tests/crash/test_os_errors.py"),
    ),
    Mutant(
        name="same-step-taken-for-same-state",
        promise="R14: a save holds the state of the moment of the call",
        file="saving/participants.py",
        before="        return roots == recorded\n",
        after="        return roots.keys() == recorded.keys()\n",
        near=(MANAGER,),
    ),
    Mutant(
        name="damaged-file-is-shared",
        promise="R17: a file is read back before another checkpoint shares it",
        file="saving/links.py",
        before="        return not fault\n",
        after="        return True\n",
        near=("tests/test_links.py",),
    ),
    Mutant(
        name="newest-two-share-one-file",
        promise="I10: the newest two never share a file",
        file="saving/links.py",
        before="        if any(map(partial(self._is_one_file, origin), self._excluded)):\n",
        after="        if not self._excluded:\n",
        near=("tests/test_links.py",),
    ),
    Mutant(
        name="only-sharers-are-kept",
        promise="I10: retention keeps one more where the newest two that stay share a file",
        file="policy/retention.py",
        before="        if not share_files(newest.entry.order, made.entry.order):\n",
        after="        if not made:\n",
        near=("tests/test_links.py",),
    ),
)

STAGING = (
    Mutant(
        name="torn-tensor-is-saved",
        promise="R14: a tensor that changed while it was copied fails the save",
        file="staging/guard.py",
        before="            self._changed += self._guarded.changes()\n",
        after="            self._guarded.changes()\n",
        near=("tests/staging/test_guard.py", OVERLAP),
    ),
    Mutant(
        name="optimizer-not-held-back",
        promise="R14: training changes nothing that is being copied",
        file="staging/guard.py",
        before="        overlapped.hold(who, self._timeout_s)\n",
        after="        overlapped.copied.done()\n",
        near=("tests/staging/test_guard.py", OVERLAP),
    ),
    Mutant(
        name="memory-taken-again-while-it-is-written",
        promise="R14: what is written is what was staged",
        file="staging/pool.py",
        before=(
            "                self._half_done.add(number)\n"
            "                return\n"
            "            buffer = self._buffers.pop(number)\n"
        ),
        after=(
            "                self._half_done.add(number)\n"
            "            buffer = self._buffers[number]\n"
        ),
        near=("tests/staging/test_waves.py",),
    ),
    Mutant(
        name="change-behind-the-first-page-not-seen",
        promise="R14: a save holds the state of the moment of the call",
        file="staging/image.py",
        before="min(nbytes, 4096)) or _memcmp(target, source, nbytes):",
        after="min(nbytes, 4096)):",
        near=("tests/staging/test_copy_tasks.py", "tests/test_links.py"),
    ),
    Mutant(
        name="digest-of-the-save-before",
        promise="I3: digests are those of the staged bytes",
        file="staging/layout.py",
        before="            self.digests[number] = None\n\n    def doubt",
        after="            self.digests[number] = self.digests[number]\n\n    def doubt",
        near=("tests/staging/test_copy_tasks.py", MANAGER),
    ),
    Mutant(
        name="parts-of-tensors-from-their-begin",
        promise="I7: resume is exact, also of a state that was staged in waves",
        file="staging/waves.py",
        before="part = self._get_flat_bytes(position)[low - first : high - first]",
        after="part = self._get_flat_bytes(position)[: high - low]",
        near=("tests/staging/test_waves.py",),
    ),
)

LOADING = (
    Mutant(
        name="digest-of-a-document-not-compared-in-a-load",
        promise="R15: a flipped bit in an index or a tree is found",
        file="loading/documents.py",
        before="        if digest == entry.digest or not verify:\n",
        after="        if digest or not verify:\n",
        near=("tests/loading/test_open.py", DAMAGE),
    ),
    Mutant(
        name="digest-of-a-block-not-compared",
        promise="R15: a flipped bit in a tensor is found",
        file="loading/block_reader.py",
        before="        if hasher.digest() == _select_digest(file.digests, number):\n",
        after="        if len(hasher.digest()) == len(_select_digest(file.digests, number)):\n",
        near=("tests/loading/test_open.py", DAMAGE),
    ),
    Mutant(
        name="digest-of-a-cached-block-not-compared",
        promise="D14: flipped bits that load without a word",
        file="loading/block_reader.py",
        before=(
            "        return not verify or hasher.digest() == _select_digest(file.digests, number)\n"
        ),
        after="        return not verify or len(hasher.digest()) == blocks.DIGEST_NBYTES\n",
        near=(TENSORS,),
    ),
    Mutant(
        name="plain-bytes-of-a-codec-not-compared",
        promise="D15: the digests of plain bytes are compared, too",
        file="loading/block_reader.py",
        before="    if verify and not _is_block(plain, file.digests, number):\n",
        after="    if verify and not plain.nbytes:\n",
        near=("tests/test_compression.py",),
    ),
    Mutant(
        name="wrong-copy-on-the-host-is-kept",
        promise="R17: a copy that proves wrong is dropped and read anew",
        file="loading/cached_store.py",
        before=(
            "                self._pieces.remove_copies(piece.place)\n        if afresh or start"
        ),
        after="                assert piece.place\n        if afresh or start",
        near=("tests/loading/test_cached_store.py",),
    ),
    Mutant(
        name="part-of-a-block-from-its-begin",
        promise="R15: each tensor gets its own bytes",
        file="loading/pipeline.py",
        before="        values = source[segment.start : segment.start + len(segment.target)]\n",
        after="        values = source[: len(segment.target)]\n",
        near=(TENSORS,),
    ),
    Mutant(
        name="boxes-begin-where-their-tensor-does",
        promise="R15: each tensor gets its own bytes, in each of its boxes",
        file="loading/assembly.py",
        before="        self.start: Column = at.start + first * item_nbytes\n",
        after="        self.start: Column = at.start\n",
        near=("tests/loading/test_assembly.py",),
    ),
    Mutant(
        name="boxes-beside-whole-tensors-stay-empty",
        promise="R15: each tensor gets its own bytes, in each of its boxes",
        file="loading/pipeline.py",
        before="partial(self._copy_block, read, given_up, fill) if read.segments else fill",
        after="fill",
        near=("tests/loading/test_assembly.py",),
    ),
    Mutant(
        name="what-is-damaged-is-not-passed-over",
        promise="D31: no way back to the checkpoint before",
        file="loading/search.py",
        before="if not (is_damage(error) or isinstance(error, PassedOver | NotSealed)):\n",
        after="if not isinstance(error, PassedOver | NotSealed):\n",
        near=("tests/loading/test_search.py",),
    ),
    Mutant(
        name="fresh-start-where-nothing-can-be-used",
        promise="R19: a run that has committed never begins anew",
        file="loading/search.py",
        before="            is_new = not catalog.ever_committed(by_main=True)\n",
        after="            is_new = bool(self.passed_over)\n",
        near=("tests/test_compression.py", "tests/maintenance/test_thin.py", DAMAGE),
    ),
)

OTHERS = (
    Mutant(
        name="plain-checkpoint-among-sealed-ones",
        promise="R32: a checkpoint that is not sealed is not taken for one",
        file="encryption/store.py",
        before="if isinstance(register, Manifest) and not self._encryption.accept_plain:",
        after="if isinstance(register, Aborted) and not self._encryption.accept_plain:",
        near=(SEALING,),
    ),
    Mutant(
        name="opened-once-believed-for-ever",
        promise="R32: a sealed manifest that was replaced is noticed",
        file="encryption/store.py",
        before="            if known is not None and known.document == document:\n",
        after="            if known is not None:\n",
        near=(SEALING,),
    ),
    Mutant(
        name="notes-in-clear-are-believed",
        promise="R32: notes that were not sealed are noticed",
        file="encryption/store.py",
        before="        if layout.parse_notes(name) is not None:\n            raise Tampered",
        after="        if layout.parse_notes(name) == 0:\n            raise Tampered",
        near=(SEALING,),
    ),
    Mutant(
        name="reason-of-a-deletion-in-clear",
        promise="R34: what is sealed is nowhere stored in clear",
        file="encryption/store.py",
        before="msgspec.structs.replace(register, reason=REDACTED)",
        after="register",
        near=(SEALING,),
    ),
    Mutant(
        name="damaged-block-is-sent",
        promise="D14: flipped bits that go on to the other tier",
        file="replication/upload.py",
        before="            if block_digest(data) == piece.digest:\n                return data\n",
        after="            if data:\n                return data\n",
        near=(UPLOAD,),
    ),
    Mutant(
        name="remote-copy-with-missing-files",
        promise="D20: a manifest that is there taken for a whole checkpoint",
        file="replication/upload.py",
        before="        if wrong and not is_thinned:\n",
        after="        if wrong and is_thinned:\n",
        near=(UPLOAD, "tests/replication/test_mirror.py"),
    ),
    Mutant(
        name="remote-file-read-back-and-not-compared",
        promise="D20: a file that is there taken for a whole one",
        file="replication/upload.py",
        before="        return block_digest(data) == piece.digest\n",
        after="        return len(data) == piece.stop - piece.start\n",
        near=(UPLOAD, "tests/replication/test_mirror_faults.py"),
    ),
    Mutant(
        name="upload-past-a-later-claim",
        promise="R10: nothing is committed in a run that went on elsewhere",
        file="replication/upload.py",
        before="            publish(self._remote, attempt, data, epoch=epoch)\n",
        after="            publish(self._remote, attempt, data, epoch=epoch + 1)\n",
        near=(UPLOAD,),
    ),
    Mutant(
        name="branches-are-mixed",
        promise="D30: a run that went on in both tiers separately is an error",
        file="ownership/tiered.py",
        before="    if point is None or name.order > point.order:\n",
        after="    if point is None and name.order < (0, 0):\n",
        near=("tests/ownership/test_tiered_claims.py",),
    ),
    Mutant(
        name="stop-hides-the-exception",
        promise="D46: an exception is not hidden by what ends the program",
        file="control/stop.py",
        before="        if error is None and self._requested is not None:\n",
        after="        if self._requested is not None:\n",
        near=("tests/control/test_stop.py",),
    ),
    Mutant(
        name="stop-raises-behind-its-block",
        promise="I7: what may be given up is given up inside its block only",
        file="control/stop.py",
        before=(
            "        if threading.get_ident() == self._stop._thread:\n"
            "            self._stop._is_armed = False\n"
        ),
        after=(
            "        if threading.get_ident() != self._stop._thread:\n"
            "            self._stop._is_armed = False\n"
        ),
        near=("tests/control/test_stop.py",),
    ),
    Mutant(
        name="request-honoured-at-every-look",
        promise="D54: one request is one save",
        file="control/save_requests.py",
        before="            self._known.update(new)\n",
        after="            self._known.update(new[:0])\n",
        near=("tests/control/test_save_requests.py",),
    ),
    Mutant(
        name="request-removed-before-its-answer",
        promise="D37: who waits for a save finds the request or the answer",
        file="control/save_requests.py",
        before="if answer is not None and answer_key is not None and is_there(self._store, key):\n",
        after=(
            "self._store.delete(key)\n        if answer is not None and answer_key is not None:\n"
        ),
        near=("tests/control/test_save_requests.py",),
    ),
    Mutant(
        name="next-reader-not-woken",
        promise="I9: no wait without an end",
        file="threads/pools.py",
        before="    def _set_result(self, result: Any) -> None:\n        self._room.release()\n",
        after="    def _set_result(self, result: Any) -> None:\n",
        near=("tests/threads/test_pools.py",),
    ),
    Mutant(
        name="writers-still-run-after-the-error",
        promise="I2: nobody writes after a save has failed",
        file="threads/workers.py",
        before="    cancel(running, timeout_s=timeout_s)\n    if failed is not None:\n",
        after="    if failed is not None:\n",
        near=("tests/threads/test_workers.py", "tests/threads/test_pools.py"),
    ),
    Mutant(
        name="ranks-save-where-some-have-passed",
        promise="R38: ranks get a wish at the same call",
        file="control/agreement.py",
        before="agreed = _AgreedStep(max(decode_message(",
        after="agreed = _AgreedStep(min(decode_message(",
        near=("tests/control/test_agreement.py",),
    ),
    Mutant(
        name="a-rank-passes-its-promise-unheard",
        promise="R38: ranks get a wish at the same call",
        file="control/agreement.py",
        before="            return self._agreed is not None or self._error is not None\n",
        after="            return True\n",
        near=("tests/control/test_agreement.py",),
    ),
    Mutant(
        name="ranks-stop-when-each-has-its-signal",
        promise="R38: ranks stop at the same step",
        file="control/stop.py",
        before="            if self._is_shared:\n                return\n",
        after="",
        near=("tests/control/test_stop.py",),
    ),
)

MUTANTS: tuple[Mutant, ...] = (*ROOTS, *CLAIMS, *SAVING, *STAGING, *LOADING, *OTHERS)
