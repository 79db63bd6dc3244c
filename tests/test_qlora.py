"""QLoRA: a checkpoint is the adapter and its moments, and a resume is exact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import MismatchError, UsageError
from holdfast.interop.exporting.export import export_checkpoint
from holdfast.interop.opening import open_source
from holdfast.state.leaves import plain_parts
from qlora import QLoRA, Texts, logits_of, make_base, make_run
from quantized import bits_in

FIXED_NBYTES, NBYTES_OF_TENSOR, NBYTES_OF_RECORD = 32 << 10, 320, 160
"""Bytes of a checkpoint of any size, such as generators; of the documents for each tensor; and for
each record of a digest."""
HOLDFAST = Path(sys.executable).with_name("holdfast")


def count_trained(run: QLoRA) -> int:
    """Bytes of the adapter and its moments."""
    trained = [one for one in run.model.parameters() if one.requires_grad]
    slots = [one for state in run.optimizer.state.values() for one in state.values()]
    tensors = [*trained, *(one for one in slots if isinstance(one, torch.Tensor))]
    return sum(part.nbytes for one in tensors for part in plain_parts(one))


def count_base(run: QLoRA) -> int:
    frozen = [one for one in run.model.parameters() if not one.requires_grad]
    return sum(part.nbytes for one in frozen for part in plain_parts(one))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("quantizer", ["torchao", "bitsandbytes"])
def test_a_checkpoint_is_the_adapter_with_its_moments_and_opens_in_peft(
    tmp_path: Path, quantizer: str
) -> None:
    """Two sessions equal one; another base is refused; PEFT opens the exported adapter."""
    from peft import PeftModel

    whole = make_run(quantizer=quantizer)
    whole.train(tmp_path / "whole", 4)
    make_run(quantizer=quantizer).train(tmp_path / "run", 2)
    second = make_run(quantizer=quantizer)
    checkpoint = second.train(tmp_path / "run", 4)
    assert bits_in(second.model) == bits_in(whole.model)
    trained, base = count_trained(second), count_base(second)
    assert base > 0.9 * trained
    components = json.loads(Path(checkpoint.path, "manifest.json").read_bytes())["components"]
    num_tensors = sum(one["num_tensors"] for one in components.values())
    num_records = components["model"]["frozen"]["num_tensors"]
    documents = FIXED_NBYTES + NBYTES_OF_TENSOR * num_tensors + NBYTES_OF_RECORD * num_records
    assert trained < checkpoint.nbytes < 1.02 * trained + documents < trained + base / 5
    with pytest.raises(MismatchError, match=r"\d+ of \d+ frozen.*embed_tokens\.weight"):
        make_run(8, quantizer=quantizer).train(tmp_path / "run", 5)
    second.model.peft_config["default"].save_pretrained(tmp_path / "config")
    export_checkpoint(tmp_path / "run", tmp_path / "out", to="peft", config=tmp_path / "config")
    opened = PeftModel.from_pretrained(make_base(quantizer=quantizer), tmp_path / "out")
    assert torch.equal(logits_of(opened), second.logits())


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_adapters_of_one_base_are_trained_in_turn_and_exported_by_name(tmp_path: Path) -> None:
    """An inactive adapter is frozen, and of no base: it is saved, whatever was trained of it."""
    from peft import LoraConfig, PeftModel, get_peft_model

    def make(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        base = make_base()
        torch.manual_seed(seed)  # adapters that are not seeded alike in each session
        config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["norm"])
        model = get_peft_model(base, config, adapter_name="first")
        model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
        marks = (".first.", ".second.")
        parts = [one for name, one in model.named_parameters() if any(m in name for m in marks)]
        return model, torch.optim.SGD(parts, lr=0.5)

    def session(seed: int, steps: dict[int, str]) -> Any:
        model, optimizer = make(seed)
        state = {"model": model, "optimizer": optimizer}
        with holdfast.CheckpointManager(tmp_path / "run", state, frozen="by digest") as manager:
            manager.resume()
            for step, active in steps.items():
                model.set_adapter(active)
                batch = Texts()[step][None]
                model(input_ids=batch, labels=batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                manager.save(step, wait=True)
        return model

    before = session(0, {1: "first", 2: "second"})
    after = session(1, {})
    assert bits_in(after) == bits_in(before)
    with open_source(str(tmp_path / "run")) as source:
        assert not any(
            ".first." in one or ".second." in one for one in source.parts["model"].frozen
        )
        assert len(source.parts["model"].frozen) == 39
    before.peft_config["first"].save_pretrained(tmp_path / "first")
    with pytest.raises(UsageError, match="FOLDER/first"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", to="peft", config=tmp_path / "first")
    for name in ("first", "second"):
        before.peft_config[name].save_pretrained(tmp_path / name)
        out = tmp_path / f"out-{name}"
        export_checkpoint(tmp_path / "run", out, to="peft", config=tmp_path / name, adapter=name)
        before.set_adapter(name)
        opened = PeftModel.from_pretrained(make_base(), out)
        assert torch.equal(logits_of(opened), logits_of(before))
    with pytest.raises(UsageError, match="merge_and_unload"):
        export_checkpoint(tmp_path / "run", tmp_path / "merged", to="hf")


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("quantizer", ["torchao", "bitsandbytes"])
def test_a_run_that_is_killed_ten_times_is_equal_bit_for_bit(
    tmp_path: Path, quantizer: str
) -> None:
    script = Path(__file__).with_name("qlora.py")
    environment = os.environ | {"PYTHONPATH": os.fspath(script.parent), "OMP_NUM_THREADS": "1"}
    command = [HOLDFAST, "prove", "--json", "--kills", "10", "--timeout", "25min"]
    command += [
        "--folder",
        tmp_path / "runs",
        "--",
        sys.executable,
        script,
        "{root}",
        "120",
        quantizer,
    ]
    done = subprocess.run(
        [*map(os.fspath, command)], capture_output=True, text=True, env=environment, timeout=1500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    proof = json.loads(done.stdout)
    assert (proof["verdict"], len(proof["kills"]), proof["last_step"]) == ("equal", 10, 120)
