"""loadplan.toml: what is read from literal files, and the exact words with which faulty ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadplan.compiler.build_file import BuildFileError, read_project


def _write(folder: Path, text: str) -> Path:
    path = folder / "loadplan.toml"
    path.write_text(text, encoding="utf-8")
    return path


_VALUES = st.sampled_from(
    [
        "1",
        "0",
        "true",
        "'x'",
        "'bfloat16'",
        "[1, 2]",
        "['a', 'b']",
        "[]",
        "{}",
        "{a = 1}",
        "1.5",
        "1979-05-27",
        "'1 GiB'",
    ]
)
_KEYS = st.sampled_from(
    ["source", "recipe", "tp_size", "dtype", "tp_plan", "fusions", "signature", "convert", "root", "max_size", "url",
     "dask", "recipes", "output", "nonsense", "a.b", "'q u'"]
)  # fmt: skip
_TABLES = st.sampled_from(
    ["build", "cache", "cache.remote.r", "trust", "executor", "defaults", "checkpoint.a", "checkpoint.a.variant.v",
     "checkpoint.a.matrix.m", "checkpoint", "checkpoint.a.variant", "other", "checkpoint.'x y'"]
)  # fmt: skip


def toml_like() -> st.SearchStrategy[str]:
    """Texts of tables and keys, most of them of ours."""
    key = st.builds("{} = {}".format, _KEYS, _VALUES)
    table = st.builds(lambda name, keys: "\n".join([f"[{name}]", *keys]), _TABLES, st.lists(key, max_size=4))
    return st.lists(table, max_size=5).map("\n".join)


def test_a_project_is_read(tmp_path: Path) -> None:
    project = read_project(
        _write(
            tmp_path,
            """
            [build]
            output = "out"
            [checkpoint.small]
            source = "weights/small"
            [checkpoint.small.variant.tp2]
            tp_size = 2
            dtype = "bfloat16"
            [checkpoint.small.variant.plain]
            convert = false
            [checkpoint.big]
            source = "pkg://some_package/model"
            [checkpoint.big.variant.plain]
            """,
        )
    )
    assert [variant.label for variant in project.variants] == ["big@plain", "small@plain", "small@tp2"]
    assert project.get("small@tp2").options.tp_size == 2
    assert project.get("small@tp2").source == str(tmp_path / "weights/small")
    assert project.get("big@plain").source == "pkg://some_package/model"
    assert not project.get("small@plain").options.convert
    assert project.output == tmp_path / "out"
    assert project.cache.root == tmp_path / ".loadplan"
    assert (project.cache.max_nbytes, project.cache.grace_s) == (None, 7 * 86400)
    with pytest.raises(BuildFileError, match="did you mean 'small@tp2'"):
        project.get("small@tp")


def test_a_whole_project_is_read(tmp_path: Path) -> None:
    project = read_project(
        _write(
            tmp_path,
            """
            [build]
            recipes = ["mine.py"]
            [defaults]
            dtype = "bfloat16"
            missing = "ignore"
            [cache]
            root = "store"
            max_size = "1.5 GiB"
            grace = "90 min"
            push = "auto"
            [cache.remote.ci]
            url = "s3://bucket/plans"
            read_only = false
            timeout = "5 s"
            storage = { anon = true }
            [cache.remote.near]
            url = "shared"
            [trust]
            require = true
            keys = ["keys", "/etc/keys/ci.pub.pem"]
            sign_with = "ci.pem"
            [executor]
            dask = "tcp://scheduler:8786"
            [checkpoint.m]
            source = "w"
            [checkpoint.m.variant.plain]
            dtype = "float32"
            tp_plan = { "layers.*.q" = "colwise" }
            """,
        )
    )
    cache = project.cache
    assert (cache.root, cache.max_nbytes, cache.grace_s) == (tmp_path / "store", 3 << 29, 5400)
    assert (cache.pull, cache.push) == ("auto", "auto")
    assert [(r.name, r.url, r.read_only, r.timeout_s) for r in cache.remotes] == [
        ("ci", "s3://bucket/plans", False, 5), ("near", str(tmp_path / "shared"), True, 30),
    ]  # fmt: skip
    assert cache.remotes[0].storage == {"anon": True}
    assert cache.trust.keys == (tmp_path / "keys", Path("/etc/keys/ci.pub.pem"))
    assert cache.trust.sign_with == tmp_path / "ci.pem"
    assert project.recipes == (tmp_path / "mine.py",)
    assert project.dask == "tcp://scheduler:8786"
    options = project.get("m@plain").options
    assert (options.dtype, options.missing) == ("float32", "ignore")
    assert project.get("m@plain").target.tp_plan[0][0] == "layers.*.q"


def test_a_matrix_is_every_combination_under_predictable_names(tmp_path: Path) -> None:
    text = """
        [checkpoint.m]
        source = "w"
        [checkpoint.m.variant.alone]
        [checkpoint.m.matrix.serve]
        tp_size = [1, 2]
        dtype = ["bfloat16", "float16"]
        unexpected = "ignore"
        [checkpoint.m.matrix.own]
        recipe = ["llama", "mine.py:FUSED"]
        tp_size = 4
    """
    project = read_project(_write(tmp_path, text))
    found = {v.name: (v.options.dtype, v.options.tp_size, v.options.recipe) for v in project.variants}
    assert found == {
        "alone": (None, 1, "auto"),
        "own-FUSED": (None, 4, "mine.py:FUSED"),
        "own-llama": (None, 4, "llama"),
        "serve-bfloat16-tp1": ("bfloat16", 1, "auto"),
        "serve-bfloat16-tp2": ("bfloat16", 2, "auto"),
        "serve-float16-tp1": ("float16", 1, "auto"),
        "serve-float16-tp2": ("float16", 2, "auto"),
    }
    assert list(found) == sorted(found)
    assert project.get("m@serve-float16-tp1").options.unexpected == "ignore"


V = "[checkpoint.a]\nsource = 'x'\n[checkpoint.a.variant.v]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (V + "tp_sise = 2", "line 4: checkpoint.a.variant.v.tp_sise: is not a key; did you mean 'tp_size'?"),
        ("[checkpoint.a]\nsorce = 'x'\n[checkpoint.a.variant.v]", "line 1: checkpoint.a.source: must be given"),
        ("[checkpoint.a]\nsorce = 'x'\n[checkpoint.a.variant.v]", "line 2: checkpoint.a.sorce: is not a key; did you mean 'source'?"),
        (V + "tp_size = '2'", "line 4: checkpoint.a.variant.v.tp_size: Input should be a valid integer (found '2')"),
        (V + "tp_size = 0", "line 4: checkpoint.a.variant.v.tp_size: Input should be greater than or equal to 1 (found 0)"),
        (V + "signature = 'none'", "line 3: checkpoint.a.variant.v: signature = 'none' is none of \"auto\", \"transformers\", \"recipe\", or a \"FILE.json\""),
        (V + "dtype = 'bf61'", "line 3: checkpoint.a.variant.v: 'bf61' is not a dtype; known are"),
        (V + "dtype = 'int8'", "checkpoint.a.variant.v: dtype='int8': weights are cast to F16, BF16, F32 or F64 only"),
        (V + "tp_plan = {'a' = 'sideways'}", "checkpoint.a.variant.v: "),
        (V + "signature = 'recipe'\nfusions = {qkv = true}", "fusions need the model, and signature = \"recipe\" has none"),
        ("[defaults]\nfusions = {qkv = true}\n" + V + "signature = 'recipe'", "line 5: checkpoint.a.variant.v: with [defaults]: fusions need the model"),
        ("[checkpoint.a]\nsource = 'x'\n[checkpoint.a.variant]", "line 1: checkpoint.a: has no variant and no matrix; add [checkpoint.a.variant.plain]"),
        ("[checkpoint.a]\nsource = 'x'", "checkpoint.a: has no variant and no matrix"),
        ("[checkpoint.'../a']\nsource = 'x'\n[checkpoint.'../a'.variant.v]", "line 1: checkpoint.../a: String should match pattern"),
        ("[biuld]\n" + V, "line 1: biuld: is not a key; did you mean 'build'?"),
        ("[build]\ncache = 'x'\n" + V, "line 2: build.cache: is not a key any more; write it as root in [cache]"),
        ("[build]\noutput = '.loadplan/out'\n" + V, "cache.root: '.loadplan' and build.output '.loadplan/out' overlap; separate them"),
        ("[cache]\nmax_size = '200'\n" + V, "line 2: cache.max_size: is not a size; write for example \"200 GiB\""),
        ("[cache]\ngrace = '7 moons'\n" + V, "line 2: cache.grace: is not a span of time; write for example \"7 days\""),
        ("[cache]\npull = 'always'\n" + V, "line 2: cache.pull: Input should be 'auto' or 'never' (found 'always')"),
        ("[cache]\npush = 'auto'\n" + V, "line 1: cache: push = \"auto\", but no remote may be written"),
        ("[cache.remote.r]\nulr = 's3://b'\n" + V, "line 2: cache.remote.r.ulr: is not a key; did you mean 'url'?"),
        ("[cache.remote.r]\nurl='http://h'\ntoken_env='A'\nlogin_env='B'\n" + V, "line 1: cache.remote.r: token_env and login_env exclude each other"),
        ("[cache.remote.r]\nurl='http://me:secret@h/x'\n" + V, "line 1: cache.remote.r: url holds a user or password"),
        ("[trust]\nrequire = true\n" + V, "line 1: trust: require = true, but no keys are trusted"),
        ("[trust]\nkeys = ['k']\n" + V, "line 1: trust: keys are trusted, but nothing need be signed"),
        ("[trust]\nsign-with = 'k'\n" + V, "trust.sign-with: is not a key; did you mean 'sign_with'?"),
        ("[executor]\ndask = 'scheduler:8786'\n" + V, "line 2: executor.dask: String should match pattern"),
        ("[checkpoint.a]\nsource='x'\n[checkpoint.a.matrix.m]\ntp_size=[]", "line 4: checkpoint.a.matrix.m.tp_size: "),
        ("[checkpoint.a]\nsource='x'\n[checkpoint.a.matrix.m]\ntp_size=[1,'2']", "line 4: checkpoint.a.matrix.m.tp_size: "),
        ("[checkpoint.a]\nsource='x'\n[checkpoint.a.matrix.m]\ntp_size=[1,1]", "line 3: checkpoint.a.matrix.m: makes 'm-tp1', which checkpoint.a.matrix.m makes too; give another name"),
        ("[checkpoint.a]\nsource='x'\n[checkpoint.a.matrix.m]\nconvert=[true]", "line 4: checkpoint.a.matrix.m.convert: Input should be a valid boolean"),
        (V + "[checkpoint.a.matrix.v]\ntp_size = 2", "line 4: checkpoint.a.matrix.v: makes 'v', which checkpoint.a.variant.v makes too"),
        ("", "checkpoint: must be given"),
        ("[checkpoint", "is not valid TOML"),
    ],
)  # fmt: skip
def test_a_fault_names_its_line_and_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BuildFileError) as caught:
        read_project(_write(tmp_path, text))
    assert message in str(caught.value)
    assert "loadplan.toml" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    text = "[checkpoint.a]\n[checkpoint.a.variant.v]\ndtpye = 'F16'\ntp_size = 'two'\n[cache]\nmax_size = '5'"
    with pytest.raises(BuildFileError, match="4 faults") as caught:
        read_project(_write(tmp_path, text))
    assert all(key in str(caught.value) for key in ("source", "dtpye", "tp_size", "max_size"))
    text = V + "dtype = 'x'\n[checkpoint.a.variant.w]\ndtype = 'y'\n[checkpoint.b]\nsource = 'z'"
    with pytest.raises(BuildFileError, match="3 faults"):
        read_project(_write(tmp_path, text))


@given(text=toml_like())
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_read_or_refused_in_our_words(tmp_path: Path, text: str) -> None:
    """Fuzz: lines that look like ours, in any order, with values of any kind."""
    try:
        read_project(_write(tmp_path, text))
    except BuildFileError as error:
        assert "loadplan.toml" in str(error)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildFileError, match=r"loadplan\.toml: cannot be read"):
        read_project(tmp_path / "loadplan.toml")
