"""Names that other packages do not promise to keep: every use of one is in this folder.

Such a name can change in any version. A failing import or test then leads to one file, and `NAMES`
says with which versions the name was tried and what happens without it. `of_torch`, `of_lightning`
and so on contain the uses, by package, so that a command without PyTorch can import the others.
"""

from typing import NamedTuple


class PrivateName(NamedTuple):
    """A private name of another package: where it is, versions it was tried with, and its use."""

    name: str
    versions: str
    without: str


TORCH = "2.15.0"
LIGHTNING = "2.6.6"

NAMES = [
    PrivateName(
        "torch._C._current_graph_task_id",
        TORCH,
        "activation checkpointing would count the statistics of an M-step twice",
    ),
    PrivateName(
        "torch.autograd.Variable._execution_engine",
        TORCH,
        "a layer outside the training loop could not end its M-step after the backward pass",
    ),
    PrivateName(
        "torch.autograd.forward_ad._current_level",
        TORCH,
        "derivatives in forward mode would be wrong instead of an error",
    ),
    PrivateName(
        "torch._C._functorch.get_interpreter_stack",
        TORCH,
        "derivatives in forward mode inside vmap would be wrong instead of an error",
    ),
    PrivateName("torch._C._functorch.TransformType", TORCH, "as get_interpreter_stack"),
    PrivateName(
        "torch._fused_sdp_choice", TORCH, "the path MERGED could not choose a kernel on a CPU"
    ),
    PrivateName(
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
        TORCH,
        "the path MERGED, whose kernels return the logarithm of each sum, would form all logits",
    ),
    PrivateName(
        "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
        TORCH,
        "as _scaled_dot_product_flash_attention_for_cpu",
    ),
    PrivateName(
        "torch.ops.aten._scaled_dot_product_flash_attention",
        TORCH,
        "as _scaled_dot_product_flash_attention_for_cpu, on a GPU",
    ),
    PrivateName(
        "torch.ops.aten._scaled_dot_product_flash_attention_backward",
        TORCH,
        "as _scaled_dot_product_flash_attention_for_cpu, on a GPU",
    ),
    PrivateName(
        "torch.ops.aten._scaled_dot_product_efficient_attention",
        TORCH,
        "as _scaled_dot_product_flash_attention_for_cpu, on a GPU",
    ),
    PrivateName(
        "torch.ops.aten._scaled_dot_product_efficient_attention_backward",
        TORCH,
        "as _scaled_dot_product_flash_attention_for_cpu, on a GPU",
    ),
    PrivateName(
        "torch._disable_dynamo",
        TORCH,
        "a dry run would import the compiler, which takes over a second",
    ),
    PrivateName(
        "torch._dynamo.mark_static",
        TORCH,
        "flex_attention would be compiled with variable numbers of heads and keys, and fail",
    ),
    PrivateName(
        "torch._dynamo.config",
        TORCH,
        "a ninth combination of sizes would run uncompiled and form all logits",
    ),
    PrivateName(
        "torch._inductor.utils.fresh_cache",
        TORCH,
        "`bench compiling` would measure the cache of compiled code",
    ),
    PrivateName(
        "torch._dynamo.utils.counters", TORCH, "bench could not tell that a block was not compiled"
    ),
    PrivateName(
        "torch._dynamo.exc.TorchDynamoException",
        TORCH,
        "a network that cannot be compiled would end the cell instead of training uncompiled",
    ),
    PrivateName(
        "torch.utils._python_dispatch.TorchDispatchMode",
        TORCH,
        "parameters that variants share would not start equal",
    ),
    PrivateName(
        "torch._ops.OpOverload._schema",
        TORCH,
        "as TorchDispatchMode: which operations take a generator",
    ),
    PrivateName(
        "torch.utils._pytree.tree_flatten",
        TORCH,
        "the chunks of formed weights would need their own flattening of nested arguments",
    ),
    PrivateName("torch.utils._pytree.tree_unflatten", TORCH, "as tree_flatten"),
    PrivateName("torch._foreach_mul_", TORCH, "clipping would need a kernel for each parameter"),
    PrivateName(
        "torch.nn.modules.batchnorm._BatchNorm",
        TORCH,
        "batch norms over several devices would need a base of their own",
    ),
    PrivateName(
        "torch.nn.Module._forward_hooks",
        TORCH,
        "hooks of projections that are computed together would be forgotten",
    ),
    PrivateName("torch.nn.Module._forward_pre_hooks", TORCH, "as _forward_hooks"),
    PrivateName("torch.nn.Module._backward_hooks", TORCH, "as _forward_hooks"),
    PrivateName("torch.nn.Module._backward_pre_hooks", TORCH, "as _forward_hooks"),
    PrivateName(
        "torch.utils.data.DataLoader._iterator",
        TORCH,
        "workers of a loader would live until the process ends",
    ),
    PrivateName(
        "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers",
        TORCH,
        "as _iterator",
    ),
    PrivateName(
        "lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector"
        "._restore_modules_and_callbacks",
        LIGHTNING,
        "a failure to write a checkpoint would set aside the one from which the cell continues",
    ),
    PrivateName(
        "tensorboard.summary.writer.event_file_writer.EventFileWriter._file_name",
        "2.21.0",
        "the name of an event file would contain the name of the machine",
    ),
    PrivateName(
        "tensorboard.summary.writer.event_file_writer.EventFileWriter._general_file_writer",
        "2.21.0",
        "as _file_name",
    ),
    PrivateName(
        "transformers.PreTrainedConfig._attn_implementation",
        "5.23.0",
        "every replacement in a model of transformers would be refused",
    ),
    PrivateName(
        "argparse.ArgumentParser._actions",
        "Python 3.11",
        "`lit-attn completion` could not complete the names of files",
    ),
]
"""All private names of other packages that lit_attn uses."""
