"""`compress="auto"`: what pays is taken, what does not is dropped, and both are told."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import CheckpointManager
from holdfast.errors import UsageError
from holdfast.events import Emitter, Event
from holdfast.format.codec import Compression
from holdfast.format.layout import BLOCK_NBYTES
from holdfast.format.tensors import TensorSpec, lay_out
from holdfast.saving import compression
from holdfast.saving.compression import (
    MIN_NBYTES,
    SAVES_BETWEEN,
    Chooser,
    CodecTrial,
    Throughput,
    choose_trial,
)
from holdfast.store.local import LocalStore

ZSTD, LZ4 = Compression(codec="zstd"), Compression(codec="lz4")
MIB = 1 << 20


def store_of(bytes_per_s: float) -> Throughput:
    found = Throughput()
    found.nbytes, found.busy_s = int(bytes_per_s), 1.0
    return found


def trial(compression: Compression, ratio: float, mb_per_s: float) -> CodecTrial:
    return CodecTrial(compression=compression, ratio=ratio, s_per_byte=1e-6 / mb_per_s)


@pytest.mark.parametrize(
    ("store_mb_per_s", "num_threads", "expected"),
    [
        (100, 1, ZSTD),  # the store is what takes time: the smallest wins
        (900, 1, LZ4),  # zstd would be slower than writing plain
        (900, 4, ZSTD),
        (5000, 1, None),  # nothing keeps up
        (5000, 2, None),
        (3000, 2, LZ4),
    ],
)
def test_the_least_time_wins_and_none_where_nothing_gains(
    store_mb_per_s: float, num_threads: int, expected: Compression | None
) -> None:
    trials = [trial(ZSTD, 0.7, 600), trial(LZ4, 0.85, 2500)]
    found = choose_trial(
        trials,
        store_s_per_byte=1e-6 / store_mb_per_s,
        plain_s_per_byte=1e-6 / store_mb_per_s,
        num_threads=num_threads,
    )
    assert (found.compression if found else None) == expected


@pytest.mark.parametrize(
    ("ratio", "plain", "is_taken"),
    [
        (0.93, 1.0, False),  # hardly shrinks
        (0.85, 1.0, True),
        (0.85, 2.0, False),  # the store is only half of what a save takes
        (0.5, 2.0, True),
    ],
)
def test_only_the_stores_part_of_a_save_becomes_shorter(
    ratio: float, plain: float, is_taken: bool
) -> None:
    s_per_byte = 1e-8
    found = choose_trial(
        [trial(ZSTD, ratio, 10_000)],
        store_s_per_byte=s_per_byte,
        plain_s_per_byte=plain * s_per_byte,
        num_threads=8,
    )
    assert (found is not None) == is_taken


def test_without_codecs_there_is_no_choice() -> None:
    assert choose_trial([], store_s_per_byte=1e-8, plain_s_per_byte=1e-8, num_threads=8) is None


class Played:
    """A chooser for two components, and saves of a state that shrinks or does not."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.chooser = Chooser({"model", "noise"}, Emitter((self.events.append,)))
        values = np.random.default_rng(0).standard_normal(BLOCK_NBYTES // 4).astype(np.float32)
        self.blocks = {"model": values.tobytes(), "noise": random.Random(0).randbytes(BLOCK_NBYTES)}

    def save(
        self, *, store: float, s_per_gb: float = 1.0, nbytes: int = 2 * MIN_NBYTES
    ) -> set[str]:
        """One save; gives the components that it compressed."""
        self.chooser.discard_samples()
        compressed = set()
        for name, block in self.blocks.items():
            if self.chooser.compression(name) is not None:
                compressed.add(name)
                assert self.chooser.observer(name, [4]) is None
            else:
                see = self.chooser.observer(name, [4])
                if see is not None:
                    see(0, memoryview(block))
        self.chooser.record_save(nbytes, s_per_gb * nbytes / 1e9, store_of(store))
        return compressed

    @property
    def messages(self) -> list[str]:
        return [event.message for event in self.events]


def test_the_first_save_is_plain_and_those_after_it_are_what_pays() -> None:
    played = Played()
    assert played.save(store=1e6) == set()
    assert played.save(store=1e6) == {"model"}
    (message,) = played.messages
    assert message.startswith("the store takes 1 MB/s: compressing model by ")
    assert played.events[0].kind == "compression"
    assert played.events[0].fields["compression"].keys() == {"model"}


def test_on_a_store_that_is_faster_than_any_codec_nothing_is_compressed() -> None:
    played = Played()
    for _ in range(3):
        assert played.save(store=1e12) == set()
    assert played.messages == [
        "the store takes 1,000,000 MB/s: compressing nothing, which would take longer"
    ]


def test_a_choice_that_turns_out_slower_is_dropped() -> None:
    """Issue 5: never slower than none on the store that was measured."""
    played = Played()
    played.save(store=1e6, s_per_gb=10.0)
    assert played.save(store=1e6, s_per_gb=10.2) == {"model"}
    assert played.save(store=1e6, s_per_gb=11.0) == {"model"}
    assert played.save(store=1e6, s_per_gb=10.0) == set()
    assert played.messages[-1] == (
        "compressing nothing: a compressed save took 11.00 s/GB, and a plain one 10.00"
    )


def test_it_is_chosen_anew_now_and_then() -> None:
    played = Played()
    found = [played.save(store=1e6) for _ in range(2 * SAVES_BETWEEN + 1)]
    plain = [number for number, compressed in enumerate(found) if not compressed]
    assert plain == [0, SAVES_BETWEEN, 2 * SAVES_BETWEEN]
    assert len(played.messages) == 1  # the same as before is not told again


def test_small_saves_tell_nothing() -> None:
    played = Played()
    for _ in range(3):
        assert played.save(store=1e6, nbytes=MIN_NBYTES - 1) == set()
    assert played.messages == []


def test_samples_are_few_however_large_the_state_is() -> None:
    chooser = Chooser({"model"}, Emitter(()))
    chooser.discard_samples()
    block = memoryview(bytes(BLOCK_NBYTES))
    asked = []
    for _ in range(100):
        see = chooser.observer("model", [4] * 50)
        assert see is not None
        for number in range(50):
            see(number, block)
        asked.append(see)
    (samples,) = chooser._samples.values()
    assert len(samples) == compression.MAX_SAMPLES
    assert {len(sample.data) for sample in samples} == {compression.SAMPLE_NBYTES}


def test_only_what_is_auto_is_looked_at() -> None:
    chooser = Chooser({"model"}, Emitter(()))
    chooser.discard_samples()
    assert chooser.observer("optimizer", [4]) is None


def test_the_time_of_a_store_is_that_in_which_it_was_called() -> None:
    found = Throughput()
    assert found.bytes_per_s is None
    with found.taking(100):
        with found.taking(50):
            pass
        assert found.busy_s == 0
    busy_s = found.busy_s
    assert busy_s > 0
    assert found.bytes_per_s == 150 / busy_s


def test_auto_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save plain, the next by what was chosen; both are the same state."""
    monkeypatch.setattr(Throughput, "bytes_per_s", property(lambda self: 1e6))
    monkeypatch.setattr(compression, "SLOWER", 1e9)
    monkeypatch.setattr(compression, "GAIN", 1e9)
    events: list[Event] = []
    state = {"model": {"w": torch.randn(12 * MIB) * 0.02}, "plain": {"v": torch.ones(MIB)}}
    with CheckpointManager(
        LocalStore(tmp_path), state, compress={"model": "auto"}, sinks=(events.append,)
    ) as manager:
        for step in (1, 2):
            state["model"]["w"].add_(0.001)
            manager.save(step).wait()
            manager.wait()
    names = [
        {path.name for path in next(tmp_path.glob(f"step-{step:08d}*")).iterdir()}
        for step in (1, 2)
    ]
    assert "model-00000.safetensors" in names[0]
    assert any(name.startswith("model-00000.safetensors.") for name in names[1])
    assert "plain-00000.safetensors" in names[1]
    assert [event.kind for event in events].count("compression") == 1
    live: dict[str, Any] = {"model": {"w": torch.zeros(12 * MIB)}, "plain": {"v": torch.zeros(MIB)}}
    with CheckpointManager(tmp_path, live, sinks=()) as loading:
        loading.resume()
    assert torch.equal(live["model"]["w"], state["model"]["w"])


def test_a_library_that_fails_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 8."""

    def broken(*_: Any) -> None:
        raise ImportError("a library is broken")

    monkeypatch.setattr(compression, "try_codec", broken)
    events: list[Event] = []
    state = {"model": {"w": torch.randn(12 * MIB)}}
    with CheckpointManager(tmp_path, state, compress="auto", sinks=(events.append,)) as manager:
        manager.save(1).wait()
        manager.wait()
        state["model"]["w"].add_(1)
        manager.save(2).wait()
    warnings = [event.message for event in events if event.kind == "warning"]
    assert any("a library is broken" in message for message in warnings)


def test_items_are_those_in_the_middle_of_a_block() -> None:
    specs = [TensorSpec("a", "F32", (5 * MIB,)), TensorSpec("b", "BF16", (6 * MIB,))]
    (file,) = lay_out("model", [*specs, TensorSpec("c", "U8", (3,))])
    assert compression.item_sizes(file) == [4, 4, 4, 2, 1]
    (empty,) = lay_out("model", [TensorSpec("e", "I64", (0,))])
    assert compression.item_sizes(empty) == [8]


@pytest.mark.parametrize("choice", [["zstd"], {}, 3])
def test_what_is_no_compression_is_a_mistake_of_the_caller(tmp_path: Path, choice: Any) -> None:
    with pytest.raises(UsageError, match="choose from"):
        CheckpointManager(tmp_path / "root", {"tree": {"a": 1}}, compress={"tree": choice})
