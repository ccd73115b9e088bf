"""`load_model` beside `from_pretrained`: the same model, tensor by tensor, in what it computes, and when it is saved.

`tests/oracle` compares all types of models that transformers converts; here a few are run, generated with and trained.
"""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from builders import TINY_DECODER, bytes_of, raw, save_tiny, write_file
from oracle.check_oracle import differences
from safetensors.torch import load_file, save_file
from saving import files_in
from torch import nn

from loadplan.compiler import Signature, Target, compile_plan, convert
from loadplan.compiler.ops import Concatenate
from loadplan.recipes import Recipe, WeightConverter
from loadplan.runtime import (
    ArgumentError,
    Artifact,
    ModelError,
    ModuleMismatch,
    Plan,
    SaveError,
    TieConflict,
    find_fusions,
    fuse_modules,
    load_model,
    load_state_dict,
    wait_for,
)
from loadplan.runtime.plan import ModelRecord

TOKENS = torch.arange(12)[None] * 7 % 50


@dataclass(frozen=True)
class Kind:
    """A tiny model: its class, its config, its dtype, and what it is run on."""

    model_class: str
    config: Mapping[str, object]
    inputs: Mapping[str, torch.Tensor]
    dtype: str = "float32"


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
TEXT = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION = {**TEXT, "image_size": 16, "patch_size": 8}
KINDS = {
    "llama": Kind("LlamaForCausalLM", TINY_DECODER, {"input_ids": TOKENS}, "bfloat16"),
    "llama_tied": Kind("LlamaForCausalLM", {**TINY_DECODER, "tie_word_embeddings": True}, {"input_ids": TOKENS}),
    "qwen3_moe": Kind("Qwen3MoeForCausalLM", {**TINY_DECODER, **EXPERTS}, {"input_ids": TOKENS}, "bfloat16"),
    "mixtral": Kind("MixtralForCausalLM", {**TINY_DECODER, "num_local_experts": 3}, {"input_ids": TOKENS}),
    "bert": Kind("BertForMaskedLM", {**TEXT, "vocab_size": 60}, {"input_ids": TOKENS}),
    "whisper": Kind(
        "WhisperForConditionalGeneration",
        {
            "vocab_size": 64,
            "d_model": 16,
            "num_mel_bins": 8,
            "max_source_positions": 8,
            "max_target_positions": 24,
            **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
            **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32),
            "decoder_start_token_id": 1,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        {"input_features": torch.linspace(-1, 1, 8 * 16).reshape(1, 8, 16), "decoder_input_ids": TOKENS},
    ),
    "clip": Kind(  # buffers that are no part of the checkpoint
        "CLIPModel",
        {"text_config": {**TEXT, "vocab_size": 60, "eos_token_id": 2}, "vision_config": VISION, "projection_dim": 20},
        {"input_ids": TOKENS, "pixel_values": torch.linspace(-1, 1, 3 * 16 * 16).reshape(1, 3, 16, 16)},
    ),
}
GENERATING = ("llama", "llama_tied", "qwen3_moe", "mixtral")


@dataclass(frozen=True)
class Made:
    """A checkpoint of a kind, the plan and the artifact of it."""

    kind: Kind
    folder: Path
    plan: Plan
    artifact: Artifact

    @property
    def theirs(self) -> Any:
        found = getattr(transformers, self.kind.model_class)
        return found.from_pretrained(self.folder, dtype="auto")


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    made: dict[str, Made] = {}

    def get(name: str) -> Made:
        if name not in made:
            kind, folder = KINDS[name], tmp_path_factory.mktemp(name)
            save_tiny(folder / "model", kind.model_class, kind.config, kind.dtype, max_shard_size="20KB")
            if name in GENERATING:
                settings = {"max_new_tokens": 7, "eos_token_id": 59, "repetition_penalty": 1.3}
                (folder / "model/generation_config.json").write_text(json.dumps(settings))
            plan = compile_plan(folder / "model")
            made[name] = Made(kind, folder / "model", plan, convert(plan, folder / "model", folder / "converted"))
        return made[name]

    return get


def outputs(model: Any, kind: Kind) -> list[bytes]:
    """All tensors that the model computes, as bytes.

    A copy of the model computes them: its weights lie where torch puts them. Mapped ones may lie at other multiples of
    their element size, and kernels that take another path then differ in the last bit; here they must be near.
    """
    with torch.no_grad():
        near, found = model(**kind.inputs), copy.deepcopy(model)(**kind.inputs)
    for one, other in zip(near.to_tuple(), found.to_tuple(), strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other)
    return [bytes_of(tensor) for tensor in found.to_tuple() if isinstance(tensor, torch.Tensor)]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("source", ["files", "artifact"])
