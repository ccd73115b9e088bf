"""Ranks against slices of the whole tensor, cut here by torch from the table of styles in transformers' documentation.

The table is written out again below, by name of the module, and knows nothing of recipes or plans. A whole tensor is what
`from_pretrained` loads. The bytes that a rank reads are counted at the system call, and for mapped copies from the plan.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
import transformers
from builders import TINY_DECODER, bytes_of, save_tiny
from safetensors.torch import load_file, save_file

from loadplan.compiler import CompileError, Problem, Target, compile_plan, convert
from loadplan.recipes import Recipe, Shard
from loadplan.runtime import Plan, load_state_dict

_MOE = {"num_experts": 12, "moe_intermediate_size": 16, "head_dim": 8}
MODELS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "llama": ("LlamaForCausalLM", TINY_DECODER),
    "llama-biases": ("LlamaForCausalLM", {**TINY_DECODER, "attention_bias": True, "mlp_bias": True}),
    "llama-bare": ("LlamaModel", TINY_DECODER),
    "llama-odd": ("LlamaForCausalLM", {**TINY_DECODER, "vocab_size": 117}),
    "llama-odd-tied": ("LlamaForCausalLM", {**TINY_DECODER, "vocab_size": 117, "tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", {**TINY_DECODER, "num_local_experts": 12}),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        {**TINY_DECODER, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24},
    ),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**TINY_DECODER, **_MOE, "mlp_only_layers": [1]}),
    "bert": ("BertForMaskedLM", {key: value for key, value in TINY_DECODER.items() if key != "num_key_value_heads"}),
}

# A cut: a tensor and a number of ranks to the part of each rank.
Cut = Callable[[torch.Tensor, int], list[torch.Tensor]]


def replicated(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    return [tensor] * ranks


def rows(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Outputs of a linear layer (weights and biases), words of an embedding; the last ranks may get less, or none."""
    return _chunk(tensor, ranks, -2 if tensor.ndim > 1 else 0)


