"""Quantize a model directory; the same as the command nanovllm-quantize.

python scripts/quantize.py --model DIR --output DIR --quantization int8
python scripts/quantize.py --model DIR --output DIR --quantization w8a8 --calibration TEXT_FILE
"""

import sys

from nanovllm.quantize import main

if __name__ == "__main__":
    sys.exit(main())