@pytest.mark.parametrize("name", KINDS)
def test_is_the_model_of_from_pretrained(make: Callable[[str], Made], name: str, source: str, wait: bool) -> None:
    made = make(name)
    theirs = made.theirs
    if source == "files":
        ours: Any = load_model(made.plan, made.folder, wait=wait)
    else:
        ours = load_model(made.artifact, wait=wait)
        theirs.config.name_or_path = theirs.name_or_path = str(made.artifact.folder)
    wanted = outputs(theirs, made.kind)
    assert wanted and outputs(ours, made.kind) == wanted
    assert list(differences(theirs, ours)) == []
    assert all(type(module._parameters) is type(module._buffers) is dict for module in ours.modules())


@pytest.mark.parametrize("name", GENERATING)
def test_generates_alike(make: Callable[[str], Made], name: str) -> None:
    made = make(name)
    ours: Any = load_model(made.plan, made.folder, wait=False)
    theirs = made.theirs
    assert ours.generation_config.max_new_tokens == 7
    tokens = ours.generate(TOKENS)
    assert torch.equal(tokens, theirs.generate(TOKENS)) and tokens.shape[1] > TOKENS.shape[1]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("name", ["qwen3_moe", "bert", "llama_tied"])
def test_saved_models_are_read_by_transformers(
    make: Callable[[str], Made], name: str, wait: bool, tmp_path: Path
) -> None:
    """In the checkpoint's own names: transformers reads its own layout, experts one by one."""
    made = make(name)
    model: Any = load_model(made.artifact, wait=wait)
    model.save_pretrained(tmp_path)
    again = getattr(transformers, made.kind.model_class).from_pretrained(tmp_path, dtype="auto")
    assert outputs(again, made.kind) == outputs(made.theirs, made.kind)
    assert load_file(tmp_path / "model.safetensors").keys() == {source.name for source in made.plan.origin.sources}  # type: ignore[union-attr]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_models_of_their_own(
    make: Callable[[str], Made], duplicate: Callable[[Any], Any], wait: bool, tmp_path: Path
) -> None:
    made = make("llama_tied")
    model = load_model(made.plan, made.folder, wait=wait)
    copied = duplicate(model)
    theirs = made.theirs
    assert list(differences(theirs, copied)) == []
    with torch.no_grad():
        model.get_parameter("model.norm.weight").fill_(3)
    assert outputs(copied, made.kind) == outputs(theirs, made.kind) != outputs(model, made.kind)


def test_trains(make: Callable[[str], Made]) -> None:
    made = make("llama_tied")
    losses = []
    for model in (made.theirs, load_model(made.artifact, wait=False)):
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        losses.append([bytes_of(loss), *(bytes_of(parameter) for parameter in model.parameters())])
    assert losses[0] == losses[1]
    assert outputs(load_model(made.artifact), made.kind) == outputs(made.theirs, made.kind), (
        "the files are as they were"
    )


@pytest.mark.parametrize("wait", [True, False])
def test_moves_as_a_whole(make: Callable[[str], Made], wait: bool) -> None:
    made = make("llama")
    ours = load_model(made.plan, made.folder, wait=wait).to(torch.float64)
    assert outputs(ours, made.kind) == outputs(made.theirs.to(torch.float64), made.kind)
    assert {tensor.dtype for tensor in ours.state_dict().values()} == {torch.float64}


