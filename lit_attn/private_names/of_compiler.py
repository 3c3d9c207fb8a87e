"""Classes of PyTorch's compiler, whose import takes long; see NAMES in lit_attn.private_names."""

from torch._dynamo.exc import TorchDynamoException
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["FakeTensorMode", "TorchDynamoException"]
