"""A tower, a projector and a language model put together: LLaVA, its successors, and audio models of the same build.

Until 4.51 the parts stood side by side, and the language model brought its own `model.` and `lm_head`; now the parts
stand below one `model`, the language model bare. The class without a head (`LlavaModel`) drops that inner `model.`;
the type's rules move the parts. Facts: the rules that transformers 5.24 has registered for these names.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import RecipeSource
from loadplan.compiler.rules import PrefixChange
from loadplan.recipes.idioms import STALE_BUFFERS, Rules, alike, into_model, rename

_UNUSED = (*STALE_BUFFERS, "vision_model.embeddings.position_ids")  # of the language model, and of CLIP towers


def _parts(*modules: str) -> Recipe:
    return Recipe(into_model("language_model", *modules), may_be_unused=_UNUSED)


def _bare(language_model: str) -> Rules:
    """The language model without its inner `model.`."""
    return (PrefixChange(prefix_to_remove="model", model_prefix=language_model),)


LLAVA: Mapping[str, RecipeSource] = {
    **alike(
        Recipe(_bare("language_model"), may_be_unused=_UNUSED),
        "LlavaModel LlavaNextModel LlavaNextVideoModel LlavaOnevisionModel VideoLlavaModel VipLlavaModel AriaModel "
        "AyaVisionModel FuyuModel Gemma3Model GotOcr2Model InternVLModel Mistral3Model MllamaModel PaliGemmaModel "
        "AudioFlamingo3Model GlmAsrModel GraniteSpeechModel GraniteSpeechPlusModel MusicFlamingoModel Qwen2AudioModel "
        "VibeVoiceAsrModel VoxtralModel VoxtralRealtimeModel",
    ),
    **alike(
        _parts("vision_tower", "multi_modal_projector"),
        "llava aria aya_vision gemma3 got_ocr2 internvl mistral3 paligemma pp_chart2table vipllava",
    ),
    **alike(
        _parts("vision_tower", "multi_modal_projector", "image_newline"), "llava_next llava_next_video llava_onevision"
    ),
    "video_llava": _parts("image_tower", "video_tower", "multi_modal_projector"),
    "fuyu": _parts("vision_embed_tokens"),  # patches go through one matrix, there is no tower
    "mllama": _parts("vision_model", "multi_modal_projector"),
    **alike(
        _parts("audio_tower", "multi_modal_projector"),
        "qwen2_audio audioflamingo3 glmasr musicflamingo voxtral voxtral_realtime",
    ),
    **alike(_parts("encoder", "projector"), "granite_speech granite_speech_plus"),
    "vibevoice_asr": _parts("acoustic_tokenizer_encoder", "semantic_tokenizer_encoder", "multi_modal_projector"),
    # Emu 3 calls its language model `text_model`, and has an image tokenizer beside it.
    "Emu3Model": Recipe(_bare("text_model"), may_be_unused=_UNUSED),
    "emu3": Recipe(
        rename({"^text_model.lm_head": "lm_head", r"^(text_model|vqmodel)\b": r"model.\1"}), may_be_unused=_UNUSED
    ),
}