@pytest.mark.parametrize("wait", [True, False])
def test_another_dtype(make: Callable[[str], Made], wait: bool) -> None:
    made = make("llama")
    plan = compile_plan(made.folder, target=Target(dtype="F32"))
    theirs = transformers.LlamaForCausalLM.from_pretrained(made.folder, dtype=torch.float32)
    assert list(differences(theirs, load_model(plan, made.folder, wait=wait))) == []


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("equal", [True, False])
def test_ties_that_the_checkpoint_does_not_keep(
    make: Callable[[str], Made], tmp_path: Path, equal: bool, wait: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Both matrices are stored: they are one only if they are equal, and the model remembers it when it is saved."""
    made = make("llama_tied")
    folder = tmp_path / "both"
    tensors = {n: t for path in made.folder.glob("*.safetensors") for n, t in load_file(path).items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (0 if equal else 1)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_bytes((made.folder / "config.json").read_bytes())
    ours: Any = load_model(compile_plan(folder), folder, wait=wait)
    assert outputs(ours, made.kind)
    assert list(differences(transformers.LlamaForCausalLM.from_pretrained(folder), ours)) == []
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) is equal


def test_a_loaded_model_in_a_larger_one_is_not_initialised_again(make: Callable[[str], Made]) -> None:
    made = make("llama")
    model: Any = load_model(made.plan, made.folder)
    before = {name: bytes_of(tensor) for name, tensor in model.state_dict().items()}
    model.init_weights()
    assert {name: bytes_of(tensor) for name, tensor in model.state_dict().items()} == before


class TestGivenModels:
    """`model=`: of any class, on the meta device."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 4)
            self.drop = nn.Dropout(0.5)
            self.norm = nn.BatchNorm1d(4)
            self.first.bias.requires_grad_(False)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.drop(self.norm(self.first(values)))
            return out

    @pytest.fixture
    def plan(self, tmp_path: Path) -> Plan:
        tensors = {
            "first.weight": raw("F32", 4, 3),
            "first.bias": raw("F32", 4),
            "norm.num_batches_tracked": raw("I64"),
        }
        tensors |= {f"norm.{leaf}": raw("F32", 4) for leaf in ("weight", "bias", "running_mean", "running_var")}
        write_file(tmp_path / "model.safetensors", tensors)
        return compile_plan(tmp_path)

    def build(self) -> nn.Module:
        with torch.device("meta"):
            return self.Net()

    @pytest.mark.parametrize("wait", [True, False])
    def test_factory_or_module(self, plan: Plan, tmp_path: Path, wait: bool) -> None:
        given = self.build()
        for model in (load_model(plan, tmp_path, model=self.build, wait=wait), load_model(plan, tmp_path, model=given)):
            assert not model.training
            assert not model.get_parameter("first.bias").requires_grad
            assert model.get_parameter("first.weight").requires_grad
            wanted = load_state_dict(plan, tmp_path)
            assert {n: bytes_of(t) for n, t in model.state_dict().items()} == {
                n: bytes_of(t) for n, t in wanted.items()
            }
        assert model is given

    def test_refused(self, plan: Plan, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"does not say what builds its model: pass model= a module on the meta"):
            load_model(plan, tmp_path)
        with pytest.raises(
            ModuleMismatch, match=r"first\.bias and 6 more tensors of the model are on cpu, not on the meta"
        ):
            load_model(plan, tmp_path, model=self.Net)
        with pytest.raises(ModuleMismatch, match=r"the plan makes first\.bias, the module has no such tensor"):
            load_model(plan, tmp_path, model=lambda: nn.Linear(3, 4, device="meta"))
        with pytest.raises(ArgumentError, match=r"made a dict, a torch\.nn\.Module is needed"):
            load_model(plan, tmp_path, model=dict)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="leave it out with wait=False"):
            load_model(plan, tmp_path, model=self.build, wait=False, progress=lambda done, total: None)
        with pytest.raises(ArgumentError, match="threads=0: at least 1"):
            load_model(plan, tmp_path, model=self.build, threads=0)

    def test_a_failed_load_leaves_the_given_module_as_it_was(self, plan: Plan, tmp_path: Path) -> None:
        given = self.build()
        (tmp_path / "model.safetensors").write_bytes(b"")
        with pytest.raises(OSError, match=r"model\.safetensors: has 0 bytes"):
            load_model(plan, tmp_path, model=given)
        assert given.training and all(tensor.is_meta for tensor in given.state_dict().values())


