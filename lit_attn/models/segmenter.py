"""Door of `lit_attn.segmentation` for a configuration file of mmengine, which imports this module.

docs/segmentation.md has an example. The import registers the Segmenter at mmsegmentation.
"""

from importlib import import_module

import_module("lit_attn.segmentation.segmenter")
