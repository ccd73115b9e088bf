"""Speech and sound: codecs, recognisers, synthesis; most were published in the layout of the trainer they come from.

Mimi's codec and Kyutai's descendants were trained with audiocraft and moshi, Cohere's and NVIDIA's recognisers with
NeMo. Audio models of LLaVA's build are in `llava.py`. Facts: the rules that transformers 5.24 has registered.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadplan.compiler.ops import Chunk, PermuteForRope, Transpose
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import RecipeSource
from loadplan.compiler.rules import WeightConverter
from loadplan.recipes.idioms import QKV, cut_qkv, inside, rename

# One file serves the codec and each of its halves, whose convolutions (SEANet) stood at the top.
_MIMI = rename(
    {
        **inside(
            "^",
            "encoder.",
            {
                r"encoder\.layers\.": "encoder.layers.",
                r"encoder_transformer\.": "encoder_transformer.",
                r"downsample\.": "downsample.",
            },
        ),
        **inside(
            "^",
            "decoder.",
            {
                r"upsample\.": "upsample.",
                r"decoder_transformer\.": "decoder_transformer.",
                r"decoder\.layers\.": "decoder.layers.",
            },
        ),
    }
)

# NeMo's Conformer in front of a decoder whose layers number their sub-layers and norms.
_COHERE_ASR = rename(
    {
        r"encoder\.pre_encode\.conv\.": "encoder.subsampling.layers.",
        r"encoder\.pre_encode\.out\.": "encoder.subsampling.linear.",
        **inside(
            r"transf_decoder\.",
            "decoder.",
            {
                r"_embedding\.position_embedding\.pos_enc": "pos_emb.weight",
                r"_embedding\.token_embedding\.": "embed_tokens.",
                r"_embedding\.layer_norm\.": "embedding_layernorm.",
                r"_decoder\.final_layer_norm\.": "norm.",
                r"_decoder\.layers\.": "layers.",
            },
        ),
        r"encoder_decoder_proj\.": "decoder.proj.",
        r"\.self_attn\.linear_([qkv])\.": r".self_attn.\1_proj.",
        r"\.self_attn\.linear_out\.": ".self_attn.o_proj.",
        r"\.self_attn\.linear_pos\.": ".self_attn.relative_k_proj.",
        r"\.self_attn\.pos_bias_([uv])\b": r".self_attn.bias_\1",
        **{
            rf"\.{sub_layer}_sub_layer\.{old}\.": f".{attention}.{new}."
            for sub_layer, attention in (("first", "self_attn"), ("second", "encoder_attn"))
            for old, new in {
                "query_net": "q_proj",
                "key_net": "k_proj",
                "value_net": "v_proj",
                "out_projection": "o_proj",
            }.items()
        },
        r"\.third_sub_layer\.dense_in\.": ".mlp.fc1.",
        r"\.third_sub_layer\.dense_out\.": ".mlp.fc2.",
        r"\.layer_norm_1\.": ".input_layernorm.",
        r"\.layer_norm_2\.": ".post_attention_layernorm.",
        r"\.layer_norm_3\.": ".final_layernorm.",
        r"\.conv\.batch_norm\.": ".conv.norm.",
        r"log_softmax\.mlp\.layer0\.": "proj_out.",
    }
)

# A language model over continuous latents (`flow_lm`), and a flow head that draws the next one.
_GRADIUM = (
    *rename(
        {
            **inside(
                r"^flow_lm\.condition_provider\.conditioners\.",
                "model.",
                {
                    r"transcript_in_segment\.embed\.": "embed_tokens.",
                    r"speaker_wavs\.output_proj\.": "audio_prompt_proj.",
                    r"num_speakers\.embed\.": "num_speakers_embed.",
                    r"num_speakers\.output_proj\.": "num_speakers_proj.",
                    r"duration_delta\.output_proj\.": "duration_delta_proj.",
                },
            ),
            **inside(
                r"^flow_lm\.",
                "",
                {
                    r"input_linear\.": "model.audio_latent_proj.",
                    "bos_emb": "model.bos_latent",
                    "emb_mean": "latent_mean",
                    "emb_std": "latent_std",
                    r"out_norm\.": "model.norm.",
                    r"out_eos\.": "eos_head.",
                },
            ),
            **inside(
                r"^flow_lm\.transformer\.layers\.(\d+)\.",
                r"model.layers.\1.",
                {
                    r"self_attn\.in_proj\.": "self_attn.in_proj.",
                    r"self_attn\.out_proj\.": "self_attn.o_proj.",
                    r"linear([12])\.": r"mlp.fc\2.",
                    r"norm1\.": "input_layernorm.",
                    r"norm2\.": "post_attention_layernorm.",
                },
            ),
            **inside(
                r"^flow_lm\.flow_net\.time_embed\.(\d+)\.",
                r"flow_head.timestep_embeddings.\1.",
                {
                    "freqs": "freqs",
                    r"mlp\.0\.": "fc1.",
                    r"mlp\.2\.": "fc2.",
                    r"mlp\.3\.alpha": "norm.weight",
                },
            ),
            **inside(
                r"^flow_lm\.flow_net\.res_blocks\.(\d+)\.",
                r"flow_head.layers.\1.",
                {
                    r"in_ln\.": "norm.",
                    r"mlp\.0\.": "fc1.",
                    r"mlp\.2\.": "fc2.",
                    r"adaLN_modulation\.1\.": "adaln_proj.",
                },
            ),
            **inside(
                r"^flow_lm\.flow_net\.",
                "flow_head.",
                {
                    r"cond_embed\.": "cond_proj.",
                    r"input_proj\.": "input_proj.",
                    r"final_layer\.linear\.": "final_layer.proj.",
                    r"final_layer\.adaLN_modulation\.1\.": "final_layer.adaln_proj.",
                },
            ),
        }
    ),
    WeightConverter(
        "self_attn.in_proj.weight",
        [f"self_attn.{part}.weight" for part in QKV],
        [Chunk(0), PermuteForRope(permute_layer_names=("q_proj", "k_proj"))],
    ),
)

# Canary-style perception with a diarization model inside, Nemotron-H behind it; experts' matrices are transposed.
_DIARIZATION = "model.audio_tower.diarization_model."
_NEMO = (
    *rename(
        {
            **inside(
                r"^perception\.encoder\.diarization_model\.",
                _DIARIZATION,
                {
                    r"encoder\.": "model.audio_tower.",
                    r"sortformer_modules\.encoder_proj\.": "model.proj.",
                    r"sortformer_modules\.subpixel_upsample\.": "model.upsampler.conv.",
                    r"sortformer_modules\.first_hidden_to_hidden\.": "classifier.dense.",
                    r"sortformer_modules\.single_hidden_to_spks\.": "classifier.out_proj.",
                    r"sortformer_modules\.learnable_sil_emb": "silence_embeds",
                },
            ),
            r"^perception\.encoder\.(asr_encoder|asr_norm)\.": r"model.audio_tower.\1.",
            r"^perception\.encoder\.diar_norm\.": "model.audio_tower.speaker_norm.",
            r"^perception\.proj\.": "model.multi_modal_projector.",
            **inside(
                r"^ctc_timestamp\.decoder\.",
                "",
                {
                    r"transformer\.": "model.word_timestamp_encoder.",
                    r"upsample\.": "model.word_timestamp_encoder.upsampler.",
                    r"decoder_layers\.0\.": "word_timestamp_head.",
                },
            ),
            r"^llm\.model\.embed_tokens\.": "model.language_model.embeddings.",
            r"^llm\.model\.norm\.": "model.language_model.norm_f.",
            r"^llm\.model\.layers\.": "model.language_model.layers.",
            r"^llm\.lm_head\.": "lm_head.",
            r"\.pre_encode\.proj\.": ".embedder.projection.",
            r"\.embed_norm\.": ".input_layer_norm.",
            r"\.final_norm\.": ".layer_norm.",
            r"\.norm([12])\.": r".layer_norm\1.",
            r"\.attn\.out_proj\.": ".self_attn.o_proj.",
            r"\.attn\.([qk])_norm\.": r".self_attn.\1_norm.",
            r"\.ffn\.net\.0\.": ".mlp.fc1.",
            r"\.ffn\.net\.3\.": ".mlp.fc2.",
            r"\.mixer\._fp32_params\.": ".mixer.",
        }
    ),
    cut_qkv("attn.w_qkv", "self_attn"),
    WeightConverter("mixer.experts.gate_and_up_projs", "mixer.experts.up_proj", [Transpose(1, 2)]),
    WeightConverter("mixer.experts.down_projs", "mixer.experts.down_proj", [Transpose(1, 2)]),
)

AUDIO: Mapping[str, RecipeSource] = {
    "MimiModel": Recipe(_MIMI),
    "MimiEncoderModel": Recipe(rename({r"^encoder\.layers\.": "encoder_seanet.layers."})),
    "MimiDecoderModel": Recipe(rename({r"^decoder\.layers\.": "decoder_seanet.layers."})),
    "cohere_asr": Recipe(_COHERE_ASR, may_be_unused=("preprocessor.featurizer",)),
    "gradium_phonon_tts": Recipe(_GRADIUM, may_be_unused=("mimi", "flow_lm.flow.w_s_t", "learnt_padding")),
    "nemo_speechlm": Recipe(_NEMO),
}
