# SPDX-License-Identifier: Apache-2.0
"""The model-parallel unit: what runs one model over several ranks. A table of contents.

comm             bytes between ranks: axes, transports, collectives, messages
grid             ranks -> axes: the tensor-, context-, data- and pipeline-parallel peers of a rank
connect          what carries each axis of a run: shared memory or the process group
param            Placement: which part of a tensor a parameter is, and who holds the rest
gradients        where layers put weight gradients, and when these are computed
interleave       two micro-batches that run interleaved on a rank
context          LayerContext, the one object a layer is given
auxiliary_loss   what a block adds to the loss
recompute        activation recomputation; activation_offload: activations in host memory
host_memory      page-locked memory of large tensors
overlap          collectives hidden by the matmul that runs meanwhile
layers           the parallel layers; attention and float8 are packages in it
pipeline         schedules as data, and the engine that executes them
zero             flat buckets of weights and gradients, and their sums
optim            the optimizer: norm, clip, update, state, offload
kernels          Triton kernels
native           the loader of the compiled library of csrc/
accelerators     whether a package of kernels (apex, Transformer Engine) can be used
launch           what the launcher says: this process's rank, where ranks meet
mup              muP: what the width of a model scales
param_grad       gradients in param.grad, for programs without mpu/zero
module_tracker   which module runs, for tools; driver, needs: why a GPU or a package is missing
"""
