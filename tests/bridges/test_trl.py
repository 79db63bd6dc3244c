"""Trainers of TRL and of sentence-transformers with the mixin: kills, and each of their methods."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from bridges import forks
from bridges.frameworks import needed

transformers = needed("transformers")
import torch._dynamo  # noqa: E402 - the first optimizer imports it, once here for all forks

from bridges.test_transformers import Saying  # noqa: E402
from holdfast.bridges import transformers as bridge  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework, version by version
WORDS = [f"w{number}" for number in range(40)]
NAMES = ["<pad>", "<eos>", "<unk>", *WORDS]
ROWS = 22
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    """Import what all forks need once, and only in a process that runs these tests."""
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TRL_TELEMETRY="0")
    trl = needed("trl")
    for name in ("SFTTrainer", "DPOTrainer", "RewardTrainer", "GRPOTrainer"):
        getattr(trl, name)
    needed("sentence_transformers")


def say_text(number: int, length: int) -> str:
    return " ".join(WORDS[(number + place * (number % 3 + 1)) % 40] for place in range(length))


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = models.WordLevel({word: place for place, word in enumerate(NAMES)}, unk_token="<unk>")
    made = Tokenizer(words)
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def model(kind: str = "LlamaForCausalLM", **options: Any) -> Any:
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    given = {"vocab_size": len(NAMES), "num_attention_heads": 2, **SIZES, **special, **options}
    config = transformers.LlamaConfig(attention_dropout=0.1, **given)
    return getattr(transformers, kind)(config)


def rows(**columns: Callable[[int], Any]) -> Any:
    from datasets import Dataset

    return Dataset.from_dict(
        {name: [make(number) for number in range(ROWS)] for name, make in columns.items()}
    )


def adapted() -> Any:
    import peft

    return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)


def pairs(prompt: bool) -> Any:
    made = {"chosen": lambda n: say_text(n, 5), "rejected": lambda n: say_text(n + 2, 3 + n % 3)}
    return rows(**({"prompt": lambda n: say_text(n + 1, 4)} if prompt else {}), **made)


Parts = tuple[Any, Any, dict[str, Any]]
"""Classes of the trainer and of its arguments, and what the trainer gets."""


def of_trl(name: str, **named: Any) -> Parts:
    import trl

    own = {"processing_class": tokenizer(), **named}
    return getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config"), own


def sft() -> Parts:
    data = rows(text=lambda number: say_text(number, 3 + number % 5))
    return of_trl("SFT", model=model(), train_dataset=data)


def dpo(**options: Any) -> Parts:
    return of_trl("DPO", model=model(), train_dataset=pairs(prompt=True), **options)


def reward() -> Parts:
    scored = model("LlamaForSequenceClassification", num_labels=1)
    return of_trl("Reward", model=scored, train_dataset=pairs(prompt=False))


def score(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(one.split()))) for one in completions]


def grpo() -> Parts:
    data = rows(prompt=lambda number: say_text(number, 4))
    return of_trl("GRPO", model=model(), train_dataset=data, reward_funcs=score)


class TwoLosses(torch.nn.Module):
    """A loss of two parts, which the trainer of sentence-transformers logs by name."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Any, labels: Any) -> dict[str, torch.Tensor]:
        one, other = (self.model(one)["sentence_embedding"] for one in features)
        near = torch.nn.functional.cosine_similarity(one, other).mean()
        return {"near": 1 - near, "small": 0.1 * one.square().mean()}


