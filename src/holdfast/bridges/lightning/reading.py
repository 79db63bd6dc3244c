"""Reads our checkpoints where Lightning is given one as `ckpt_path`."""

from __future__ import annotations

import os
from typing import Any

import lightning
from lightning.pytorch.plugins.io import CheckpointIO
from typing_extensions import override

from holdfast.bridges.lightning.seams import FRAMEWORK, model_of
from holdfast.checkpoints import StateHooks
from holdfast.interop.sources import checkpoint as checkpoints_of_ours
from holdfast.keys import Encryption
from holdfast.manager import CheckpointManager
from holdfast.ownership.access import place_of
from holdfast.state.components import RNG, TRAINER
from holdfast.store.base import Store

_FILES = (".ckpt", ".pt", ".pth", ".safetensors")


class ReadingIO(CheckpointIO):
    """Reads our checkpoints where Lightning is given one, and leaves all other files to `inner`."""

    def __init__(
        self,
        inner: Any,
        trainer: Any,
        encrypt: Encryption | None,
        part: str | None,
        hooks: StateHooks,
    ) -> None:
        self.inner = inner
        self.asked: tuple[Store, str] | None = None
        """Store and checkpoint of the `ckpt_path` of a fit; its state is loaded later, at once."""
        self._trainer, self._encrypt, self._part = trainer, encrypt, part
        self._hooks = hooks

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write a file of Lightning's own, as without this bridge."""
        self.inner.save_checkpoint(checkpoint, path, storage_options=storage_options)

    @override
    def load_checkpoint(self, path: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Load weights into the live module, and return them with what hooks may ask for."""
        text = os.fspath(path)
        if text.endswith(_FILES) or not checkpoints_of_ours.recognises(text):
            options = {name: one for name, one in options.items() if one is not None}
            loaded: dict[str, Any] = self.inner.load_checkpoint(path, *arguments, **options)
            return loaded
        store, which, folder = place_of(text)
        module, is_fit = self._trainer.lightning_module, self._trainer.training
        stored = _Stored()
        # Of a fit, all but what hooks may ask for is loaded later.
        model = model_of(module, self._part)
        wanted = {TRAINER: stored} if is_fit else {TRAINER: stored, "model": model}
        hooks = StateHooks(
            edit_save=self._hooks.edit_save, one_sided=lambda name: name != "model" or is_fit
        )
        with CheckpointManager(
            store, wanted, ranks=None, encrypt=self._encrypt, hooks=hooks, sinks=()
        ) as manager:
            manager.load(folder or which, skip=[RNG])
        if is_fit:
            self.asked = store, folder or which
        # Averages of the weights, which are what is tested, are in the place of the weights.
        unread = {"loops", "state_dict"} if is_fit else {"loops"}
        content = (
            stored.content.get("checkpoint", {}) if stored.content.get("of") == FRAMEWORK else {}
        )
        return {
            "pytorch-lightning_version": lightning.__version__,
            "epoch": 0,
            "global_step": 0,
            "state_dict": module.state_dict(),
            **{name: one for name, one in content.items() if name not in unread},
            "optimizer_states": [],
            "lr_schedulers": [],
        }

    @override
    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file of Lightning's own."""
        self.inner.remove_checkpoint(path)

    @override
    def teardown(self) -> None:
        """Let the inner one clean up."""
        self.inner.teardown()


class _Stored:
    """Component that keeps what is loaded into it."""

    def __init__(self) -> None:
        self.content: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the content."""
        return self.content

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the content."""
        self.content = state
