"""QLoRA: a checkpoint is the adapter and its moments, and a resume is exact."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast.errors import MismatchError
from holdfast.interop.exporting.export import export_checkpoint
from holdfast.state.leaves import plain_parts
from qlora import QLoRA, logits_of, make_base, make_run
from quantized import bits_in

FIXED_NBYTES, NBYTES_OF_TENSOR = 32 << 10, 320
"""Bytes of a checkpoint of any size, such as generators; and of the documents for each tensor."""
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
def test_a_checkpoint_is_the_adapter_with_its_moments_and_opens_in_peft(tmp_path: Path) -> None:
    """Two sessions equal one; another base is refused; PEFT opens the exported adapter."""
    from peft import PeftModel

    whole = make_run()
    whole.train(tmp_path / "whole", 4)
    make_run().train(tmp_path / "run", 2)
    second = make_run()
    checkpoint = second.train(tmp_path / "run", 4)
    assert bits_in(second.model) == bits_in(whole.model)
    trained, base = count_trained(second), count_base(second)
    assert base > 0.9 * trained
    components = json.loads(Path(checkpoint.path, "manifest.json").read_bytes())["components"]
    num_tensors = sum(one["num_tensors"] for one in components.values())
    documents = FIXED_NBYTES + NBYTES_OF_TENSOR * num_tensors
    assert trained < checkpoint.nbytes < 1.02 * trained + documents < trained + base / 5
    with pytest.raises(MismatchError, match=r"\d+ of 39 frozen.*embed_tokens\.weight"):
        make_run(base_seed=8).train(tmp_path / "run", 5)
    second.model.peft_config["default"].save_pretrained(tmp_path / "config")
    export_checkpoint(tmp_path / "run", tmp_path / "out", to="peft", config=tmp_path / "config")
    opened = PeftModel.from_pretrained(make_base(), tmp_path / "out")
    assert torch.equal(logits_of(opened), second.logits())


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_run_that_is_killed_ten_times_is_equal_bit_for_bit(tmp_path: Path) -> None:
    script = Path(__file__).with_name("qlora.py")
    environment = os.environ | {"PYTHONPATH": os.fspath(script.parent), "OMP_NUM_THREADS": "1"}
    command = [HOLDFAST, "prove", "--json", "--kills", "10", "--timeout", "25min"]
    command += ["--folder", tmp_path / "runs", "--", sys.executable, script, "{root}", "120"]
    done = subprocess.run(
        [*map(os.fspath, command)], capture_output=True, text=True, env=environment, timeout=1500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    proof = json.loads(done.stdout)
    assert (proof["verdict"], len(proof["kills"]), proof["last_step"]) == ("equal", 10, 120)
