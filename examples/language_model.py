"""A small language model over ASCII characters, and its data. Plain Paddle: nothing here knows of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

__all__ = ["CONTEXT", "LanguageModel", "evaluation_batch", "language_loss", "training_batch", "training_text"]

TEXT_FILE = Path(__file__).with_name("data") / "english.txt"
VOCABULARY = 128
CONTEXT = 64
HIDDEN = 64
HEADS = 4
BLOCKS = 2

# The last part of the text is kept from training.
_EVALUATION_CHARACTERS = 2048


class Block(nn.Layer):
    """Self-attention and a two-layer perceptron, each behind a layer norm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(HIDDEN)
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.key = nn.Linear(HIDDEN, HIDDEN)
        self.value = nn.Linear(HIDDEN, HIDDEN)
        self.output = nn.Linear(HIDDEN, HIDDEN)
        self.perceptron_norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: paddle.Tensor, mask: paddle.Tensor) -> paddle.Tensor:
        """Map [batch, time, hidden] to the same shape. ``mask`` [time, time] is added to the attention scores."""
        normed = self.attention_norm(x)
        query, key, value = (_split_heads(layer(normed)) for layer in (self.query, self.key, self.value))
        scores = paddle.matmul(query, key, transpose_y=True) * (HIDDEN // HEADS) ** -0.5
        mixed = paddle.matmul(F.softmax(scores + mask), value)
        x = x + self.output(_join_heads(mixed))
        return x + self.down(F.gelu(self.up(self.perceptron_norm(x))))


class LanguageModel(nn.Layer):
    """A decoder-only transformer that predicts the next character at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = self.create_parameter([CONTEXT, HIDDEN], default_initializer=nn.initializer.Normal(std=0.02))
        self.blocks = nn.LayerList([Block() for _ in range(BLOCKS)])
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias_attr=False)

    def forward(self, characters: paddle.Tensor) -> paddle.Tensor:
        """Map characters [batch, time] to logits [batch, time, vocabulary]."""
        x = self.characters(characters) + self.positions
        mask = paddle.triu(paddle.full([CONTEXT, CONTEXT], -1e9), diagonal=1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def language_loss(logits: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
    """Return the mean cross entropy, in nats a character."""
    return F.cross_entropy(logits, targets.unsqueeze(-1)).mean()


def training_text() -> np.ndarray:
    """Return the characters to train on, int64."""
    return _text()[:-_EVALUATION_CHARACTERS]


def training_batch(step: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs and targets of one step, each int64 [size, CONTEXT]. The same step gives the same batch."""
    text = training_text()
    starts = np.random.default_rng(step).integers(0, len(text) - CONTEXT, size)
    return _windows(text, starts)


def evaluation_batch() -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets from the part of the text that training does not see."""
    text = _text()[-_EVALUATION_CHARACTERS:]
    return _windows(text, np.arange(0, len(text) - CONTEXT, CONTEXT + 1)[:16])


def _text() -> np.ndarray:
    return np.frombuffer(TEXT_FILE.read_bytes(), np.uint8).astype(np.int64)


def _windows(text: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    windows = text[starts[:, None] + np.arange(CONTEXT + 1)]
    return windows[:, :-1].copy(), windows[:, 1:].copy()


def _split_heads(x: paddle.Tensor) -> paddle.Tensor:
    return x.reshape([x.shape[0], CONTEXT, HEADS, HIDDEN // HEADS]).transpose([0, 2, 1, 3])


def _join_heads(x: paddle.Tensor) -> paddle.Tensor:
    return x.transpose([0, 2, 1, 3]).reshape([x.shape[0], CONTEXT, HIDDEN])
