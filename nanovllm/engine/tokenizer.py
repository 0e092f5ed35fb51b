"""The model's own tokenizer, with the rules this library adds: one BOS, exact bytes of a token, all eos ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers  # its names are looked up on use: that imports most of it, which without a tokenizer nobody needs
from jinja2.exceptions import TemplateError

from nanovllm.config import read_json

Prompt = str | list[int]

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class Tokenizer:
    """A transformers tokenizer loaded from `directory`.

    Raises:
        ValueError: there is none in the directory.
    """

    def __init__(self, directory: str) -> None:
        if not Path(directory).is_dir():
            raise _unusable(directory, "is not a directory")
        if not any((Path(directory) / name).is_file() for name in _VOCABULARIES):
            raise _unusable(directory, f"has none of {', '.join(_VOCABULARIES)}")  # transformers would make one up
        try:
            file = Path(directory) / "config.json"
            # transformers reads the model's config for a tokenizer, and stumbles over a model it does not know.
            known = not file.is_file() or read_json(file).get("model_type") in transformers.CONFIG_MAPPING
            config = {} if known else {"config": transformers.PretrainedConfig()}
            self._hf = transformers.AutoTokenizer.from_pretrained(directory, **config)
        except Exception as error:  # whatever the files hold, and whoever fails to read them
            raise _unusable(directory, f"cannot be loaded: {error}") from error
        self.eos_token_id: int | None = self._hf.eos_token_id
        self._bytes_of_char = _byte_level_chars() if self._is_byte_level() else None
        added = self._hf.added_tokens_decoder.items()
        self.special_ids = frozenset(self._hf.all_special_ids) | {i for i, token in added if token.special}

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts, with the special tokens that the model expects around plain text.

        A text that already starts with BOS gets no second one.
        """
        if not texts:
            return []
        batch = self._hf(texts)["input_ids"]
        bos, doubled = self._hf.bos_token, [self._hf.bos_token_id] * 2
        return [
            ids[1:] if bos is not None and text.startswith(bos) and ids[:2] == doubled else ids
            for text, ids in zip(texts, batch, strict=True)
        ]

    def encode_chat(
        self, conversations: list[list[dict]], add_generation_prompt: bool, template_kwargs: dict[str, Any]
    ) -> list[list[int]]:
        """Token ids of conversations rendered by the model's template, which writes all special tokens itself.

        Raises:
            TypeError: a conversation is not a list of dicts.
            ValueError: one is empty or has a message without role, or the tokenizer has no chat template, or the
                template refuses a conversation.
        """
        if not self._hf.chat_template:
            raise ValueError("chat() needs a chat template and the tokenizer has none; use generate() with text")
        if not conversations:
            return []
        _check_conversations(conversations)
        try:
            texts = self._hf.apply_chat_template(
                conversations, tokenize=False, add_generation_prompt=add_generation_prompt, **template_kwargs
            )
        except (TemplateError, KeyError, TypeError) as error:
            raise ValueError(f"the chat template refuses a conversation: {error}") from error
        return self._hf(texts, add_special_tokens=False)["input_ids"]

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Text of token ids."""
        return self._hf.decode(token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def token_text(self, token_id: int) -> str:
        """Text of one token alone; U+FFFD where it holds part of a character."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, exact also for parts of characters. Ids past the vocabulary have none."""
        token = self._hf.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        chars = self._bytes_of_char
        if token_id in self.special_ids or (chars is not None and not chars.keys() >= set(token)):
            return token.encode()
        if chars is not None:
            return bytes(chars[char] for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def _is_byte_level(self) -> bool:
        """Whether tokens are spelled in GPT-2's alphabet of bytes."""
        backend = getattr(self._hf, "backend_tokenizer", None)
        return backend is not None and '"ByteLevel"' in json.dumps(json.loads(backend.to_str())["decoder"])


def encode_prompts(tokenizer: Tokenizer | None, prompts: Prompt | list[Prompt]) -> list[list[int]]:
    """One list of token ids per prompt; all strings are encoded in one batch.

    Raises:
        TypeError: what is given is neither a prompt nor a list of prompts.
        ValueError: text without a tokenizer.
    """
    if not isinstance(prompts, (str, list, tuple)):
        raise TypeError(f"prompts are a string, a list of token ids, or a list of such, got {prompts!r}")
    single = isinstance(prompts, str) or (bool(prompts) and all(not isinstance(p, (str, list, tuple)) for p in prompts))
    batch: list[Any] = [prompts] if single else list(prompts)
    for prompt in batch:
        if not isinstance(prompt, (str, list, tuple)):
            raise TypeError(f"a prompt is a string or a list of token ids, got {prompt!r}")
    texts = [prompt for prompt in batch if isinstance(prompt, str)]
    if texts and tokenizer is None:
        raise ValueError("text prompts need a tokenizer, and skip_tokenizer_init is set; pass token ids")
    encoded = iter(tokenizer.encode(texts) if texts else [])
    return [next(encoded) if isinstance(prompt, str) else list(prompt) for prompt in batch]


def _unusable(directory: str, why: str) -> ValueError:
    return ValueError(
        f"tokenizer={directory!r} {why}; pass tokenizer=DIR, or skip_tokenizer_init=True to work with token ids"
    )


def _check_conversations(conversations: list[list[dict]]) -> None:
    for messages in conversations:
        if not isinstance(messages, (list, tuple)) or not all(isinstance(one, dict) for one in messages):
            raise TypeError(f"a conversation is a list of dicts with role and content, got {messages!r}")
        if not messages or not all("role" in one and "content" in one for one in messages):
            raise ValueError(f"a conversation needs messages with role and content, got {messages!r}")


def _byte_level_chars() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for characters from
    256 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
