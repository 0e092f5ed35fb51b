"""The facade: lists of prompts in, lists of dicts out. It has an engine, it is not one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from nanovllm.config import EngineConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.engine.tokenizer import Prompt, encode_prompts
from nanovllm.outputs import RequestOutput, SampleOutput, ScoreOutput, StreamOutput, TokenLogprob
from nanovllm.sampling_params import SamplingParams

Params = SamplingParams | list[SamplingParams] | None


class LLM:
    """A model ready to generate.

    Args:
        model: directory of a checkpoint in Hugging Face layout (config.json, safetensors, tokenizer).
        knobs: see `nanovllm.config.EngineConfig` for all of them.

    Raises:
        TypeError: an unknown knob, with the nearest known one.
        ValueError: a knob or a checkpoint that does not fit; says what, got, allowed.
        RuntimeError: a rank failed while it started; with its traceback.
    """

    def __init__(self, model: str, **knobs: Any) -> None:
        self.engine: LLMEngine | None = LLMEngine(EngineConfig.from_kwargs(model, **knobs))
        self._token_info: dict[int, tuple[str, bytes]] = {}

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.exit()

    def exit(self) -> None:
        """Free the model's memory; a second time does nothing."""
        if self.engine is not None:
            self.engine.exit()
            self.engine = None

    def generate(
        self, prompts: Prompt | list[Prompt], sampling_params: Params = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: one prompt or a list; each a string or a list of token ids.
            sampling_params: one for all, or one per prompt; defaults when None.
            use_tqdm: show requests done, prefill and decode tokens per second.

        Returns:
            one dict per prompt, in their order: see `nanovllm.outputs.RequestOutput`.

        Raises:
            ValueError: a prompt or its parameters cannot be served; nothing is queued then.
        """
        engine = self._require_engine()
        return self._generate(encode_prompts(engine.tokenizer, prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: list[dict] | list[list[dict]],
        sampling_params: Params = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or a batch of them, rendered by the model's own chat template.

        Args:
            messages: [{"role": ..., "content": ...}, ...] or a list of such lists.
            chat_template_kwargs: passed to the template, such as {"enable_thinking": False} for Qwen3.
            add_generation_prompt: end with the header of the assistant's turn.
            sampling_params, use_tqdm: as in `generate`, as is what it returns and raises.
        """
        engine = self._require_engine()
        if engine.tokenizer is None:
            raise ValueError("chat() needs a tokenizer, and skip_tokenizer_init is set; use generate() with token ids")
        if not isinstance(messages, (list, tuple)):
            raise TypeError(f"messages are a list of dicts, or a list of such lists, got {messages!r}")
        conversations = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        token_ids = engine.tokenizer.encode_chat(conversations, add_generation_prompt, chat_template_kwargs or {})
        return self._generate(token_ids, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[StreamOutput]:
        """Continue one prompt and yield text as it comes: never half a character, and joined it is the text that
        `generate` returns. Leaving the loop early ends the request.

        Raises:
            ValueError: as in `generate`, or n is not 1; on the call, not on the first item.
        """
        engine = self._require_engine()
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise ValueError(f"n={params.n} is not allowed in stream(): only 1")
        batch = encode_prompts(engine.tokenizer, prompt)
        if len(batch) != 1:
            raise ValueError(f"stream() takes one prompt, got {len(batch)}")
        engine.check_request(batch[0], params)
        return self._stream(engine, batch[0], params)

    def score(self, prompts: Prompt | list[Prompt], logprobs: int = 0) -> list[ScoreOutput]:
        """Log probability of every token of the prompts given the ones before it.

        Args:
            prompts: as in `generate`.
            logprobs: also the k most likely tokens at each place.

        Returns:
            one dict per prompt, in their order: see `nanovllm.outputs.ScoreOutput`.

        Raises:
            ValueError: as in `generate`.
            RuntimeError: the model's logits are not finite.
        """
        engine = self._require_engine()
        params = SamplingParams(logprobs=logprobs)
        token_ids = encode_prompts(engine.tokenizer, prompts)
        for ids in token_ids:
            engine.check_request(ids, params, num_new_tokens=0)
        # A single token has nothing before it.
        requests = (engine.add(ids, params, logprobs, generate=False) if len(ids) > 1 else [] for ids in token_ids)
        groups = self._run(engine, requests, progress=None)
        return [self._score_output(ids, group) for ids, group in zip(token_ids, groups, strict=True)]

    # How requests run

    def _generate(self, token_ids: list[list[int]], sampling_params: Params, use_tqdm: bool) -> list[RequestOutput]:
        engine = self._require_engine()
        requests = list(zip(token_ids, _one_per_prompt(sampling_params, len(token_ids)), strict=True))
        for ids, params in requests:
            engine.check_request(ids, params)
        with tqdm(total=len(requests), desc="Generating", disable=not use_tqdm, dynamic_ncols=True) as progress:
            groups = self._run(engine, (engine.add(ids, params) for ids, params in requests), progress)
        return [self._request_output(group) for group in groups]

    @contextmanager
    def _requests(self, engine: LLMEngine) -> Iterator[list[Sequence]]:
        """A list for the sequences of one call: whatever ends the call, they do not outlive it."""
        seqs: list[Sequence] = []
        try:
            try:
                yield seqs
            finally:
                engine.abort(seqs)
                engine.drain()
        except GeneratorExit:  # a stream that was left early
            raise
        except BaseException:
            # Ctrl-C too, and it can fall between any two lines: neither the books nor the device are trusted then.
            engine.recover()
            raise

    def _run(
        self, engine: LLMEngine, requests: Iterator[list[Sequence]], progress: tqdm | None
    ) -> list[list[Sequence]]:
        """Queue requests and step until all their sequences have ended; returns them, by request."""
        first = engine.stats.copy()
        with self._requests(engine) as seqs:
            groups = []
            for group in requests:
                groups.append(group)
                seqs += group
            request_of = {seq.seq_id: i for i, group in enumerate(groups) for seq in group}
            left = [len(group) for group in groups]
            while request_of:
                touched = self._step(engine)
                for seq in touched:
                    if seq.status is Status.FINISHED and seq.seq_id in request_of:
                        left[request_of.pop(seq.seq_id)] -= 1
                if progress is not None and touched:
                    progress.set_postfix_str(engine.stats.rates_since(first), refresh=False)
                    progress.update(left.count(0) - progress.n)
        return groups

    @staticmethod
    def _step(engine: LLMEngine) -> list[Sequence]:
        try:
            return engine.step()
        except BaseException:
            # Ctrl-C too can fall into the middle of a step: what the device holds then is not known.
            engine.recover()
            raise

    def _stream(self, engine: LLMEngine, token_ids: list[int], params: SamplingParams) -> Iterator[StreamOutput]:
        with self._requests(engine) as seqs:
            seqs += engine.add(token_ids, params, stream_text=True)
            seq, num_yielded = seqs[0], 0
            while True:
                finished = seq.status is Status.FINISHED
                new_ids = seq.output_token_ids[num_yielded:]
                delta = seq.text.take_delta() if seq.text is not None else ""
                if delta or finished or (new_ids and seq.text is None):
                    num_yielded += len(new_ids)
                    yield StreamOutput(
                        text=delta, token_ids=new_ids, finish_reason=seq.finish_reason, stop_reason=seq.stop_reason
                    )
                if finished:
                    return
                self._step(engine)

    def _require_engine(self) -> LLMEngine:
        if self.engine is None:
            raise RuntimeError("this LLM was closed by exit(); make a new one")
        return self.engine

    # From sequences to dicts

    def _request_output(self, seqs: list[Sequence]) -> RequestOutput:
        samples, first = [self._sample_output(seq) for seq in seqs], seqs[0]
        output = RequestOutput(
            **samples[0], prompt_token_ids=first.token_ids[: first.num_prompt_tokens],
            num_cached_tokens=first.num_cached_tokens, time_to_first_token=first.time_to_first_token,
        )  # fmt: skip
        if len(seqs) > 1:
            output["outputs"] = samples
        return output

    def _sample_output(self, seq: Sequence) -> SampleOutput:
        output = SampleOutput(
            text=self._text(seq), token_ids=seq.output_token_ids,
            finish_reason=seq.finish_reason, stop_reason=seq.stop_reason,
        )  # fmt: skip
        if seq.finish_reason == "error":
            output["error"] = seq.error
        if seq.params.logprobs is not None:
            output["logprobs"] = seq.logprobs
            output["top_logprobs"] = [self._top(entries) for entries in seq.top_logprobs]
        return output

    def _text(self, seq: Sequence) -> str:
        engine = self._require_engine()
        if engine.tokenizer is None:
            return ""
        if seq.text is None:
            seq.text = engine.new_text_stream(seq.params)
            seq.text.push(seq.output_token_ids)
            seq.text.finish()
        return seq.text.text

    def _score_output(self, token_ids: list[int], seqs: list[Sequence]) -> ScoreOutput:
        if seqs and seqs[0].finish_reason == "error":
            raise RuntimeError(f"cannot score: {seqs[0].error}")
        scores = [score for seq in seqs for score in seq.prompt_token_logprobs]
        tops = [self._top(entries) for seq in seqs for entries in seq.prompt_top_logprobs]
        return ScoreOutput(
            token_ids=token_ids, tokens=[self._info(token_id)[0] for token_id in token_ids],
            token_logprobs=[None, *scores], top_logprobs=[None, *tops], sum_logprob=float(sum(scores)),
        )  # fmt: skip

    def _top(self, entries: list[tuple[int, float]]) -> dict[int, TokenLogprob]:
        return {token_id: TokenLogprob(logprob, *self._info(token_id)) for token_id, logprob in entries}

    def _info(self, token_id: int) -> tuple[str, bytes]:
        """Text and bytes of a token, looked up once."""
        if token_id not in self._token_info:
            tokenizer = self._require_engine().tokenizer
            known = tokenizer is not None
            info = (tokenizer.token_text(token_id), tokenizer.token_bytes(token_id)) if known else ("", b"")
            self._token_info[token_id] = info
        return self._token_info[token_id]


def _one_per_prompt(params: Params, num_prompts: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if not isinstance(params, (list, tuple)) or not all(isinstance(one, SamplingParams) for one in params):
        raise TypeError(f"sampling_params are a SamplingParams or a list of them, got {params!r}")
    if len(params) != num_prompts:
        raise ValueError(f"{len(params)} sampling_params for {num_prompts} prompts: pass one for all or one per prompt")
    return list(params)
