"""What a loss may give, and what hooks get of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast.errors import UsageError
from holdfast.store.memory import MemoryStore
from holdfast.train import Callback, StepOutput, Training, Validation
from train.small import make
from train.step.test_step import update, weight


@dataclass
class ModelOutput:
    loss: Tensor
    logits: Tensor


def give(kind: str, model: nn.Module, batch: Tensor) -> Any:
    logits = model(batch)
    loss = logits.square().mean()
    return {
        "tensor": loss,
        "pair": (loss, {"size": 2.0}),
        "step output": StepOutput(loss, {"size": 2.0}, outputs=logits, weight=3),
        "object": ModelOutput(loss, logits),
        "mapping": {"loss": loss, "logits": logits},
    }[kind]


@pytest.mark.parametrize("kind", ["tensor", "pair", "step output", "object", "mapping"])
def test_a_loss_gives_what_it_has_and_hooks_get_all_of_it(kind: str) -> None:
    calls: list[tuple[str, Any, StepOutput]] = []

    class Watch(Callback):
        def after_forward(self, training: Training, batch: Any, outputs: StepOutput) -> None:
            calls.append(("forward", batch, outputs))

        def batch_end(self, training: Training, batch: Any, outputs: StepOutput) -> None:
            calls.append(("end", batch, outputs))

    batch = torch.ones(2, 3)
    made, plain = update(Watch(), loss=lambda *given: give(kind, *given)), update()
    metrics = made([batch])
    plain([batch])
    assert torch.equal(weight(made), weight(plain))
    (first, batch_1, output), (last, batch_2, again) = calls
    assert (first, last) == ("forward", "end")
    assert batch_1 is batch_2 is batch
    assert output is again
    assert float(output.loss.detach()) == metrics["loss"]
    assert dict(output.metrics) == ({"size": 2.0} if kind in ("pair", "step output") else {})
    expected = {"step output": Tensor, "object": ModelOutput, "mapping": dict}
    assert type(output.outputs) is expected.get(kind, type(None))


@pytest.mark.parametrize("result", [{"logits": 1}, None, (1, 2, 3), object(), {"loss": 1.0}])
def test_what_has_no_loss_is_refused(result: Any) -> None:
    with pytest.raises(UsageError, match="loss must give"):
        update(loss=lambda model, batch: result)([torch.ones(2, 3)])


def test_before_forward_changes_the_batch_that_the_loss_and_later_hooks_get() -> None:
    seen: list[Tensor] = []

    class Double(Callback):
        def before_forward(self, training: Training, batch: Tensor) -> Tensor:
            return batch * 2

    class Watch(Callback):
        def before_forward(self, training: Training, batch: Tensor) -> None:
            seen.append(batch)

        def batch_end(self, training: Training, batch: Tensor, outputs: StepOutput) -> None:
            seen.append(batch)

    made, plain = update(Double(), Double(), Watch()), update()
    made([torch.ones(2, 3)])
    plain([torch.full((2, 3), 4.0)])
    assert torch.equal(weight(made), weight(plain))
    assert [tensor.unique().tolist() for tensor in seen] == [[4.0], [4.0]]


def test_a_hook_with_the_signature_of_before_is_refused_with_that_of_now() -> None:
    class Old(Callback):
        def after_forward(self, training: Training, loss: Tensor) -> None:  # type: ignore[override]
            pass

        def batch_end(self, training: Training, batch: Any) -> None:  # type: ignore[override]
            pass

        def validation_batch_end(self, training: Training, batch: Any) -> None:  # type: ignore[override]
            pass

    with pytest.raises(UsageError) as raised:
        make(MemoryStore(), callbacks=[Old()])
    for hook in ("after_forward", "batch_end", "validation_batch_end"):
        assert f"Old.{hook}: must take (self, training, batch, outputs)" in str(raised.value)


def test_hooks_of_a_validation_get_the_outputs() -> None:
    seen: list[Any] = []

    class Watch(Callback):
        def validation_batch_end(self, training: Training, batch: Any, outputs: StepOutput) -> None:
            seen.append((len(batch), outputs.outputs.shape))

    def loss(model: nn.Module, batch: Tensor) -> StepOutput:
        logits = model(batch)
        return StepOutput(logits.mean(), outputs=logits)

    data = [torch.ones(2, 4), torch.ones(3, 4)]
    validation = Validation(data=data)
    make(MemoryStore(), loss=loss, validate=validation, callbacks=[Watch()]).validate()
    assert seen == [(2, (2, 1)), (3, (3, 1))]
