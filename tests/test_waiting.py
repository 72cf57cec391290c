"""What a person waits for: programs compiled once, ahead of the prompt, and kept between runs."""

import subprocess
import sys
from pathlib import Path

import jax
import pytest
from targets import TINY, tiny_draft, tiny_target
from test_loop import compilations

from dflash_jax import SpecSession, loop
from dflash_jax.cli import cache, main
from dflash_jax.progress import Progress

TINY_MODELS = Path(__file__).parent / "oracles" / "tiny"
COMMAND = ["generate", "1 2 3", "--ids", "--max-new-tokens", "4"]
MODELS = ["--target", str(TINY_MODELS / "target"), "--draft", str(TINY_MODELS / "dflash")]

# conftest puts a stand-in there; this is the real one, read before any fixture runs.
use_compile_cache = cache.use_compile_cache


# --- compiling ahead ---------------------------------------------------------------------------


def test_warming_up_compiles_all_programs_and_reads_no_prompt(monkeypatch):
    target, draft = tiny_target(), tiny_draft(TINY)
    prompts = [list(range(50)) + [5] * 30, [1, 2, 3]]
    session = SpecSession(target, draft, stop_token_ids=(), chunk=32)
    session.warm_up(prompts, 20)
    with pytest.raises(ValueError, match=r"expected open\(\) first"):
        session.burst()
    programs = loop.prefill_chunk, loop.start, loop.decode, loop.empty_caches
    sizes = [program._cache_size() for program in programs]
    session.open(prompts, 20)
    session.burst()
    assert [program._cache_size() for program in programs] == sizes
    warm = [result.token_ids for result in session.results()]
    cold = SpecSession(target, draft, stop_token_ids=(), chunk=32)
    with compilations(0):
        cold.open(prompts, 20)
        cold.burst()
    assert [result.token_ids for result in cold.results()] == warm


def test_opening_again_lets_go_of_the_old_caches_first(monkeypatch):
    session = SpecSession(tiny_target(), None, capacity=64)
    session.open([[1, 2]], 4)
    before, make = session.state, loop.empty_caches
    held = []

    def seen(*args, **options):
        held.append(session.state)
        return make(*args, **options)

    monkeypatch.setattr(loop, "empty_caches", seen)
    session.open([[1, 2]], 4)
    assert held == [None] and session.state is not before


# --- the compile cache -------------------------------------------------------------------------


@pytest.fixture
def no_cache_yet():
    """jax's own settings, put back afterwards."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize(
    ("system", "given", "base"),
    [
        ("linux", None, ".cache"),
        ("linux", "elsewhere", "elsewhere"),
        ("darwin", None, "Library/Caches"),
        ("darwin", "elsewhere", "elsewhere"),
    ],
)
def test_compiled_programs_are_kept_in_the_users_cache_folder(
    system, given, base, tmp_path, monkeypatch, no_cache_yet
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if given:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / given))
    use_compile_cache()
    folder = Path(jax.config.jax_compilation_cache_dir)
    assert folder.is_dir()
    assert folder.parent == tmp_path / base / "dflash-jax"


def test_a_place_that_jax_was_told_of_is_left_alone(tmp_path, monkeypatch, no_cache_yet):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", "/my/own")
    use_compile_cache()
    assert jax.config.jax_compilation_cache_dir == "/my/own"
    assert not list(tmp_path.iterdir())


def test_a_cache_folder_that_cannot_be_made_is_a_warning(tmp_path, monkeypatch, no_cache_yet):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="compiled programs are not kept: "):
        use_compile_cache()
    assert jax.config.jax_compilation_cache_dir is None


@pytest.mark.parametrize(("option", "uses"), [([], 1), (["--no-compile-cache"], 0)])
def test_commands_that_compile_keep_programs_unless_told_not_to(option, uses, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(cache, "use_compile_cache", lambda: calls.append(1))
    assert main(["plan", *MODELS, "--context", "64", *option]) == 0
    assert len(calls) == uses
    assert main(["inspect", "dspark"]) == 0
    assert len(calls) == uses


@pytest.mark.slow
def test_a_second_run_finds_the_programs_of_the_first(tmp_path):
    def run():
        code = "import sys; from dflash_jax.cli import main; sys.exit(main(sys.argv[1:]))"
        env = {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu", "PATH": ""}
        command = [sys.executable, "-c", code, *COMMAND, *MODELS]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return sorted(tmp_path.glob("dflash-jax/*/*-cache"))

    first = run()
    assert any("jit_decode" in file.name for file in first)
    assert run() == first


# --- progress ----------------------------------------------------------------------------------


def test_progress_goes_to_stderr_and_leaves_a_clean_line(capsys):
    assert main([*COMMAND, *MODELS, "--progress"]) == 0
    out, err = capsys.readouterr()
    ids, figures = out.splitlines()
    assert len(ids.split()) == 4 and figures.endswith(" MiB]")
    assert [word for word in ("loading", "compiling", "reading the prompt") if word in err] == [
        "loading",
        "compiling",
        "reading the prompt",
    ]
    assert err.endswith("\r\033[K")


def test_a_bar_shows_what_is_done(capsys):
    with Progress("reading", 40, unit="tokens", show=True) as bar:
        bar.add(10)
    assert "reading [######..................] 10.0/40.0 tokens" in capsys.readouterr().err
