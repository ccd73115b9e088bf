"""Classes built as others inside a block: by thread, in any order of undoing, with nothing left behind (cases B87)."""

from __future__ import annotations

import contextvars
import copy
import importlib
import inspect
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from fusable import FUSABLE, assert_same, ids
from torch import nn
from transformers.models.llama import modeling_llama

from loadplan.runtime import PatchError, apply_patches, patching, register_patch_mapping, unregister_patch_mapping


class Layer(nn.Module):
    def __init__(self, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.size, self.scale = size, scale
        self.linear = nn.Linear(size, size)


class Inheriting(Layer):
    """Has no `__init__` of its own."""


class Extending(Layer):
    def __init__(self, size: int) -> None:
        super().__init__(size, scale=3.0)


class NewLayer(Layer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_new = True


class NewerLayer(Layer):
    """Inherits its `__init__`."""


class Unrelated(nn.Module):
    def __init__(self, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.arguments = size, scale


class Holding(nn.Module):
    """Holds what it replaces."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = Layer(size)


class Tree(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner = Tree(depth - 1) if depth else None


class NewTree(Tree):
    pass


_CLASSES = (nn.Module, nn.Linear, Layer, Inheriting, Extending, NewLayer, NewerLayer, Unrelated, Holding, Tree, NewTree)


def namespaces() -> list[list[tuple[str, int]]]:
    """Every name of every class, in order, with the object it is bound to."""
    classes = (*_CLASSES, modeling_llama.LlamaMLP, modeling_llama.LlamaAttention)
    return [[(name, id(value)) for name, value in vars(cls).items()] for cls in classes]


@pytest.fixture(autouse=True, scope="module")
def _transformers_has_run() -> None:
    """It puts a method on `nn.Module` with its first model."""
    FUSABLE["llama"].build()


@pytest.fixture(autouse=True)
def _everything_is_as_before() -> Iterator[None]:
    before, module = namespaces(), dict(vars(modeling_llama))
    yield
    assert namespaces() == before
    assert dict(vars(modeling_llama)) == module
    assert (patching._open, patching._hooked, patching._registered, patching._active.get()) == ([], {}, {}, ())
    assert inspect.signature(Layer).parameters.keys() == {"size", "scale"}


def kind(module: object) -> type[object]:
    """Its class, which mypy knows less about than `type`."""
    return type(module)


def in_thread(work: Callable[[], Any]) -> Any:
    """The result of `work` in a thread of its own."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def test_a_class_is_built_as_its_replacement() -> None:
    with apply_patches({"Layer": NewLayer}):
        made: Any = Layer(3, scale=2.0)
        assert kind(made) is NewLayer and (made.size, made.scale, made.is_new) == (3, 2.0, True)
        assert list(made.state_dict()) == ["linear.weight", "linear.bias"]
        assert kind(Inheriting(3)) is Inheriting and kind(Extending(3)) is Extending
        assert Extending(3).scale == 3.0
        assert kind(NewLayer(3)) is NewLayer and kind(NewerLayer(2)) is NewerLayer
    assert kind(Layer(3)) is Layer and not hasattr(Layer(3), "is_new")


def test_a_replacement_need_not_be_a_subclass() -> None:
    with apply_patches({"Layer": Unrelated}):
        made: Any = Layer(3, scale=2.0)
        assert kind(made) is Unrelated and made.arguments == (3, 2.0) and made.state_dict() == {}
        with pytest.raises(TypeError, match="unexpected keyword argument 'wrong'"):
            Layer(3, wrong=1)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'size'"):
            Layer()  # type: ignore[call-arg]


def test_arguments_are_checked_as_ever_afterwards() -> None:
    """`__new__` once set would make `object.__new__` refuse them all (CPython 3.11)."""
    with apply_patches({"Layer": NewLayer, ".*": NewerLayer}):
        pass
    assert Layer(3).size == 3 and nn.Linear(2, 3).out_features == 3
    wrong: list[tuple[Any, tuple[int, ...]]] = [(nn.Module, (1,)), (Layer, ()), (nn.Linear, (2,))]
    for cls, arguments in wrong:
        with pytest.raises(TypeError):
            cls(*arguments)


def test_names_come_before_expressions_and_these_in_their_order() -> None:
    with apply_patches({"^Lay": Unrelated, "Layer": NewLayer}):
        assert kind(Layer(1)) is NewLayer
    with apply_patches({"^Inh": NewLayer, "erit": Unrelated, "Layer": NewerLayer}):
        assert kind(Inheriting(1)) is NewLayer  # re.search, the first that is found
        assert kind(Layer(1)) is NewerLayer
    qualified = f"{Layer.__module__}.Layer"
    with apply_patches({"Layer": NewLayer, qualified: NewerLayer}):
        assert kind(Layer(1)) is NewerLayer
    with apply_patches(
        {f"{Layer.__module__}.layer": NewLayer, "other.Layer": NewLayer, "Lay": NewLayer, "ayer": NewLayer}
    ):
        assert kind(Layer(1)) is Layer  # names are whole
    with apply_patches({"[Ll]ay": NewLayer}):
        assert kind(Layer(1)) is NewLayer


def test_an_expression_spares_the_replacement_itself() -> None:
    with apply_patches({".*Layer$": NewLayer}):
        assert kind(Layer(1)) is NewLayer
        assert kind(NewLayer(1)) is NewLayer
        assert kind(NewerLayer(1)) is NewLayer
    with apply_patches({"Layer": NewLayer, "Layer$": Unrelated}):
        assert kind(Layer(1)) is NewLayer  # replaced once, not again
        assert kind(NewerLayer(1)) is Unrelated
    with apply_patches({"Layer": NewLayer, "NewLayer": Layer}):
        assert (kind(Layer(1)), kind(NewLayer(1))) == (NewLayer, NewLayer)


def test_a_replacement_may_hold_what_it_replaces() -> None:
    with apply_patches({"Layer": Holding}):
        made: Any = Layer(2)
        assert kind(made) is Holding and kind(made.inner) is Layer
        assert kind(Layer(2)) is Holding


def test_a_recursive_class_is_replaced_all_the_way_down() -> None:
    with apply_patches({"Tree": NewTree}):
        assert [type(module) for module in Tree(2).modules()] == [NewTree] * 3


def test_inherited_constructors_are_not_pinned() -> None:
    with apply_patches({"Inheriting": NewLayer, "NewerLayer": NewLayer}):
        assert "__init__" in vars(Inheriting)
        assert kind(Inheriting(1)) is NewLayer
    assert "__init__" not in vars(Inheriting) and Inheriting.__init__ is Layer.__init__


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_undoes_the_block(error: type[BaseException]) -> None:
    before = namespaces()
    with pytest.raises(error), apply_patches({"Layer": NewLayer, "Inh.": NewLayer}), apply_patches({"Tree": NewTree}):
        assert kind(Layer(1)) is NewLayer
        raise error
    assert namespaces() == before and kind(Layer(1)) is Layer


def test_an_exception_in_a_replacement_leaves_the_block_working() -> None:
    class Failing(Layer):
        def __init__(self, size: int) -> None:
            super().__init__(size)
            Layer(1)
            raise OSError("no")

    with apply_patches({"Extending": Failing}):
        for _ in range(2):
            with pytest.raises(OSError, match="no"):
                Extending(1)
        assert kind(Layer(1)) is Layer


def test_blocks_nest_and_the_inner_one_comes_first() -> None:
    with apply_patches({"Layer": NewLayer, "Tree": NewTree}):
        with apply_patches({"Layer$": Unrelated}):
            assert (kind(Layer(1)), kind(Tree(0))) == (Unrelated, NewTree)
        assert kind(Layer(1)) is NewLayer
        with apply_patches({}):
            assert kind(Layer(1)) is NewLayer


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (1, 2, 0), (0, 2, 1)])
def test_blocks_are_undone_in_any_order(order: tuple[int, ...]) -> None:
    kinds: list[type[Any]] = [NewLayer, NewerLayer, Unrelated]
    blocks: list[Any] = [apply_patches({"Layer": new}) for new in kinds]
    for block in blocks:
        block.__enter__()
    left = [0, 1, 2]
    for number in order:
        assert kind(Layer(1)) is kinds[max(left)]
        blocks[number].__exit__(None, None, None)
        left.remove(number)
    assert kind(Layer(1)) is Layer


def test_a_block_closed_elsewhere_is_closed_here() -> None:
    block: Any = apply_patches({"Layer": NewLayer})
    context = contextvars.copy_context()
    context.run(block.__enter__)
    assert kind(Layer(1)) is Layer and kind(context.run(Layer, 1)) is NewLayer
    block.__exit__(None, None, None)
    assert kind(context.run(Layer, 1)) is Layer
    with apply_patches({"Layer": NewerLayer}):
        assert kind(context.run(Layer, 1)) is Layer and kind(Layer(1)) is NewerLayer


def test_other_threads_never_see_a_replacement() -> None:
    with apply_patches({"Layer": NewLayer, "Linear": type("MyLinear", (nn.Linear,), {})}):
        assert kind(in_thread(lambda: Layer(1))) is Layer
        assert kind(in_thread(lambda: Layer(1).linear)) is nn.Linear
        assert kind(Layer(1).linear).__name__ == "MyLinear"


def test_threads_with_patches_of_their_own() -> None:
    """All blocks open at once, each thread with another replacement or none, many times over."""
    kinds: list[Any] = [NewLayer, NewerLayer, Unrelated, None]
    together = threading.Barrier(len(kinds))
    wrong: list[object] = []

    def work(new: Any) -> None:
        for _ in range(25):
            with ExitStack() as stack:
                if new is not None:
                    stack.enter_context(apply_patches({"Layer": new, "Inher.*": new}))
                together.wait(60)
                made = {kind(Layer(1)), kind(Inheriting(2))}
                wanted = {new} if new is not None else {Layer, Inheriting}
                wrong.extend([made] if made != wanted else [])
                together.wait(60)

    threads = [threading.Thread(target=work, args=(new,)) for new in kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_construction_while_others_open_and_close() -> None:
    """A thread builds without a pause while blocks come and go: never a replacement, never an error."""
    stop, started = threading.Event(), threading.Event()
    seen: set[object] = set()

    def build() -> None:
        while not stop.is_set():
            try:
                seen.update((kind(Layer(1)), kind(Inheriting(1)), kind(nn.Linear(1, 2))))
            except BaseException as error:  # noqa: BLE001 - the test is that there is none
                seen.add(error)
            started.set()

    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert started.wait(60)
    try:
        for _ in range(100):
            with apply_patches({"Layer": NewLayer, "Inheriting": NewLayer, "Linear": Unrelated}):
                assert kind(Layer(1)) is NewLayer
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert seen == {Layer, Inheriting, nn.Linear}


def test_classes_made_during_the_block_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_module.py").write_text(
        "from torch import nn\n"
        "class Late(nn.Module):\n    def __init__(self, size):\n        super().__init__()\n        self.size = size\n"
        "class Later(Late):\n    pass\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with apply_patches({"Late": Unrelated, "late_module.Later": NewLayer}):
            late: Any = importlib.import_module("late_module")
            assert (kind(late.Late(2)), kind(late.Later(2))) == (Unrelated, NewLayer)
            assert [kind(in_thread(lambda: late.Late(2)))] == [late.Late]
        assert (kind(late.Late(2)), kind(late.Later(2))) == (late.Late, late.Later)
        assert "__init__" not in vars(late.Later) and "__init_subclass__" not in vars(nn.Module)
        assert late.Late.__init__.__qualname__ == "Late.__init__" and not hasattr(late.Late.__init__, "__wrapped__")
    finally:
        sys.modules.pop("late_module", None)


def test_subclass_hooks_still_get_their_arguments() -> None:
    class Base(nn.Module):
        def __init_subclass__(cls, flavour: str = "plain", **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            cls.flavour = flavour  # type: ignore[attr-defined]

    with apply_patches({"Layer": NewLayer}):
        made: Any = types.new_class("Made", (Base,), {"flavour": "sweet"})
        assert made.flavour == "sweet"
        with pytest.raises(TypeError):
            types.new_class("Wrong", (nn.Module,), {"flavour": "sweet"})


def test_what_somebody_else_puts_on_a_class_meanwhile_stays() -> None:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()

    with apply_patches({"Local": Unrelated}):
        hooked = Local.__init__

        def wrapper(self: Any) -> None:
            hooked(self)
            self.wrapped = True

        Local.__init__ = wrapper  # type: ignore[method-assign]
    made: Any = Local()
    assert Local.__init__ is wrapper and kind(made) is Local and made.wrapped is True


def test_copies_and_pickles_are_not_constructions() -> None:
    plain = Layer(2)
    with apply_patches({"Layer": NewLayer}):
        assert kind(copy.deepcopy(plain)) is Layer
        assert kind(pickle.loads(pickle.dumps(plain))) is Layer
        made = Layer(2)
    assert kind(pickle.loads(pickle.dumps(made))) is NewLayer


def test_registered_patches() -> None:
    register_patch_mapping({"Layer": NewLayer, "^Tr.*": NewTree})
    try:
        register_patch_mapping({"Layer": NewLayer})
        assert kind(Layer(1)) is Layer
        with apply_patches():
            assert (kind(Layer(1)), kind(Tree(0))) == (NewLayer, NewTree)
        with apply_patches({"Layer": Unrelated}):
            assert (kind(Layer(1)), kind(Tree(0))) == (Unrelated, Tree)
        with pytest.raises(PatchError, match=r"'Layer' is patched with NewLayer already; pass overwrite=True"):
            register_patch_mapping({"Other": Unrelated, "Layer": Unrelated})
        with pytest.raises(PatchError, match=r"no patch was registered as 'Other', 'Nope'; there are \['Layer', '\^Tr"):
            unregister_patch_mapping(["Layer", "Other", "Nope"])
        register_patch_mapping({"Layer": Unrelated}, overwrite=True)
        with apply_patches():
            assert kind(Layer(1)) is Unrelated
            unregister_patch_mapping("Layer")
            assert kind(Layer(1)) is Unrelated  # the block has what there was when it was opened
        with apply_patches():
            assert kind(Layer(1)) is Layer
    finally:
        unregister_patch_mapping(["^Tr.*"])


def test_patches_that_replace_nothing_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    register_patch_mapping({"Absent": NewLayer})
    try:
        with apply_patches({"Layer": NewLayer, "ayer": Unrelated, "^Zzz": Unrelated}), apply_patches():
            Layer(1)
    finally:
        unregister_patch_mapping("Absent")
    (record,) = caplog.records
    assert record.getMessage() == (
        "patches '^Zzz', 'ayer' replaced nothing: a key that is a name is a whole one (a part of one is '.*Attention')"
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"Layer": 3}, "the replacement of 'Layer' is 3, not a subclass of torch.nn.Module"),
        ({"Layer": torch.Tensor}, "not a subclass"),
        ({"Layer": NewLayer, "Tree": NewTree(0)}, "the replacement of 'Tree' is NewTree"),
        ({"(": NewLayer}, r"'\(' is no class name and no regular expression"),
        ({"": NewLayer}, "'' is no class name"),
        ({3: NewLayer}, "3 is no class name"),
        ([("Layer", NewLayer)], "patches are a mapping"),
    ],
)
def test_what_is_no_patch(wrong: Any, message: str) -> None:
    with pytest.raises(PatchError, match=message):
        register_patch_mapping(wrong)
    with pytest.raises(PatchError, match=message), apply_patches(wrong):
        pass


