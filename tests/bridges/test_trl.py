"""Trainers of TRL and of sentence-transformers with the mixin: kills, and each of their methods."""

from __future__ import annotations

import inspect
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import holdfast
from bridges import forks
from bridges.frameworks import needed, say_accelerator

transformers = needed("transformers")
import torch._dynamo  # noqa: E402 - the first optimizer imports it, once here for all forks

from bridges.test_fsdp2 import whole  # noqa: E402
from bridges.test_transformers import REPLACED, Saying, names_of  # noqa: E402
from holdfast.bridges import transformers as bridge  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the framework, version by version
WORDS = [f"w{number}" for number in range(40)]
NAMES = ["<pad>", "<eos>", "<unk>", *WORDS]
ROWS = 22
FSDP2 = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    "activation_checkpointing": True,
}
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


def orpo() -> Parts:
    from trl.experimental import orpo as library

    given = {"processing_class": tokenizer(), "train_dataset": pairs(prompt=True)}
    return library.ORPOTrainer, library.ORPOConfig, {"model": model(), **given}


def seq2seq() -> Parts:
    data = rows(input_ids=lambda n: [3 + (n + k) % 40 for k in range(6)])
    labeled = data.add_column("labels", data["input_ids"])
    kinds = transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments
    return *kinds, {"model": model(), "train_dataset": labeled}


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
    "orpo": (orpo, {}),
    "seq2seq": (seq2seq, {}),
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
    if options.get("fsdp"):
        given["fsdp_config"] = dict(FSDP2)
    named = {"callbacks": options.pop("callbacks", []), "model": options.pop("model", None)}
    checkpoints = holdfast.Checkpoints(root, every="3step", sinks=options.pop("sinks", ()))
    base, arguments, more = parts()
    if not plain:
        base = type(f"Ours{base.__name__}", (bridge.CheckpointedMixin, base), {})
        named["checkpoints"] = checkpoints
    named = {**more, **{name: value for name, value in named.items() if value is not None}}
    args = arguments(**{**given, **options})
    if args.fsdp:
        say_accelerator()
    return base(args=args, eval_dataset=head(more), **named)


def head(named: dict[str, Any]) -> Any:
    data = named["train_dataset"]
    return data.select(range(6)) if hasattr(data, "select") else {**data}["first"].select(range(6))


def measured(values: dict[str, Any]) -> dict[str, Any]:
    of_time = ("runtime", "per_second", "_time", "step_time")
    return {name: value for name, value in values.items() if not name.endswith(of_time)}


