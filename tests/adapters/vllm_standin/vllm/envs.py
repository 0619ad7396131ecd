"""Variables that the plug-in reads."""

import tempfile

VLLM_CACHE_ROOT = tempfile.gettempdir()
