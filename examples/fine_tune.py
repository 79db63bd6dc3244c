"""The weights of one run as the beginning of another, larger model.

A small model learns to guess the next byte of source code. A deeper one, with other names and a
head of its own, is to do the same for documentation. It takes over what fits: a function renames
the stored weights, `include` says which of them are wanted, and whatever else does not match is
still an error, because the load is strict.

    python examples/fine_tune.py
"""

from __future__ import annotations

import sysconfig
import tempfile
from collections import OrderedDict
from copy import deepcopy
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import holdfast
from holdfast.data import Loader
from holdfast.train import Trainer


def make_body(num_blocks: int) -> nn.Sequential:
    """The 16 bytes before the one to guess as one vector, changed block by block."""
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(num_blocks)]
    for block in blocks[2:]:
        nn.init.eye_(block[0].weight)  # so that an added block changes little at first
    parts = {"embedding": nn.Embedding(256, 16), "flat": nn.Flatten()}
    return nn.Sequential(OrderedDict(parts, blocks=nn.Sequential(*blocks)))


def make_small() -> nn.Sequential:
    """What is trained first: two blocks and a head."""
    model = make_body(num_blocks=2)
    model.add_module("head", nn.Linear(256, 256))
    return model


def make_large() -> nn.Sequential:
    """Twice as deep; what was `blocks.0` is `body.blocks.0` here."""
    body, head = make_body(num_blocks=4), nn.Linear(256, 256)
    return nn.Sequential(OrderedDict(body=body, norm=nn.LayerNorm(256), head=head))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Of the last byte of each window, given the others."""
    return cross_entropy(model(batch[0][:, :-1]), batch[0][:, -1])


def train(root: Path, model: nn.Module, text: bytes, steps: int) -> float:
    """Train the model on a text; gives its loss on the end of it."""
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, 17, 8).long()
    trainer = Trainer(
        model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        data=Loader(TensorDataset(windows[:-2000]), batch_size=64),
        loss=loss,
        validate=Loader(TensorDataset(windows[-2000:]), batch_size=500, shuffle=False),
        checkpoints=root,
    )
    trainer.fit(steps)
    return trainer.validate()["val/loss"]


def main() -> None:
    """Train the small one, then the large one from its weights and, to compare, from nothing."""
    torch.set_num_threads(1)  # enough for models of this size
    library = Path(sysconfig.get_paths()["stdlib"])
    code = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))[:400_000]
    documentation = "\n".join(topics[name] for name in sorted(topics)).encode()[:100_000]

    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder, "small")
        torch.manual_seed(0)
        small = make_small()
        print(f"small, on code: {train(first, small, code, 600):.2f}")

        torch.manual_seed(1)
        tuned = make_large()
        from_nothing = deepcopy(tuned)
        holdfast.load_weights(
            first,
            tuned,
            rename=lambda path: f"body.{path}",
            include=["model.embedding", "model.blocks.*"],  # not the head
        )
        taken, new = tuned.body.blocks, from_nothing.body.blocks
        assert torch.equal(taken[1][0].weight, small.blocks[1][0].weight)
        assert torch.equal(taken[2][0].weight, new[2][0].weight)

        with_weights = train(Path(folder, "tuned"), tuned, documentation, 150)
        without = train(Path(folder, "from-nothing"), from_nothing, documentation, 150)
    print(f"large, on documentation: {with_weights:.2f}, and {without:.2f} from nothing")
    assert with_weights < without
    print("what the small model knew helps the large one")


if __name__ == "__main__":
    main()
