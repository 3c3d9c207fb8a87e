from lit_attn.models.replace import replace_attention as replace_attention
from lit_attn.study import Study as Study

__version__: str
