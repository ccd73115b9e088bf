"""All recipes of this library, by model class and model type: what `loadplan.compiler.registry` finds."""

from __future__ import annotations

from collections.abc import Mapping

from loadplan.compiler.registry import RecipeSource
from loadplan.recipes.audio import AUDIO
from loadplan.recipes.bert import BERT
from loadplan.recipes.decoders import DECODERS
from loadplan.recipes.deepseek import DEEPSEEK
from loadplan.recipes.detection import DETECTORS
from loadplan.recipes.drafts import DRAFTS
from loadplan.recipes.gemma import GEMMA
from loadplan.recipes.inkling import INKLING
from loadplan.recipes.legacy import LEGACY_NAMES
from loadplan.recipes.llama import DENSE
from loadplan.recipes.llava import LLAVA
from loadplan.recipes.moe import MOE
from loadplan.recipes.ocr import OCR
from loadplan.recipes.original_layouts import ORIGINAL_LAYOUTS
from loadplan.recipes.qwen import QWEN
from loadplan.recipes.sapiens import SAPIENS
from loadplan.recipes.text_encoders import TEXT_ENCODERS
from loadplan.recipes.two_towers import TWO_TOWERS
from loadplan.recipes.vision_language import VISION_LANGUAGE
from loadplan.recipes.vision_transformers import VISION_TRANSFORMERS

FAMILIES: tuple[Mapping[str, RecipeSource], ...] = (
    BERT,
    TEXT_ENCODERS,
    DENSE,
    DECODERS,
    MOE,
    DEEPSEEK,
    QWEN,
    GEMMA,
    VISION_TRANSFORMERS,
    DETECTORS,
    SAPIENS,
    TWO_TOWERS,
    LLAVA,
    VISION_LANGUAGE,
    ORIGINAL_LAYOUTS,
    OCR,
    AUDIO,
    INKLING,
    DRAFTS,
    LEGACY_NAMES,
)

RECIPES: Mapping[str, RecipeSource] = {name: recipe for family in FAMILIES for name, recipe in family.items()}
