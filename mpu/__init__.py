# SPDX-License-Identifier: Apache-2.0
"""The model-parallel unit: everything that runs one model over several ranks. Table of contents:

comm             communication between ranks: axes, transports, collectives, messages
grid             ranks -> axes: the tensor-, context-, data- and pipeline-parallel peers of a rank
connect          selects the transport of each axis: shared memory or the process group
param            Placement: which part of a tensor a parameter is, and which ranks hold the rest
gradients        the sink of weight gradients, and the queue that may defer them
interleave       two micro-batches that run interleaved on a rank
context          LayerContext, the one object that a layer receives
auxiliary_loss   losses that blocks add to the training loss
recompute        activation recomputation; activation_offload: activations in host memory
host_memory      page-locked memory of large tensors
overlap          collectives that overlap with matmuls
layers           the parallel layers; attention and float8 are packages in it
pipeline         schedules as data, and the engine that executes them
zero             flat buckets of weights and gradients, and their sums
optim            the optimizer: norm, clip, update, state, offload
kernels          Triton kernels
native           the loader of the compiled library of csrc/
accelerators     whether a package of kernels (apex, Transformer Engine) can be used
launch           reads the launcher's environment: this process's rank, and the rendezvous
mup              muP: scaling with the width of a model
param_grad       gradients in param.grad, for programs without mpu/zero
module_tracker   which module runs, for tools; driver, needs: why a GPU or a package is missing
"""