def sentences() -> Parts:
    import sentence_transformers as library
    from datasets import DatasetDict
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    embedding = StaticEmbedding(tokenizer().backend_tokenizer, embedding_dim=8)
    encoder = library.SentenceTransformer(modules=[embedding], device="cpu")
    data = DatasetDict(
        first=rows(anchor=lambda n: say_text(n, 3), positive=lambda n: say_text(n + 1, 4)),
        second=rows(anchor=lambda n: say_text(n // 2, 2), positive=lambda n: say_text(n, 2)),
    )
    named = {"model": encoder, "train_dataset": data, "loss": TwoLosses(encoder)}
    kinds = library.SentenceTransformerTrainer, library.SentenceTransformerTrainingArguments
    return *kinds, named


KINDS: dict[str, tuple[Callable[[], Parts], dict[str, Any]]] = {
    "sft": (sft, {}),
    "dpo-lora": (lambda: dpo(peft_config=adapted()), {}),
    "dpo": (lambda: dpo(ref_model=model()), {"precompute_ref_log_probs": True}),
    "dpo-synced": (
        lambda: dpo(ref_model=model()),
        {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5},
    ),
    "reward": (reward, {}),
    "grpo": (
        grpo,
        {
            "num_generations": 2,
            "max_completion_length": 4,
            "steps_per_generation": 2,
            "num_iterations": 2,
            "beta": 0.0,
        },
    ),
    "sentences": (sentences, {"batch_sampler": "no_duplicates", "dataloader_drop_last": True}),
}
"""What each trainer is made of, and arguments of its own."""


def common(root: Path, **options: Any) -> dict[str, Any]:
    transformers.logging.set_verbosity_error()
    transformers.set_seed(1)
    given = {
        "output_dir": str(root),
        "max_steps": 8,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "logging_steps": 4,
        "learning_rate": 0.01,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "ddp_backend": "gloo" if torch.distributed.is_initialized() else None,
    }
    return {**given, **options}


def made(kind: str, root: Path, *, plain: bool = False, **options: Any) -> Any:
    """A trainer with the mixin, or `plain`."""
    parts, own = KINDS[kind]
    given = common(root, **own)
    named = {"callbacks": options.pop("callbacks", []), "model": options.pop("model", None)}
    checkpoints = holdfast.Checkpoints(root, every="3step", sinks=options.pop("sinks", ()))
    base, arguments, more = parts()
    if not plain:
        base = type(f"Ours{base.__name__}", (bridge.CheckpointedMixin, base), {})
        named["checkpoints"] = checkpoints
    named = {**more, **{name: value for name, value in named.items() if value is not None}}
    return base(args=arguments(**{**given, **options}), eval_dataset=head(more), **named)


def head(named: dict[str, Any]) -> Any:
    data = named["train_dataset"]
    return data.select(range(6)) if hasattr(data, "select") else {**data}["first"].select(range(6))


def measured(values: dict[str, Any]) -> dict[str, Any]:
    of_time = ("runtime", "per_second", "_time", "step_time")
    return {name: value for name, value in values.items() if not name.endswith(of_time)}


def outcome(one: Any) -> dict[str, Any]:
    reference = getattr(one, "ref_model", None)
    return {
        "weights": {name: value.clone() for name, value in one.model.state_dict().items()},
        "reference": {} if reference is None else dict(reference.state_dict()),
        "moments": one.optimizer.state_dict()["state"],
        "logs": [measured(entry) for entry in one.state.log_history],
        "generator": torch.get_rng_state(),
    }


def trained(kind: str, root: Path, say: forks.Say, **options: Any) -> dict[str, Any]:
    one = made(kind, root, callbacks=[Saying(say)], sinks=[say], **options)
    one.train()
    return outcome(one)


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "kind",
    ["sft", "dpo-lora", *(pytest.param(kind, marks=FULL) for kind in [*KINDS][2:])],
)
def test_a_killed_trainer_of_trl_ends_with_the_same_bits_and_logs(
    kind: str, tmp_path: Path
) -> None:
    """Invariant 7, R1: in the middle of an interval of logs, and of generated batches."""
    job = partial(trained, kind)
    assert forks.finish(job, tmp_path / "whole") == 0
    moments = forks.result(tmp_path / "whole")["moments"]
    code = forks.finish(job, tmp_path / "killed", kill_at=moments * 2 // 3)
    assert code == -signal.SIGKILL
    assert forks.finish(job, tmp_path / "killed") == 0
    found, expected = (forks.result(tmp_path / root) for root in ("killed", "whole"))
    assert found["moments"] < moments
    forks.assert_equal(found["found"], expected["found"])
