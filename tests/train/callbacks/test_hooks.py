"""The order of all hooks in a real training, and the page that tells it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.data import Loader
from holdfast.errors import UsageError
from holdfast.store.memory import MemoryStore
from holdfast.testing.faulty import Fault, FaultyStore
from holdfast.train import Callback, HookFailed, Measured, Metrics, Table, Training, Validation
from holdfast.train.callbacks.hooks import HOOKS
from train.hooks_page import PAGE, page
from train.small import Noisy, make, network


def recorder(calls: list[str], **members: Any) -> Callback:
    """A callback that overrides every hook and writes each call down."""

    def recording(hook: str) -> Any:
        signature = inspect.signature(getattr(Callback, hook))

        def record(*arguments: Any) -> None:
            calls.append(hook)

        record.__signature__ = signature  # type: ignore[attr-defined]
        return record

    methods = {hook: recording(hook) for hook in HOOKS}
    callback: Callback = type("Recorder", (Callback,), {**methods, **members})()
    return callback


BATCH = [
    *("batch_start", "before_forward", "after_forward"),
    *("before_backward", "after_backward", "batch_end"),
]
UPDATE = [
    *("before_optimizer_step", "after_optimizer_step"),
    *("before_zero_grad", "after_zero_grad"),
    *("before_scheduler_step", "after_scheduler_step"),
]
STEP = ["before_data", "step_start", *BATCH, *BATCH, *UPDATE, "step_end"]
VALIDATION = [
    "validation_start",
    *(["validation_batch_start", "validation_batch_end"] * 2),
    "validation_end",
]


def trainer(root: Any, calls: list[str], **options: Any) -> Any:
    return make(
        root,
        data=Loader(Noisy(), batch_size=2, drop_last=True),
        accumulate=2,
        every=None,
        validate=Validation(data=Loader(Noisy(), batch_size=5), every="2step"),
        callbacks=[recorder(calls)],
        **options,
    )


def test_the_order_of_a_whole_training(tmp_path: Path) -> None:
    """A5, A30, D54: every hook at its place, the save of a step after its validation and log."""
    calls: list[str] = []
    made = trainer(tmp_path, calls, log_every=3)
    assert calls == ["model_made", "setup"]
    made.fit(4)
    last = ["before_data", "step_start", *BATCH, *UPDATE, "step_end", "epoch_end"]
    assert calls[2:] == [
        *("before_load", "fit_start", "epoch_start"),
        *(*STEP,),
        *(*STEP, *VALIDATION, "log"),
        *(*last, "log"),
        "epoch_start",
        *(*STEP, *VALIDATION, "log"),
        *("before_save", "edit_save", "checkpoint_saved", "fit_end", "close"),
    ]


def test_the_order_of_a_resume_and_of_a_rerun(tmp_path: Path) -> None:
    """D25."""
    calls: list[str] = []
    trainer(tmp_path, []).fit(1)
    made = trainer(tmp_path, calls)
    made.fit(2)
    assert calls[:8] == [
        *("model_made", "setup", "before_load", "edit_load", "resumed"),
        *("fit_start", "checkpoint_loaded"),
        *STEP[:1],
    ]
    calls.clear()
    made.fit(2)
    assert calls == ["before_load", "edit_load", "resumed", "already_done", "close"]


def test_the_order_of_a_save_that_fails(tmp_path: Path) -> None:
    calls: list[str] = []
    fault = Fault(kind="fail", op="put", key="*/manifest.json", times=1)
    trainer(FaultyStore(MemoryStore(), [fault]), calls).fit(1)
    assert calls[-8:] == [
        *("before_save", "edit_save", "checkpoint_failed"),
        *("before_save", "edit_save", "checkpoint_saved"),
        *("fit_end", "close"),
    ]


def test_the_order_of_a_validation_alone(tmp_path: Path) -> None:
    calls: list[str] = []
    trainer(tmp_path, calls).validate()
    assert calls == ["model_made", "setup", *VALIDATION, "close"]


@pytest.mark.parametrize(
    "hook", [name for name in HOOKS if name not in ("exception", "model_made", "setup")]
)
def test_an_error_in_any_hook_ends_in_exception_and_close(hook: str) -> None:
    """K7: it names the hook, whichever it is, and everybody is told."""
    calls: list[str] = []

    class Fails(Callback):
        pass

    def fail(*arguments: Any) -> None:
        raise RuntimeError("mine")

    signature = inspect.signature(getattr(Callback, hook))
    fail.__signature__ = signature  # type: ignore[attr-defined]
    setattr(Fails, hook, fail)
    faults = [Fault(kind="fail", op="put", key="*/manifest.json", times=1)]
    store = FaultyStore(MemoryStore(), faults if hook == "checkpoint_failed" else [])

    class Tells(Callback):
        def step_end(self, training: Training, metrics: Metrics) -> None:
            table = Table(["word"], [["mine"]])
            training.log({"text": "mine", "table": table, "weights": torch.ones(3)})

    def short(*callbacks: Callback) -> Any:
        return make(
            store,
            data=Loader(Noisy(), batch_size=5),
            every=None,
            validate=Validation(
                data=Loader(Noisy(), batch_size=5),
                metrics={"matrix": Measured(lambda inputs: inputs[:2], lambda batch, _: batch)},
            ),
            callbacks=[*callbacks, Tells()],
        )

    if hook in ("edit_load", "resumed", "already_done", "checkpoint_loaded"):
        short().fit(3 if hook == "checkpoint_loaded" else 4)
    made = short(recorder(calls), Fails())

    def life() -> None:
        made.fit(4)
        made.test(Loader(Noisy(), batch_size=5))

    with pytest.raises(HookFailed, match=rf"Fails\.{hook} failed: RuntimeError\('mine'\)"):
        life()
    assert calls[-2:] == (["fit_end", "close"] if hook == "close" else ["exception", "close"])
    assert made.manager is None


def test_the_model_may_be_rebuilt_before_its_optimizer_is_made() -> None:
    """K6: what a callback puts into it is trained and averaged."""

    class Wider(Callback):
        def model_made(self, training: Training) -> None:
            training.model.append(nn.Linear(1, 1))  # type: ignore[operator]

    made = make(
        MemoryStore(),
        model=network,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        ema=0.5,
        callbacks=[Wider()],
    )
    before = made.model[3].weight.item()
    made.fit(1)
    assert made.model[3].weight.item() != before
    assert made.ema.model[3].weight.item() == pytest.approx(
        (before + made.model[3].weight.item()) / 2
    )


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python tests/train/hooks_page.py"


def test_a_callback_can_only_record_what_it_was_given() -> None:
    """D61: no callback is shared between trainers behind their backs."""
    calls: list[str] = []
    trainer(MemoryStore(), calls)

    class Other(Callback):
        def fit_start(self, training: Training) -> None:
            assert calls == ["model_made", "setup"]

    make(MemoryStore(), callbacks=[Other()]).fit(1)
    assert calls == ["model_made", "setup"]


def test_a_callback_that_leaves_the_model_in_eval_mode_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Looks(Callback):
        def step_end(self, training: Training, metrics: Any) -> None:
            training.model.eval()

    make(MemoryStore(), callbacks=[Looks()]).fit(3)
    (text,) = [one.getMessage() for one in caplog.records if "eval mode" in one.getMessage()]
    assert text.startswith("step 2 ")


class _Stepping(Callback):
    """A callback that steps the optimizer of the Trainer."""

    def after_backward(self, training: Training) -> None:
        training.optimizer.step()


def test_a_step_that_a_hook_or_a_loss_makes_is_refused() -> None:
    """It would be in the moments, and in no counter."""
    trainer = make(MemoryStore(), callbacks=[_Stepping()])
    with pytest.raises(HookFailed, match=r"_Stepping.after_backward.*AdamW.*Trainer steps"):
        trainer.fit(2)
    assert not trainer.optimizer.state, "nothing was stepped"

    def stepping(model: nn.Module, batch: Any) -> Any:
        other.optimizer.step()
        return model(batch).mean()

    other = make(MemoryStore(), loss=stepping)
    with pytest.raises(UsageError, match="Trainer steps"):
        other.fit(2)
    other.optimizer.step()  # outside of fit it belongs to the caller


class _Logging(Callback):
    """A callback that logs names which the Trainer logs, too."""

    def step_end(self, training: Training, metrics: Metrics) -> None:
        training.log({"loss": 7.0, "draw": 7.0, "mine": 7.0})


def test_a_metric_that_the_trainer_logs_as_well_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    make(MemoryStore(), callbacks=[_Logging()]).fit(3)
    texts = [text for one in caplog.records if "the Trainer logs" in (text := one.getMessage())]
    assert [("'loss'" in text, "'draw'" in text, "'mine'" in text) for text in texts] == [
        (True, True, False)
    ]


def test_a_loss_that_only_a_callback_logs_is_not_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An update function may give no metric of this name."""
    trainer = make(MemoryStore(), loss=None, update=_update, callbacks=[_Logging()])
    trainer.fit(3)
    assert "the Trainer logs" not in caplog.text


def _update(control: Any, batch: Any) -> dict[str, Any]:
    control.model(batch).mean().backward()
    control.step()
    return {"mean": 1.0}
