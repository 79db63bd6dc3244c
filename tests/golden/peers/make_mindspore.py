"""Checkpoints of MindSpore: of every dtype, with a checksum, sliced, encrypted; safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, load_checkpoint, save_checkpoint
from mindspore.train import serialization
from sample import folder_argument, write_record

KEY = b"0123456789abcdef"
NUMPYS = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64"),
)


def make_items() -> list[dict[str, Any]]:
    """Return one tensor of each dtype that MindSpore reads back, and odd shapes."""
    values = {f"dtypes.{name}": Tensor(np.arange(6).reshape(2, 3).astype(name)) for name in NUMPYS}
    values["dtypes.bfloat16"] = values["dtypes.float32"].astype(mindspore.bfloat16)
    values["scalar"] = Tensor(2.5, mindspore.float32)
    values["one"] = Tensor(np.array([1.5], np.float32))
    return [{"name": name, "data": value} for name, value in values.items()]


def read_back(path: Path, **options: Any) -> dict[str, Any]:
    found = load_checkpoint(str(path), **options)
    return {name: plain(value) for name, value in found.items()}


def plain(value: Any) -> Any:
    """Return the array of a parameter; bfloat16 comes as float32."""
    if isinstance(value, str):
        return value
    if value.dtype == mindspore.bfloat16:
        return value.astype(mindspore.float32).asnumpy()
    return value.asnumpy()


def main() -> None:
    folder = folder_argument()
    items = make_items()
    few = [one for one in items if one["name"] in ("dtypes.float32", "dtypes.bfloat16", "scalar")]
    more = {"epoch_num": 2, "step_num": 7, "note": "häl😀"}
    save_checkpoint(items, str(folder / "plain.ckpt"), append_dict=more)
    save_checkpoint(few, str(folder / "crc.ckpt"), crc_check=True)
    # Of bfloat16 it needs a newer NumPy.
    plainer = [one for one in few if one["name"] != "dtypes.bfloat16"]
    save_checkpoint(plainer, str(folder / "few.safetensors"), format="safetensors", crc_check=True)
    for mode in ("AES-GCM", "AES-CBC", "SM4-CBC"):
        save_checkpoint(few, str(folder / f"{mode}.ckpt"), enc_key=KEY, enc_mode=mode)
    serialization.SLICE_SIZE = 1  # KiB; by itself it cuts at 512 MiB
    big = Tensor(np.arange(500, dtype=np.float32).reshape(50, 10))
    sliced = [{"name": "before", "data": few[-1]["data"]}, {"name": "big", "data": big}]
    save_checkpoint(sliced, str(folder / "sliced.ckpt"))
    serialization.ENCRYPT_BLOCK_SIZE = 1  # KiB; by itself 64 MiB
    for mode in ("AES-GCM", "AES-CBC"):
        path = folder / f"{mode}-blocks.ckpt"
        save_checkpoint(sliced, str(path), enc_key=KEY, enc_mode=mode)
    for path in folder.iterdir():
        path.chmod(0o644)  # MindSpore makes them read-only
    record = {name: read_back(folder / name) for name in ("plain.ckpt", "crc.ckpt", "sliced.ckpt")}
    record["few.safetensors"] = read_back(folder / "few.safetensors", format="safetensors")
    write_record(folder, record, "mindspore", "protobuf", "safetensors")


main()