def outcome(one: Any) -> dict[str, Any]:
    reference = getattr(one, "ref_model", None)
    return {
        "weights": whole(one.model.state_dict()),
        "reference": {} if reference is None else dict(reference.state_dict()),
        "moments": whole(one.optimizer.state_dict()["state"]),
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
    ["dpo-lora", *(pytest.param(kind, marks=FULL) for kind in KINDS if kind != "dpo-lora")],
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


SEVERAL = {
    "sft": {},
    "dpo-lora": {},
    "sft sharded": {"fsdp": True},
    "dpo-lora sharded": {"fsdp": True},
}
"""Trainings on two ranks, with DDP or FSDP2: the name of a kind first, and options."""


def on_ranks(name: str, root: Path, say: forks.Say) -> dict[str, Any]:
    return trained(name.split()[0], root, say, **SEVERAL[name])


@pytest.mark.full
@pytest.mark.parametrize("name", SEVERAL)
def test_a_killed_trainer_of_trl_on_two_ranks_ends_with_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    job = partial(on_ranks, name)
    assert forks.finish_ranks(job, tmp_path / "whole", 2) == [0, 0]
    moments = forks.result(tmp_path / "whole", 1)["moments"]
    kill = forks.Kill(rank=1, moment=moments * 2 // 3, is_of_all=False)
    codes = forks.finish_ranks(job, tmp_path / "killed", 2, kill=kill)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] != 0
    assert forks.finish_ranks(job, tmp_path / "killed", 2) == [0, 0]
    for rank in range(2):
        found, expected = (forks.result(tmp_path / root, rank) for root in ("killed", "whole"))
        assert found["moments"] < moments
        forks.assert_equal(found["found"], expected["found"], f"rank {rank}")


@pytest.mark.long
@pytest.mark.parametrize("name", SEVERAL)
def test_kills_of_one_or_all_ranks_of_trl_change_nothing(name: str, tmp_path: Path) -> None:
    job = partial(on_ranks, name)
    forks.assert_kills_of_ranks_change_nothing(job, tmp_path, 2, kills=5, seed=5)


def batch_of(one: Any) -> Any:
    return one._prepare_inputs(next(iter(one.get_eval_dataloader())))


def optimizers_of(one: Any) -> list[str]:
    one.optimizer = one.lr_scheduler = None
    one.create_optimizer_and_scheduler(3)
    return [type(one.optimizer).__name__, type(one.lr_scheduler).__name__]


def files_of(one: Any, name: str, *words: Any) -> list[str]:
    getattr(one, name)(*words)
    return sorted(path.name for path in Path(one.args.output_dir).iterdir() if path.is_file())


def weights_of(one: Any) -> dict[str, Any]:
    folder = Path(one.args.output_dir) / "saved"
    one.save_model(str(folder))
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    weights = [path for path in files if path.suffix == ".safetensors"]
    found = {str(path): safetensors.torch.load_file(folder / path) for path in weights}
    return {**found, "names": [*map(str, files)]}


def with_callback(one: Any) -> list[str]:
    one.add_callback(transformers.EarlyStoppingCallback)
    taken = type(one.pop_callback(transformers.EarlyStoppingCallback)).__name__
    one.add_callback(transformers.EarlyStoppingCallback())
    one.remove_callback(transformers.EarlyStoppingCallback)
    kinds = [type(each) for each in one.callback_handler.callbacks]
    return [taken, *(one.__name__ for one in kinds if "holdfast" not in one.__module__)]


def logged(one: Any) -> dict[str, Any]:
    one.log({"own": 1.0})
    return measured(one.state.log_history[-1])


CALLS: dict[str, Callable[[Any], Any]] = {
    "add_callback": with_callback,
    "autocast_smart_context_manager": lambda one: type(one.autocast_smart_context_manager()),
    "call_model_init": lambda one: one.call_model_init(),
    "compute_loss": lambda one: one.compute_loss(one.model, batch_of(one)),
    "compute_loss_context_manager": lambda one: type(one.compute_loss_context_manager()),
    "create_model_card": lambda one: files_of(one, "create_model_card"),
    "create_optimizer_and_scheduler": optimizers_of,
    "evaluate": lambda one: measured(one.evaluate()),
    "evaluation_loop": lambda one: measured(
        one.evaluation_loop(one.get_eval_dataloader(), "here", prediction_loss_only=True).metrics
    ),
    "floating_point_ops": lambda one: one.floating_point_ops(batch_of(one)),
    "get_batch_samples": lambda one: len(
        one.get_batch_samples(iter(one.get_train_dataloader()), 2, one.args.device)[0]
    ),
    "get_decay_parameter_names": lambda one: one.get_decay_parameter_names(one.model),
    "get_learning_rates": lambda one: one.get_learning_rates(),
    "get_num_trainable_parameters": lambda one: one.get_num_trainable_parameters(),
    "get_optimizer_cls_and_kwargs": lambda one: one.get_optimizer_cls_and_kwargs(one.args)[1],
    "get_optimizer_group": lambda one: len(one.get_optimizer_group()),
    "get_test_dataloader": lambda one: len(one.get_test_dataloader(one.eval_dataset)),
    "get_total_train_batch_size": lambda one: one.get_total_train_batch_size(one.args),
    "get_train_dataloader": lambda one: len(one.get_train_dataloader()),
    "hyperparameter_search": lambda one: one.hyperparameter_search(n_trials=1),
    "init_hf_repo": lambda one: one.init_hf_repo(),
    "is_local_process_zero": lambda one: one.is_local_process_zero(),
    "is_world_process_zero": lambda one: one.is_world_process_zero(),
    "log": logged,
    "log_metrics": lambda one: one.log_metrics("eval", {"own": 1.0}),
    "metrics_format": lambda one: one.metrics_format({"own": 1.0}),
    "num_examples": lambda one: one.num_examples(one.get_eval_dataloader()),
    "predict": lambda one: measured(one.predict(one.eval_dataset).metrics),
    "prediction_step": lambda one: one.prediction_step(one.model, batch_of(one), True)[0],
    "push_to_hub": lambda one: one.push_to_hub(),
    "save_metrics": lambda one: files_of(one, "save_metrics", "eval", {"own": 1.0}),
    "save_model": weights_of,
    "save_state": lambda one: files_of(one, "save_state"),
    "set_initial_training_values": lambda one: one.set_initial_training_values(
        one.args, one.get_train_dataloader()
    ),
    "store_flos": lambda one: one.store_flos(),
    "training_step": lambda one: one.training_step(one.model, batch_of(one), 1),
}
"""Public methods of the Trainer, and what they return or leave."""
OF_THE_SAME_CALL = {
    *("create_optimizer", "create_scheduler", "get_eval_dataloader", "pop_callback"),
    "remove_callback",
}
OF_THE_START = {"create_accelerator_and_postprocess", "train"}


def outcome_of(one: Any, name: str) -> Any:
    transformers.set_seed(2)
    try:
        return CALLS[name](one)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def called(kind: str, root: Path, say: forks.Say) -> dict[str, Any]:
    """Call each method after a training, with the mixin and without it, of the same weights."""
    import huggingface_hub

    huggingface_hub.constants.HF_HUB_OFFLINE = True
    found, states = dict[str, Any](), list[Any]()
    for name, plain in (("ours", False), ("theirs", True)):
        one = made(kind, root / name / "out", plain=plain, max_steps=2)
        one.train()
        trained = [one.model, getattr(one, "ref_model", None)]
        if plain:  # its batches came in another order
            for module, weights in zip(trained, states, strict=True):
                if module is not None:
                    module.load_state_dict(weights)
        states = [None if module is None else whole(module.state_dict()) for module in trained]
        one._total_train_tokens = 0
        found[f"names of {name}"] = names_of(one)
        found[name] = {call: outcome_of(one, call) for call in CALLS if hasattr(one, call)}
    return found


@pytest.mark.parametrize(
    "kind",
    ["sft", *(pytest.param(kind, marks=FULL) for kind in [*KINDS][1:])],
)
def test_every_method_does_after_a_training_what_it_does_without_the_mixin(
    kind: str, tmp_path: Path
) -> None:
    """Up to the request to the hub, which is offline here."""
    assert forks.finish(partial(called, kind), tmp_path / "run") == 0
    found = forks.result(tmp_path / "run")["found"]
    forks.assert_equal(found["ours"], found["theirs"])
    assert "offline" in found["ours"]["push_to_hub"].lower()
    assert "holdfast" not in str(found["ours"])
    more = {
        name for name in found["names of ours"] - found["names of theirs"] if "holdfast" not in name
    }
    assert more <= {"checkpoints", "manager"} | REPLACED


def test_every_method_of_the_trainer_is_called_above() -> None:
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("the names are those of newer versions")
    base = transformers.Trainer
    public = {name for name in dir(base) if name[0] != "_" and callable(getattr(base, name))}
    sizes = {name for name in public if name.startswith("get_") and name.endswith("p_size")}
    assert public - sizes - OF_THE_SAME_CALL - OF_THE_START - {"end"} <= CALLS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_mixin_shadows_takes_the_arguments_of_the_trainer(kind: str) -> None:
    base = KINDS[kind][0]()[0]
    for name in sorted(vars(bridge.CheckpointedMixin).keys() & names_of(base)):
        if name.startswith("__") and name != "__init__":
            continue
        assert name in REPLACED
        given = [one for one in inspect.signature(getattr(base, name)).parameters if one[0] != "*"]
        more = {"checkpoints": None} if name == "__init__" else {}
        ours = inspect.signature(vars(bridge.CheckpointedMixin)[name])
        ours.bind(*given, **more)
        ours.bind(given[0], **dict.fromkeys(given[1:]), **more)
