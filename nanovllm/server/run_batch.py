"""`nanovllm-run-batch`: a file of OpenAI batch requests answered offline, a line each, by the server's own code."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError
from tqdm import tqdm

from nanovllm.config import EngineConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.server.chat import start_chat
from nanovllm.server.cli import add_engine_options, engine_config
from nanovllm.server.completions import start_completion
from nanovllm.server.protocol import ApiError, ChatRequest, CompletionRequest, validation_error
from nanovllm.server.service import Service

_ROUTES = {"/v1/completions": (CompletionRequest, start_completion), "/v1/chat/completions": (ChatRequest, start_chat)}


async def run(config: EngineConfig, lines: list[tuple[int, str]], output: TextIO) -> None:
    """Answer numbered lines, about as many at once as the engine has rows; each answer is written when it is there."""
    service = Service(LLMEngine(config), config.model)
    service.thread.start()
    slots = asyncio.Semaphore(2 * config.max_num_seqs)  # so that a row that falls free finds its next request waiting
    with tqdm(total=len(lines), unit="request") as bar:

        async def one(number: int, line: str) -> None:
            async with slots:
                output.write(json.dumps(await _answer(service, number, line), ensure_ascii=False) + "\n")
                output.flush()
                bar.update()

        try:
            await asyncio.gather(*(one(number, line) for number, line in lines))
        finally:
            await asyncio.to_thread(service.thread.stop, 60)


async def _answer(service: Service, number: int, line: str) -> dict[str, Any]:
    try:
        try:
            entry = json.loads(line)
            model, start = _ROUTES[entry["url"]]
            request = model.model_validate(entry["body"])
        except ValidationError as error:
            raise validation_error(error.errors()) from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ApiError(400, f"line {number} is no request for {' or '.join(_ROUTES)}: {error!r}") from None
        if request.stream:
            raise ApiError(400, "stream=true is not allowed in a batch", "stream")
        answer = await start(service, request.model_copy(update={"model": None}))
        status, body = 200, await answer.body()
    except ApiError as error:
        status, body = error.status, error.body
    head = {"id": f"batch-{number}", "custom_id": _object(line).get("custom_id")}
    return {**head, "response": {"status_code": status, "body": body}, "error": body.get("error")}


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # the latter of brackets in brackets in brackets
        return {}
    return found if isinstance(found, dict) else {}


def unanswered(lines: list[str], answers: str) -> list[tuple[int, str]]:
    """Lines, with their numbers, that `answers` of an earlier run has nothing for. A line without a custom_id is known
    by its number; an answer that was cut off does not count."""
    known = {answer.get("custom_id") or answer.get("id") for answer in map(_object, answers.splitlines())}
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    return [
        (number, line) for number, line in numbered if _object(line).get("custom_id", f"batch-{number}") not in known
    ]


def main(argv: list[str] | None = None) -> int:
    """Run a batch; returns the exit status. A second run with the same files does what is left."""
    parser = argparse.ArgumentParser(prog="nanovllm-run-batch", description=__doc__)
    parser.add_argument("-i", "--input", required=True, type=Path, help="a JSON object a line: custom_id, url, body")
    parser.add_argument("-o", "--output", required=True, type=Path, help="answers are added to it")
    add_engine_options(parser.add_argument_group("engine"))
    args = parser.parse_args(argv)
    try:
        before = args.output.read_text(encoding="utf-8") if args.output.exists() else ""
        lines = unanswered(args.input.read_text(encoding="utf-8").splitlines(), before)
        with args.output.open("a", encoding="utf-8") as output:
            output.write("\n" if before and not before.endswith("\n") else "")
            asyncio.run(run(engine_config(args), lines, output))
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: what was answered is written; run it again for the rest", file=sys.stderr)
        return 130
    return 0
