"""Names of weights that share a tensor with another name, by the architecture in a model's config.

`save_pretrained` writes a shared tensor once; the class of the model has the other names. The table
is that of transformers 5.23 for its common classes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_OUTPUT = "lm_head.weight"
_DECODERS = (
    *("model.embed_tokens.weight", "model.language_model.embed_tokens.weight"),
    *("transformer.wte.weight", "transformer.word_embeddings.weight", "backbone.embeddings.weight"),
    *("model.decoder.embed_tokens.weight", "model.text_model.embed_tokens.weight"),
)
_Ties = Mapping[str, tuple[str, ...]]
_T5: _Ties = {
    "encoder.embed_tokens.weight": ("shared.weight",),
    "decoder.embed_tokens.weight": ("shared.weight",),
    _OUTPUT: ("shared.weight",),
}
_BART: _Ties = {
    "model.encoder.embed_tokens.weight": ("model.shared.weight",),
    "model.decoder.embed_tokens.weight": ("model.shared.weight",),
    _OUTPUT: ("model.shared.weight",),
}
_BERT: _Ties = {
    "cls.predictions.decoder.weight": ("bert.embeddings.word_embeddings.weight",),
    "cls.predictions.decoder.bias": ("cls.predictions.bias",),
}
_ROBERTA: _Ties = {
    "lm_head.decoder.weight": ("roberta.embeddings.word_embeddings.weight",),
    "lm_head.decoder.bias": ("lm_head.bias",),
}
_BY_ENDING: Mapping[str, _Ties] = {
    "WhisperForConditionalGeneration": {"proj_out.weight": ("model.decoder.embed_tokens.weight",)},
    "T5ForConditionalGeneration": _T5,
    "BartForConditionalGeneration": _BART,
    "BertForMaskedLM": _BERT,
    "BertForPreTraining": _BERT,
    "RobertaForMaskedLM": _ROBERTA,
    "ForConditionalGeneration": {_OUTPUT: ("model.language_model.embed_tokens.weight",)},
    "ForCausalLM": {_OUTPUT: _DECODERS},
    "LMHeadModel": {_OUTPUT: _DECODERS},
}


def tied_names(config: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Return names that a model has, and no file: name -> the name whose tensor it shares.

    None if the config says that nothing is tied, or names an architecture that is not known here.
    """
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or config.get("tie_word_embeddings") is False:
        return {}
    for architecture in architectures[:1]:
        for ending, ties in _BY_ENDING.items():
            if isinstance(architecture, str) and architecture.endswith(ending):
                return _present(ties, names)
    return {}


def _present(ties: _Ties, names: Collection[str]) -> dict[str, str]:
    found = {}
    for name, others in ties.items():
        other = next((other for other in others if other in names), None)
        if other is not None and name not in names:
            found[name] = other
    return found
