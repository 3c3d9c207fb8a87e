"""Classes of PyTorch's compiler, whose import takes long; see NAMES in lit_attn.private_names."""

from torch._dynamo.exc import TorchDynamoException

__all__ = ["TorchDynamoException"]