def columns(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Inputs of a linear layer; its bias is added after the sum over ranks, and stays whole."""
    return _chunk(tensor, ranks, -1) if tensor.ndim > 1 else replicated(tensor, ranks)


def packed_rows(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Gate and up in one matrix: each rank gets its rows of gate, then its rows of up."""
    gate, up = tensor.chunk(2, -2)
    return [torch.cat(pair, -2) for pair in zip(rows(gate, ranks), rows(up, ranks), strict=True)]


def _chunk(tensor: torch.Tensor, ranks: int, dim: int) -> list[torch.Tensor]:
    parts = list(tensor.chunk(ranks, dim))
    return parts + [tensor.narrow(dim, 0, 0)] * (ranks - len(parts))


STYLES: Sequence[tuple[str, Cut]] = (
    (r"experts\.gate_up_proj$", packed_rows),
    (r"experts\.down_proj$", columns),
    (r"(embed_tokens|lm_head)\.weight$", rows),
    (r"\.(q|k|v|gate|up)_proj\.(weight|bias)$", rows),
    (r"\.(o|down)_proj\.(weight|bias)$", columns),
    (r"attention\.self\.(query|key|value)\.(weight|bias)$", rows),
    (r"\.intermediate\.dense\.(weight|bias)$", rows),
    (r"\.output\.dense\.(weight|bias)$", columns),
)


def cut_of(name: str) -> Cut:
    """The cut of a tensor: the first line of the table that fits, else none."""
    return next((cut for pattern, cut in STYLES if re.search(pattern, name)), replicated)


def gathered(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole tensor from what the ranks hold."""
    cut, ndim = cut_of(name), parts[0].ndim
    if cut is packed_rows:
        halves = [part.chunk(2, -2) for part in parts]
        return torch.cat([torch.cat([pair[half] for pair in halves], -2) for half in range(2)], -2)
    if cut is replicated or (cut is columns and ndim == 1):
        assert all(bytes_of(part) == bytes_of(parts[0]) for part in parts)
        return parts[0]
    return torch.cat(list(parts), -1 if cut is columns else -2 if ndim > 1 else 0)


def assert_equal(found: torch.Tensor, wanted: torch.Tensor, what: object) -> None:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), what
    assert bytes_of(found) == bytes_of(wanted.contiguous()), what


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with a model in four files or so; each is made once."""
    folders: dict[str, Path] = {}

    def save(model: str) -> Path:
        if model not in folders:
            folder = tmp_path_factory.mktemp(model)
            folders[model] = save_tiny(folder, *MODELS[model], "bfloat16", max_shard_size="20KB")
            assert len(list(folder.glob("*.safetensors"))) > 1
        return folders[model]

    return save


def pretrained(folder: Path, model_class: str) -> dict[str, torch.Tensor]:
    """The tensors as transformers loads them."""
    return dict(getattr(transformers, model_class).from_pretrained(folder).state_dict())


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_each_rank_holds_its_slice_of_the_whole(
    saved: Callable[[str], Path], tmp_path: Path, model: str, ranks: int
) -> None:
    folder = saved(model)
    whole = pretrained(folder, MODELS[model][0])

    plan = compile_plan(folder, target=Target(tp_size=ranks))
    artifact = convert(plan, folder, tmp_path / "converted")

    for load in (
        [load_state_dict(plan, folder, rank) for rank in range(ranks)],
        [load_state_dict(plan, folder, rank, mode="read") for rank in range(ranks)],
        [load_state_dict(artifact, rank=rank, mode="map") for rank in range(ranks)],
    ):
        for rank, loaded in enumerate(load):
            assert sorted(loaded) == sorted(whole)
            for name, tensor in whole.items():
                assert_equal(loaded[name], cut_of(name)(tensor, ranks)[rank], (name, rank))
        for name, tensor in whole.items():
            assert_equal(gathered(name, [loaded[name] for loaded in load]), tensor, name)
    cut = [name for name in whole if cut_of(name) is not replicated]
    assert len(cut) >= 14  # the table is not about other names


@pytest.mark.parametrize("model", ["llama-odd-tied", "mixtral", "bert"])
def test_converted_files_hold_each_tensor_once(saved: Callable[[str], Path], tmp_path: Path, model: str) -> None:
    folder = saved(model)
    whole = pretrained(folder, MODELS[model][0])
    artifact = convert(compile_plan(folder, target=Target(tp_size=2)), folder, tmp_path / "converted")

    shared = load_file(artifact.folder / "model.safetensors")
    own = [load_file(artifact.folder / f"rank-{rank}-of-2.safetensors") for rank in range(2)]

    assert set(own[0]) == set(own[1])
    assert not set(own[0]) & set(shared)
    tied = {frozenset(group) for group in _tied(whole) if len(group) > 1}
    assert {name for name in whole if name not in shared | own[0]} <= {name for group in tied for name in group}
    for rank, tensors in enumerate(own):
        for name, tensor in tensors.items():
            assert_equal(tensor, cut_of(name)(whole[name], 2)[rank], (name, rank))
    for name, tensor in shared.items():
        assert_equal(tensor, whole[name], name)


def _tied(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.data_ptr(), []).append(name)
    return list(groups.values())


def read_calls_nbytes() -> tuple[int, int]:
    """Bytes that this process has got from read calls before and after this one (proc(5), /proc/PID/io)."""
    text = Path("/proc/self/io").read_text()
    before = int(text.split("rchar:")[1].split()[0])
    return before, before + len(text)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_a_rank_reads_no_more_than_it_holds(saved: Callable[[str], Path], model: str, ranks: int) -> None:
    folder = saved(model)
    plan = compile_plan(folder, target=Target(tp_size=ranks))
    headers = sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in folder.glob("*.safetensors"))
    load_state_dict(plan, folder, mode="read")  # whatever is read once, of the system or of modules, is read by now
    for rank in range(ranks):
        plan.section(rank)
        _, before = read_calls_nbytes()
        loaded = load_state_dict(plan, folder, rank, mode="read")
        count = read_calls_nbytes()[0] - before
        held = sum({tensor.data_ptr(): tensor.nbytes for tensor in loaded.values()}.values())

        read = count - headers + mapped_nbytes(plan, rank)

        assert count > headers  # the count sees the data
        assert held <= read <= 1.05 * held
        assert plan.cost(rank).target_nbytes == held
        assert 0 <= read - plan.cost(rank).read_nbytes < 64  # the kernel counts some bytes that are not of files
        assert plan.cost(rank).amplification <= 1.05


def mapped_nbytes(plan: Plan, rank: int) -> int:
    """Bytes of files that copies with steps take from mapped files, outside any system call (all are bfloat16)."""
    copies = [copy for copy in plan.section(rank).copies if copy.source >= 0 and copy.loops]
    return sum(2 * copy.numel for copy in copies)


def test_all_ranks_together_hold_each_cut_tensor_once(saved: Callable[[str], Path]) -> None:
    folder = saved("mixtral")
    whole = pretrained(folder, "MixtralForCausalLM")
    plan = compile_plan(folder, target=Target(tp_size=4))
    shared = sum(tensor.nbytes for name, tensor in whole.items() if cut_of(name) is replicated)
    cut = sum(tensor.nbytes for tensor in whole.values()) - shared
    assert cut > 10 * shared
    assert sum(plan.cost(rank).read_nbytes for rank in range(4)) == cut + 4 * shared


def problems_of(folder: Path, target: Target, **more: object) -> tuple[Problem, ...]:
    """What the compiler refuses."""
    with pytest.raises(CompileError) as caught:
        compile_plan(folder, target=target, **more)  # type: ignore[arg-type]
    return caught.value.problems


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(4, 2, 4), (6, 3, 2), (8, 1, 2)])
def test_heads_are_never_cut_through(tmp_path: Path, heads: int, kv_heads: int, ranks: int) -> None:
    sizes = {"hidden_size": heads * 8, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    folder = save_tiny(tmp_path, "LlamaForCausalLM", {**TINY_DECODER, **sizes, "attention_bias": True}, "bfloat16")

    problems = problems_of(folder, Target(tp_size=ranks))

    names = {name for problem in problems for name in problem.names}
    attention = [f"model.layers.{layer}.self_attn" for layer in range(2)]
    assert {problem.kind for problem in problems} == {"shard"}
    assert names == {f"{at}.{part}_proj.{kind}" for at in attention for part in "kv" for kind in ("weight", "bias")}
    assert all(f"{kv_heads} units of 8 (heads)" in problem.message for problem in problems)

    whole = {f"model.layers.*.self_attn.{part}_proj": "replicated" for part in "kv"}
    plan = compile_plan(folder, target=Target(tp_size=ranks, tp_plan=whole))  # what one may ask for instead
    loaded = load_state_dict(plan, folder, ranks - 1)
    stored = load_file(folder / "model.safetensors")
    assert_equal(loaded[f"{attention[0]}.k_proj.weight"], stored[f"{attention[0]}.k_proj.weight"], "k_proj")
    q_proj = stored[f"{attention[1]}.q_proj.weight"]
    assert_equal(loaded[f"{attention[1]}.q_proj.weight"], rows(q_proj, ranks)[-1], "q_proj")


def test_an_entry_that_matches_nothing_is_refused(saved: Callable[[str], Path]) -> None:
    misspelled = {"layers.*.mlp.gate_proj": "replicated", "model.layers.*.mlp.up_pro": "replicated"}
    for ranks in (1, 2):  # also where nothing is cut: the entry is as wrong
        problems = problems_of(saved("llama"), Target(tp_size=ranks, tp_plan=misspelled))
        assert {(problem.kind, problem.names) for problem in problems} == {("unbound", (name,)) for name in misspelled}
        near = {problem.names[0]: problem.message.partition("near are ")[2] for problem in problems}
        assert "model.layers.0.mlp.gate_proj" in near["layers.*.mlp.gate_proj"]
        assert "mlp.up_proj" in near["model.layers.*.mlp.up_pro"]


def test_an_entry_of_a_recipe_that_matches_nothing_is_refused(saved: Callable[[str], Path]) -> None:
    recipe = Recipe(tp_plan={"model.layers.*.mlp": "colwise"})  # a module of modules owns no tensor
    (problem,) = problems_of(saved("llama"), Target(tp_size=2), recipe=recipe)
    assert (problem.kind, problem.names) == ("unbound", ("model.layers.*.mlp",))


@pytest.mark.parametrize("both_stored", [False, True], ids=["one-stored", "both-stored"])
def test_tied_names_are_cut_alike_or_refused(saved: Callable[[str], Path], tmp_path: Path, both_stored: bool) -> None:
    folder = saved("llama-odd-tied")
    if both_stored:
        stored = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
        save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
        (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
        folder = tmp_path

    (problem,) = problems_of(folder, Target(tp_size=2, tp_plan={"lm_head": "replicated"}))
    assert problem.kind == "shard"
    assert set(problem.names) == {"lm_head.weight", "model.embed_tokens.weight"}

    recipe = Recipe(tp_plan={"lm_head": "embedding_rowwise"})  # says it of one name, means the tensor
    plan = compile_plan(folder, recipe, target=Target(tp_size=2))
    loaded = [load_state_dict(plan, folder, rank) for rank in range(2)]
    assert [tensors["lm_head.weight"].shape[0] for tensors in loaded] == [59, 58]
    assert all(tensors["lm_head.weight"] is tensors["model.embed_tokens.weight"] for tensors in loaded)


def test_the_target_overrides_the_recipe(saved: Callable[[str], Path]) -> None:
    whole = pretrained(saved("mixtral"), "MixtralForCausalLM")
    plan = {
        "model.layers.*.mlp.experts": "replicated",  # by module, where the recipe names the tensors
        "model.layers.1.self_attn.o_proj.weight": "replicated",  # one layer's
        "lm_head": "replicated",
    }
    target = Target(tp_size=2, tp_plan=plan)
    loaded = load_state_dict(compile_plan(saved("mixtral"), target=target), saved("mixtral"), 1)
    kept = [name for name in whole if re.search(r"experts\.|layers\.1\.self_attn\.o_proj|lm_head", name)]
    assert len(kept) == 6
    for name, tensor in whole.items():
        assert_equal(loaded[name], tensor if name in kept else cut_of(name)(tensor, 2)[1], name)


def write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


def loaded_ranks(folder: Path, ranks: int, tp_plan: Mapping[str, str | Shard]) -> list[dict[str, torch.Tensor]]:
    plan = compile_plan(folder, target=Target(tp_size=ranks, tp_plan=tp_plan))
    return [load_state_dict(plan, folder, rank) for rank in range(ranks)]


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def test_one_dim_tensors_follow_the_role_and_not_the_name(tmp_path: Path) -> None:
    tensors = {  # cases B43
        "down.weight": numbers(4, 6),
        "down.bias": numbers(4),
        "down.gain": numbers(6),
        "up.weight": numbers(6, 4),
        "up.bias": numbers(6),
        "up.gain": numbers(6),
        "up.groupsize": torch.tensor(128.0),
        "down.groupsize": torch.tensor(64.0),
    }
    folder = write_tensors(tmp_path, tensors)
    loaded = loaded_ranks(folder, 2, {"down": "rowwise", "up": "colwise"})
    for rank, found in enumerate(loaded):
        for name in ("down.bias", "down.gain", "up.groupsize", "down.groupsize"):
            assert_equal(found[name], tensors[name], name)
        for name in ("up.weight", "up.bias", "up.gain"):
            assert_equal(found[name], tensors[name].chunk(2, 0)[rank], name)
        assert_equal(found["down.weight"], tensors["down.weight"].chunk(2, 1)[rank], "down.weight")


@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_sizes_that_do_not_divide(tmp_path: Path, ranks: int) -> None:
    tensors = {"embed.weight": numbers(5, 3), "mlp.gate_up": numbers(2, 6, 3)}  # cases B44
    folder = write_tensors(tmp_path, tensors)
    uneven = Shard(-2, groups=2, uneven=True)
    loaded = loaded_ranks(folder, ranks, {"embed": "embedding_rowwise", "mlp.gate_up": uneven})
    for rank, found in enumerate(loaded):
        assert_equal(found["embed.weight"], rows(tensors["embed.weight"], ranks)[rank], rank)
        assert_equal(found["mlp.gate_up"], packed_rows(tensors["mlp.gate_up"], ranks)[rank], rank)
    assert_equal(torch.cat([found["embed.weight"] for found in loaded]), tensors["embed.weight"], "gathered")

    strict = {"embed": "colwise", "mlp.gate_up": "packed_colwise"}
    problems = problems_of(folder, Target(tp_size=ranks, tp_plan=strict))
    assert {(problem.kind, problem.names) for problem in problems} == {("shard", (name,)) for name in tensors}


def test_packed_columns(tmp_path: Path) -> None:
    tensors = {"mlp.weight": numbers(3, 8), "mlp.bias": numbers(3)}
    folder = write_tensors(tmp_path, tensors)
    gate, up = tensors["mlp.weight"].chunk(2, 1)
    for rank, found in enumerate(loaded_ranks(folder, 2, {"mlp": "packed_rowwise"})):
        wanted = torch.cat([gate.chunk(2, 1)[rank], up.chunk(2, 1)[rank]], 1)
        assert_equal(found["mlp.weight"], wanted, rank)
        assert_equal(found["mlp.bias"], tensors["mlp.bias"], rank)
