"""`python -m lit_attn.generate`: continue a text with a trained language model."""

import sys

from lit_attn.hub.generate import main

if __name__ == "__main__":
    sys.exit(main())
