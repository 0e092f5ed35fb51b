"""nanovllm: offline inference for language models.

from nanovllm import LLM, SamplingParams
"""

from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]