class TestRecords:
    def test_a_part_without_values_is_named(self, make: Callable[[str], Made], tmp_path: Path) -> None:
        made = make("bert")
        tensors = {n: t for path in made.folder.glob("*.safetensors") for n, t in load_file(path).items()}
        del tensors["cls.predictions.transform.dense.bias"]
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        (tmp_path / "config.json").write_bytes((made.folder / "config.json").read_bytes())
        plan = compile_plan(tmp_path, target=Target(missing="ignore"))
        with pytest.raises(ModuleMismatch, match=r"no values for cls\.predictions\.transform\.dense\.bias"):
            load_model(plan, tmp_path)

    def test_ranks_need_a_module_of_their_shapes(self, make: Callable[[str], Made]) -> None:
        made = make("llama")
        plan = compile_plan(made.folder, target=Target(tp_size=2))
        with pytest.raises(ModelError, match="cuts tensors for 2 ranks"):
            load_model(plan, made.folder, rank=1)
        sliced = {**TINY_DECODER, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 24}
        config = transformers.LlamaConfig(**sliced, head_dim=8, dtype=torch.bfloat16)  # type: ignore[arg-type]
        wanted = load_state_dict(plan, made.folder, 1)

        def build() -> nn.Module:
            make_model: Any = transformers.LlamaForCausalLM._from_config
            model = make_model(config)
            for path in ("model.embed_tokens", "lm_head"):
                model.get_submodule(path).weight = nn.Parameter(wanted[f"{path}.weight"].to("meta"))
            return model.to("meta")  # type: ignore[no-any-return]

        model = load_model(plan, made.folder, rank=1, model=build)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())

    def test_what_a_plan_names_is_one_of_transformers_models(self, make: Callable[[str], Made]) -> None:
        made = make("llama")
        record = made.plan.head.model
        assert record is not None and record.class_name == "LlamaForCausalLM" and record.dtype == "bfloat16"
        others: dict[str, Callable[[ModelRecord], ModelRecord]] = {
            "has no class 'Trainer'": lambda r: replace(r, class_name="Trainer"),
            "has no class 'os.system'": lambda r: replace(r, class_name="os.system"),
            "one of 'timm'": lambda r: replace(r, library="timm"),
            "is not JSON": lambda r: replace(r, config=b"{"),
            "is no JSON object": lambda r: replace(r, config=b"[]"),
            "names code of a hub as attn_implementation": lambda r: replace(
                r, config=r.config[:-1] + b',"attn_implementation":"someone/kernel"}'
            ),
            "'nonsense' is not a torch dtype": lambda r: replace(r, dtype="nonsense"),
        }
        for message, change in others.items():
            head = replace(made.plan.head, model=change(record))
            plan = Plan.of(head, (made.plan.section(0),))
            with pytest.raises(ModelError, match=message):
                load_model(plan, made.folder)

    def test_a_module_given_as_signature_is_recorded(self, make: Callable[[str], Made]) -> None:
        made = make("clip")
        config = transformers.CLIPConfig(**made.kind.config)  # type: ignore[arg-type]
        with torch.device("meta"):
            module = transformers.CLIPModel(config)
        plan = compile_plan(made.folder, signature=module)
        assert outputs(load_model(plan, made.folder), made.kind) == outputs(made.theirs, made.kind)
        assert compile_plan(made.folder, signature="recipe").head.model is None

    def test_what_is_recorded_is_in_the_key(self, make: Callable[[str], Made], tmp_path: Path) -> None:
        """Another generation config is another plan; the order of keys in config.json is none."""
        made = make("llama")
        for name, content in files_in(made.folder).items():
            (tmp_path / name).write_bytes(content)
        (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 8}')
        other = compile_plan(tmp_path)
        assert other.digest != made.plan.digest
        assert dict(other.head.provenance)["generation config"] != dict(made.plan.head.provenance)["generation config"]
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
        assert compile_plan(tmp_path).head.model == other.head.model


@pytest.mark.parametrize("wait", [True, False])
def test_fused_modules_are_built_and_saved_as_the_checkpoint(
    make: Callable[[str], Made], tmp_path: Path, wait: bool
) -> None:
    """Under their fused classes; saved by transformers' own call, in the files and names of the checkpoint."""
    made = make("llama")
    with torch.device("meta"):
        module: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_pretrained(made.folder))
    module.to(torch.bfloat16)
    fusions = find_fusions(module, {"gate_up": True})
    fuse_modules(module, fusions)
    rule = WeightConverter(["mlp.gate_proj.weight", "mlp.up_proj.weight"], "mlp.gate_up_proj.weight", [Concatenate(0)])
    bare = compile_plan(made.folder, Recipe(rules=[rule]), signature=module)
    plan = Plan.of(replace(bare.head, fusions=tuple(fusions)), (bare.section(0),), bare.origin)
    for model in (
        copied := load_model(plan, made.folder, wait=wait),
        pickle.loads(pickle.dumps(copied.save_pretrained)),
    ):
        if model is copied:
            assert any(name.endswith("gate_up_proj.weight") for name in model.state_dict())
            wanted, found = (m(input_ids=TOKENS).logits for m in (made.theirs, model))
            torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
            model = model.save_pretrained
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        model(folder)
        saved, before = files_in(folder), files_in(made.folder)
        assert {n: saved[n] for n in before if "model" in n} == {n: before[n] for n in before if "model" in n}
        again = transformers.LlamaForCausalLM.from_pretrained(folder)
        assert outputs(again, made.kind) == outputs(made.theirs, made.kind)
    with pytest.raises(SaveError, match="saved by its plan, which has no variant"):
        model(tmp_path / "other", variant="fp16")


def test_open_ties_are_refused_when_they_are_needed(tmp_path: Path) -> None:
    """A third name has no matrix of its own, and two others differ (cases B25)."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(2, 2, bias=False) for _ in range(3))
            self.b.weight = self.c.weight = self.a.weight

    names = [f"{leaf}.weight" for leaf in "abc"]
    write_file(tmp_path / "model.safetensors", {names[0]: raw("F32", 2, 2), names[1]: raw("F32", 2, 2, seed=1)})
    plan = compile_plan(tmp_path, signature=Signature.of(dict.fromkeys(names, ((2, 2), "F32")), ties=[names]))
    with torch.device("meta"):
        model = Three()
    with pytest.raises(TieConflict):
        load_model(plan, tmp_path, model=model)
    model = load_model(plan, tmp_path, model=model, wait=False)  # type: ignore[assignment]
    for _ in range(2):
        with pytest.raises(TieConflict):
            wait_for(model)
