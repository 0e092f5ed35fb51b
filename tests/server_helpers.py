"""A server in this process, for the tests that talk to one."""

import threading
import time
from contextlib import contextmanager

import uvicorn

from nanovllm.config import EngineConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.server import cli
from nanovllm.server.app import create_app
from nanovllm.server.service import Service

MODEL = "tiny"


@contextmanager
def serving(path, api_key=None, origins=(), **knobs):
    """A server in a thread; yields its service and address."""
    given = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 256, "max_model_len": 512, **knobs}
    service = Service(LLMEngine(EngineConfig.from_kwargs(path, **given)), MODEL)
    sock = cli.listen("127.0.0.1", 0)
    app = create_app(service, api_key, origins)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
    server.install_signal_handlers = lambda: None
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield service, f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert service.thread.stop(20)
        sock.close()
