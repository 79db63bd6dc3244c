"""A small GPT over bytes that learns something in a minute on two cores, and its data.

The data is the source text of Python's standard library.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from holdfast.demo.record import Shape


class TransformerBlock(nn.Module):
    """Pre-norm transformer block: attention and a feed-forward network, each with a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.num_heads = shape.num_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(shape.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block; x and the result are [batch, time, width]."""
        x = x + self._attend(self.attention_norm(x))
        result: Tensor = x + self.feed_forward(x)
        return result

    def _attend(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.projection(mixed.transpose(1, 2).reshape(batch, time, width))
        return result


class GPT(nn.Module):
    """Predicts the next byte; the output layer shares its weight with the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Parameter(torch.zeros(shape.context, shape.width))
        self.blocks = nn.Sequential(*(TransformerBlock(shape) for _ in range(shape.num_layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(_initialise)

    def forward(self, text: Tensor) -> Tensor:
        """Compute logits [batch, time, vocabulary] from text [batch, time]."""
        x = self.embedding(text) + self.position[: text.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    def loss(self, windows: Tensor) -> Tensor:
        """Compute the mean cross-entropy in nats a byte; windows are [batch, time + 1]."""
        logits = self(windows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def standard_library_text(max_nbytes: int) -> bytes:
    """Read the first `max_nbytes` bytes of the standard library's modules, in order of names.

    The same interpreter always gives the same bytes; nothing is downloaded.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    pieces, nbytes = [], 0
    for path in sorted(folder.glob("*.py")):
        pieces.append(path.read_bytes())
        nbytes += len(pieces[-1])
        if nbytes >= max_nbytes:
            break
    return b"\n".join(pieces)[:max_nbytes]


class Windows(Dataset[Tensor]):
    """Dataset of text windows of `length + 1` bytes, each shifted by a random offset.

    The offset is drawn from torch's global generator, as augmentation is in real training: an
    exact resume must bring back the draws as well as the position.
    """

    def __init__(self, text: bytes, length: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._length = length

    def __len__(self) -> int:
        return len(self._text) // self._length - 2

    def __getitem__(self, index: int) -> Tensor:
        shift = int(torch.randint(self._length, ()))
        start = index * self._length + shift
        return self._text[start : start + self._length + 1].long()
