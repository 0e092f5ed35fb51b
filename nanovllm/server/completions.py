"""POST /v1/completions: prompts continued, echoed, scored."""

from __future__ import annotations

from typing import Any

from nanovllm.server.engine_thread import Delta, Prompt, TopLogprobs
from nanovllm.server.protocol import DEFAULT_COMPLETION_TOKENS, ApiError, CompletionRequest
from nanovllm.server.service import Answer, Service, finite, most_likely


async def start_completion(service: Service, request: CompletionRequest) -> CompletionAnswer:
    """Check a request and let it run.

    Raises:
        ApiError: it cannot be served; nothing runs then.
    """
    service.check_model(request.model)
    wants = request.logprobs
    if "logprobs" not in request.model_fields_set:
        wants = service.default_logprobs
    num_top = 0 if wants is True else None if wants is False else wants
    scoring = request.max_tokens == 0
    if scoring and not request.echo:
        raise ApiError(400, "max_tokens=0 is not allowed without echo=true (scoring): at least 1", "max_tokens")
    own = {"max_tokens": None} if scoring else {}
    if request.max_tokens is None:
        own["max_tokens"] = max(DEFAULT_COMPLETION_TOKENS, request.min_tokens or 0)
    params = request.sampling_params(logprobs=num_top, **own)
    if scoring and params.n > 1:
        raise ApiError(400, f"n={params.n} is not allowed with max_tokens=0: only 1", "n")
    token_ids = await service.encode_prompts(request.prompt)
    for ids in token_ids:
        service.check_prompt(ids, params, 0 if scoring else request.max_tokens or 1, "prompt")
    prompt_logprobs = num_top if request.echo else None
    prompts = [Prompt(ids, params, prompt_logprobs, not scoring) for ids in token_ids]
    return CompletionAnswer(service, request, prompts, num_top)


class CompletionAnswer(Answer):
    """Choices of text, with log probabilities in the shape of completions."""

    id_prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(
        self, service: Service, request: CompletionRequest, prompts: list[Prompt], num_top: int | None
    ) -> None:
        self._num_top = num_top
        self._texts = _prompt_texts(service, request.prompt, prompts) if request.echo else []
        self._written: dict[int, _Offsets] = {}
        super().__init__(service, request, prompts)

    def choice(self, delta: Delta) -> dict[str, Any] | None:
        """Text with its log probabilities; the echoed prompt comes with the first delta."""
        text, echoed = delta.text, []
        prompt = self.prompts[delta.index // self.num_samples]
        offsets = self._written.get(delta.index)
        if offsets is None:
            offsets = self._written[delta.index] = _Offsets(self.service)
            if self.request.echo:
                echo = self._texts[delta.index // self.num_samples]
                text, echoed = echo + text, prompt.token_ids
        if not (text or delta.finish_reason or delta.token_ids):
            return None
        logprobs = None
        if self._num_top is not None:
            chosen, top = delta.logprobs, delta.top_logprobs
            where: list[int] = []
            if echoed:
                where = offsets.of_prompt(echoed, echo)
                chosen = [None, *delta.prompt_logprobs, *chosen]
                top = [None, *delta.prompt_top, *top]
            where += offsets.of(delta.token_ids, self.request.skip_special_tokens is not False)
            logprobs = self._logprobs([*echoed, *delta.token_ids], chosen, top, where)
        elif not (text or delta.finish_reason or self.request.return_token_ids):
            return None
        return {"index": delta.index, "text": text, "logprobs": logprobs}

    def _logprobs(
        self, token_ids: list[int], chosen: list[float | None], top: TopLogprobs, where: list[int]
    ) -> dict[str, list]:
        """The four lists, one entry per token. The selected token is always among the likely ones."""
        name = self.service.names
        likely = [
            None if logprob is None else most_likely([*entries, (token_id, logprob)], name)
            for token_id, logprob, entries in zip(token_ids, chosen, top, strict=True)
        ]
        return {
            "tokens": [name(token_id)[0] for token_id in token_ids],
            "token_logprobs": [None if logprob is None else finite(logprob) for logprob in chosen],
            "top_logprobs": likely,
            "text_offset": where,
        }


class _Offsets:
    """Where tokens start in the text of a choice, in characters. Counted in bytes that begin a character, so that
    tokens which share a character have the place of that character."""

    def __init__(self, service: Service) -> None:
        self._name = service.names
        self._tokenizer = service.engine.tokenizer
        self._at = 0
        self._is_first = True

    def of_prompt(self, token_ids: list[int], text: str) -> list[int]:
        """Offsets of the tokens of an echoed prompt; what the tokenizer put before the text counts for nothing."""
        found = self._advance(token_ids)
        before = max(0, self._at - len(text))
        self._at = len(text)
        return [max(0, at - before) for at in found]

    def of(self, token_ids: list[int], skip_special: bool) -> list[int]:
        """Offsets of generated tokens."""
        if self._tokenizer is None:
            return [self._at] * len(token_ids)
        skipped = self._tokenizer.special_ids if skip_special else ()
        found = self._advance(token_ids, skipped)
        if token_ids and self._is_first:
            # Some decoders drop the space before the first word of a text.
            self._is_first = False
            exact = self._name(token_ids[0])[1]
            if exact[:1] == b" " and not self._tokenizer.token_text(token_ids[0]).startswith(" "):
                self._at -= 1
                found[1:] = [at - 1 for at in found[1:]]
        return found

    def _advance(self, token_ids: list[int], skipped: frozenset[int] | tuple = ()) -> list[int]:
        found = []
        for token_id in token_ids:
            exact = b"" if token_id in skipped else self._name(token_id)[1]
            inside = bool(exact) and exact[0] & 0xC0 == 0x80
            found.append(self._at - inside)
            self._at += sum(byte & 0xC0 != 0x80 for byte in exact)
        return found


def _prompt_texts(service: Service, given: Any, prompts: list[Prompt]) -> list[str]:
    """What echo repeats: text as it was given, token ids decoded."""
    texts = [given] if isinstance(given, str) or not isinstance(given[0], (str, list)) else given
    tokenizer = service.engine.tokenizer
    decoded = []
    for text, prompt in zip(texts, prompts, strict=True):
        if not isinstance(text, str):
            text = tokenizer.decode(prompt.token_ids, False) if tokenizer is not None else ""
        decoded.append(text)
    return decoded