def test_a_class_that_cannot_be_replaced_says_so() -> None:
    class Made(Layer):
        def __new__(cls, *args: Any, **kwargs: Any) -> Self:
            return super().__new__(cls)

    class Slotted(nn.Module):
        __slots__ = ("field",)

    with apply_patches({"Layer": Made}), pytest.raises(PatchError, match="Made has its own __new__"):
        Layer(1)
    with apply_patches({"Layer": Slotted}), pytest.raises(PatchError, match="Slotted cannot take the place of Layer"):
        Layer(1)


def test_a_model_of_transformers_gets_replacements_and_records_them() -> None:
    """Its recorders are found by class: a subclass records, and a model that is built later records as before."""

    class Mine(modeling_llama.LlamaAttention):
        pass

    case = FUSABLE["llama"]
    plain = case.build()
    with apply_patches({"LlamaAttention": Mine, "^LlamaML": modeling_llama.LlamaMLP}):
        patched = case.build()
    later = case.build()
    kinds = [
        {type(m).__name__ for m in model.modules()} & {"Mine", "LlamaAttention"} for model in (plain, patched, later)
    ]
    assert kinds == [{"LlamaAttention"}, {"Mine"}, {"LlamaAttention"}]
    outputs = []
    for model in (plain, patched, later):
        model.set_attn_implementation("eager")  # type: ignore[operator]
        outputs.append(model(ids(), output_attentions=True, output_hidden_states=True))
    assert len(outputs[0].attentions) == 2
    for output in outputs[1:]:
        assert_same(output, outputs[0], rtol=0, atol=0)
